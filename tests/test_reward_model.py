"""A sequence-classification model as a reward part."""

from __future__ import annotations

import json

import pytest
import torch

from reasonrl.errors import ModelError
from reasonrl.reward_model import RewardModelConfig, load_reward_model
from reasonrl.train import train
from reasonrl.types import Problem

KEY = "reward.parts.judge.model"


@pytest.fixture
def make_judge(policy, tmp_path):
    """Write a small reward model with the policy's tokenizer: make_judge(labels=1, window=64) -> folder."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    def make(labels=1, window=64, kind=Qwen3ForSequenceClassification):
        torch.manual_seed(0)
        vocab = {"vocab_size": len(policy.tokenizer), "pad_token_id": policy.pad_id}
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": labels}
        config = Qwen3Config(max_position_embeddings=window, **vocab, **sizes, **heads)
        model = kind(config)
        folder = tmp_path / f"judge-{labels}-{window}-{kind.__name__}"
        model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def load(folder, **more):
    return load_reward_model(RewardModelConfig(path=folder, device="cpu", dtype="float32", **more), KEY)


def pairs():
    texts = ["3[", "3[3d]d$", "3", "[3d4h]h$", "d$"]
    return [Problem(str(i), "^345="[: 3 + i % 3], "c") for i in range(len(texts))], texts


def test_scores_do_not_depend_on_the_rows_that_share_a_batch(make_judge):
    folder = make_judge()
    problems, texts = pairs()
    together = load(folder, batch_size=4)(problems, texts)
    alone = [load(folder)([problem], [text])[0] for problem, text in zip(problems, texts, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5) and len(set(together)) == len(texts)


def test_a_pair_longer_than_the_window_is_not_scored_rather_than_cut(make_judge):
    problems, texts = pairs()
    scores = load(make_judge(window=16))(problems, [texts[0], "3d" * 20, *texts[2:]])
    assert scores[1] is None and all(score is not None for score in [scores[0], *scores[2:]])


def test_a_model_with_two_outputs_is_refused_by_key(make_judge):
    with pytest.raises(ModelError, match=rf"{KEY}.path=.* has 2 outputs"):
        load(make_judge(labels=2))


def test_a_causal_model_without_a_trained_head_is_refused(make_judge):
    from transformers import Qwen3ForCausalLM

    with pytest.raises(ModelError, match="no weights for score.weight"):
        load(make_judge(kind=Qwen3ForCausalLM))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=rf"{KEY}.path=.*nowhere could not be loaded"):
        load(str(tmp_path / "nowhere"))


def test_a_run_trains_on_it_and_warns_without_kl(make_config, make_judge, tmp_path):
    judge = {"weight": 0.5, "model": {"path": make_judge(), "device": "cpu"}}
    config = make_config({"reward.parts": {"correctness": {"weight": 1.0}, "judge": judge}}, steps=1)
    train(config, tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["type"] == "step")
    assert step["metrics"]["reward/judge"] != 0 and step["metrics"]["data/invalid"] == 0
    assert any("reward model without a KL term" in event.get("message", "") for event in events)
