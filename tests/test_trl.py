"""`trainer=trl`: what is refused, what is mapped, and that a run under TRL leaves the record of any other run."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reasonrl.config import canonical, run_key, validate
from reasonrl.entropy import top_entropy_mask
from reasonrl.errors import ConfigError, TrainingError
from reasonrl.events import read_events
from reasonrl.kl import ESTIMATORS
from reasonrl.logprobs import completion_logprobs
from reasonrl.loss import LOSSES, token_weights
from reasonrl.metrics import METRICS, TIMINGS
from reasonrl.randomness import uniforms
from reasonrl.rollout.generate import generate
from reasonrl.train import train
from reasonrl.trl_options import grpo_arguments

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")

REFUSED: dict[str, dict[str, Any]] = {
    "data.kind": {"data.kind": "dynamic_sampling"},
    "data.difficulty_gate": {"data.difficulty_gate": 3},
    "loss.aggregation": {"loss.aggregation": "prompt_mean"},
    "loss.dual_clip": {"loss.dual_clip": 1.1},
    "kl.kind": {"kl.kind": "k2", "kl.coef": 0.1},
    "kl.monitor": {"kl.monitor": True},
    "kl.coef": {"kl.kind": "k3", "kl.coef": {"n4": 0.1}},
    "kl.token_weight": {"kl.kind": "k3", "kl.coef": 0.1, "kl.token_weight": "linear"},
    "model.gguf_file": {"kl.kind": "k3", "kl.coef": 0.1, "model.gguf_file": "a.gguf"},
    "advantage.kind": {"advantage.kind": "rloo"},
    "advantage.eps": {"advantage.eps": 1e-3},
    "entropy.kind": {"entropy.kind": "kl_cov"},
    "entropy.scope": {"entropy.kind": "top_mask", "entropy.scope": "sequence"},
    "sampling.temperature_high": {"sampling.temperature_high": 1.2, "sampling.entropy_threshold": 1.0},
    "sampling.top_p": {"sampling.top_p": 0.9, "sampling.replay_filter": True},
    "sampling.top_k": {"sampling.top_k": 5, "sampling.replay_filter": True},
    "optim.minibatches": {"optim.minibatches": 3},
    "optim.micro_batch_size": {"optim.micro_batch_size": 3},
    "trl.options.beta": {"trl.options": {"beta": 0.1}},
    "trl.options.deepspeed": {"trl.options": {"deepspeed": "zero3.json"}},
    "reward.parts.format.decay_to": {
        "reward.parts": {"correctness": {"weight": 1.0}, "format": {"weight": 1.0, "decay_to": 0.2}}
    },
}


def keys_of(config: Any) -> set[str]:
    return {mistake.key for mistake in validate(config)} - {"trainer"}  # TRL itself may be missing


@pytest.mark.parametrize("key", REFUSED)
def test_what_trl_lacks_is_refused_by_name_and_only_there(make_config, key):
    assert keys_of(make_config(REFUSED[key], trainer="trl")) == {key}
    rest = {name: value for name, value in REFUSED[key].items() if not name.startswith("trl.")}
    assert keys_of(make_config(rest, trainer="ours")) == set()


def test_plain_configuration_is_accepted(make_config):
    assert keys_of(make_config(trainer="trl")) == set()


def test_missing_trl_is_said_before_anything_runs(make_config, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = [str(mistake) for mistake in validate(make_config(trainer="trl"))]
    assert found == ["trainer=trl: needs TRL, which is not installed. pip install 'reasonrl[trl]'."]


def test_unknown_trainer_and_idle_options_are_mistakes(make_config):
    assert {mistake.key for mistake in validate(make_config(trainer="verl"))} == {"trainer"}
    assert keys_of(make_config({"trl.options": {"use_vllm": True}})) == {"trl.options"}


def test_trainer_is_part_of_a_runs_identity_and_its_options_only_under_trl(make_config):
    ours, trl = make_config(), make_config(trainer="trl")
    assert run_key(ours) != run_key(trl)
    assert "trl" not in canonical(ours)
    vllm = make_config({"trl.options": {"use_vllm": True}}, trainer="trl")
    assert run_key(vllm) != run_key(trl)


def test_batches_come_out_as_ours_are(make_config):
    settings = {
        "data.prompts_per_step": 6,
        "optim.minibatches": 3,
        "optim.inner_epochs": 2,
        "optim.micro_batch_size": 4,
    }
    found = grpo_arguments(make_config({**settings, "sampling.group_size": 4}), steps=5, processes=1)
    # 24 rows a step, 3 minibatches of 8 rows in 2 micro-batches of 4, each used twice: 6 updates a step
    assert found["per_device_train_batch_size"] == 4
    assert found["gradient_accumulation_steps"] == 2
    assert found["steps_per_generation"] * found["per_device_train_batch_size"] == 24
    assert found["num_iterations"] == 2
    assert found["max_steps"] == 30


def small(make_config: Any, overrides: dict[str, Any] | None = None, **top: Any) -> Any:
    return make_config({"sampling.max_new_tokens": 8, **(overrides or {})}, trainer="trl", **top)


def rows_of(run_dir: Any) -> list[dict[str, Any]]:
    rows = [event for event in read_events(run_dir / "events.jsonl") if event["type"] == "step"]
    return [{name: value for name, value in row["metrics"].items() if not name.startswith(TIMINGS)} for row in rows]


@needs_trl
def test_run_leaves_the_record_of_any_run(make_config, tmp_path, capsys):
    seen: list[str] = []
    summary = train(
        small(make_config, {"checkpoint.every": 2}, steps=3), tmp_path, lambda event: seen.append(event["type"])
    )
    assert summary.status == "finished" and summary.step == 3
    assert capsys.readouterr().out == ""  # quiet, TRL too
    kinds = ["start", "warning", "eval", "samples"]
    assert [kind for kind in seen if kind not in ("alert", "warning")] == [
        kind for kind in kinds if kind != "warning"
    ] + ["step", "eval", "samples", "step", "checkpoint", "eval", "samples", "step", "checkpoint", "end"]
    events = list(read_events(tmp_path / "events.jsonl"))
    assert events[0]["versions"]["trl"]
    step = next(event for event in events if event["type"] == "step")
    assert set(step["metrics"]) <= set(METRICS)
    wanted = {
        "reward/total",
        "reward/std",
        "groups/flat",
        "entropy/mean",
        "clip/fraction",
        "length/mean",
        "optim/grad_norm",
    }
    assert wanted <= set(step["metrics"])
    assert step["metrics"]["optim/updates"] == 2


@needs_trl
def test_weights_move_at_our_learning_rate(make_config, tmp_path):
    from safetensors.torch import load_file

    config = small(make_config, {"checkpoint.every": 1, "optim.lr": 1e-3, "optim.warmup_steps": 2}, steps=2)
    train(config, tmp_path)
    first, second = (
        load_file(tmp_path / "checkpoints" / f"step_00000{step}" / "weights.safetensors") for step in (1, 2)
    )
    moved = max(float((second[name] - first[name]).abs().max()) for name in first)
    assert 1e-3 < moved < 2.5e-3  # two Adam updates of about lr each
    assert [row["optim/lr"] for row in rows_of(tmp_path)] == [5e-4, 1e-3]


@needs_trl
def test_paused_run_continues_bit_for_bit(make_config, tmp_path):
    config = small(make_config, steps=4)
    train(config, tmp_path / "whole")
    pause = train(config, tmp_path / "parts", lambda e: "pause" if e["type"] == "step" and e["step"] == 2 else None)
    assert (pause.status, pause.step) == ("paused", 2)
    assert train(config, tmp_path / "parts").status == "finished"
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


@needs_trl
def test_stop_acts_within_the_step_and_leaves_a_checkpoint(make_config, tmp_path):
    summary = train(small(make_config), tmp_path, lambda event: "stop" if event["type"] == "step" else None)
    assert (summary.status, summary.step) == ("stopped", 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


@needs_trl
def test_stop_alert_ends_the_run_with_its_reason(make_config, tmp_path, monkeypatch):
    from reasonrl.alerts import Alert

    def update(self: Any, step: int, metrics: Any) -> list[Any]:
        found = Alert("A03", "entropy collapse", "stop", step, "entropy is gone", {"window": [1, step]}, [])
        return [found] if step == 2 else []

    monkeypatch.setattr("reasonrl.run.AlertMonitor.update", update)
    summary = train(small(make_config, {"alerts.on_stop": "stop"}, steps=5), tmp_path)
    assert (summary.status, summary.step) == ("stopped", 2)
    assert summary.reason["code"] == "A03"
    assert (tmp_path / "checkpoints" / "step_000002").is_dir()


@needs_trl
def test_weights_that_are_no_longer_finite_end_the_run_before_they_are_kept(make_config, tmp_path):
    with pytest.raises(TrainingError, match="non-finite in step 1"):
        train(small(make_config, {"optim.lr": 1e38, "checkpoint.every": 1}, steps=3), tmp_path)
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event["type"] for event in events[-2:]] == ["step", "end"]
    assert (events[-1]["status"], events[-1]["error_class"]) == ("failed", "non_finite")
    assert not (tmp_path / "checkpoints").exists()


@needs_trl
def test_flat_groups_are_counted_from_correctness(make_config, tmp_path):
    # the format part differs inside groups, so TRL's own count, of the summed reward, sees fewer flat groups
    parts = {"correctness": {"weight": 1.0}, "repetition": {"weight": 1.0}}
    train(small(make_config, {"reward.parts": parts, "reward.random": False}, steps=1), tmp_path)
    row = rows_of(tmp_path)[0]
    assert row["reward/correctness"] == 0.0  # the raw base is never right
    assert row["groups/flat"] == row["groups/all_wrong"] == 1.0


@needs_trl
def test_unknown_option_is_named(make_config, tmp_path):
    with pytest.raises(ConfigError, match="trl.options.use_vlm"):
        train(small(make_config, {"trl.options": {"use_vlm": True}}), tmp_path)


LOSS_CASES: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip_higher": {"loss.low": 0.1, "loss.high": 0.3},
    "dual_clip": {"loss.dual_clip": 1.5},
    "sequence_mean": {"loss.aggregation": "sequence_mean"},
    "constant": {"loss.aggregation": "constant"},
    "gspo": {"loss.kind": "gspo", "loss.low": 0.01, "loss.high": 0.02, "loss.aggregation": "sequence_mean"},
    "cispo": {"loss.kind": "cispo", "loss.cap": 1.2},
    "k3": {"kl.kind": "k3", "kl.coef": 0.3},
    "k3_unbiased": {"kl.kind": "k3_unbiased", "kl.coef": 0.3},
    "temperature": {"sampling.temperature": 0.7},
    "bonus": {"entropy.kind": "bonus", "entropy.coef": 0.1},
    "top_mask": {"entropy.kind": "top_mask", "entropy.rho": 0.3},
}


@needs_trl
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", LOSS_CASES)
def test_loss_under_trl_has_the_gradient_of_ours(make_config, tmp_path, case):
    from reasonrl.run import open_run
    from reasonrl.trl_trainer import _load, make_trainer

    config = small(make_config, {**LOSS_CASES[case], "optim.minibatches": 1})
    assert keys_of(config) == set()
    with open_run(config, tmp_path, lambda event: None, load=_load) as run:
        trainer = make_trainer(run)
        policy, size = run.policy, config.sampling.group_size
        prompts = [policy.encode(problem) for problem in run.problems.take(4)]
        noise = torch.from_numpy(uniforms(4 * size, 8, "trl"))
        done = generate(policy, prompts, size, config.sampling, noise)
        rows, owner = torch.arange(4 * size), torch.arange(4).repeat_interleave(size)
        torch.manual_seed(3)
        old = done.logprobs_BT + 0.4 * torch.randn_like(done.logprobs_BT)
        ref = done.logprobs_BT + 0.4 * torch.randn_like(done.logprobs_BT)
        advantages, mask = torch.randn(4 * size), done.mask_BT.float()

        def gradient(loss: torch.Tensor) -> torch.Tensor:
            policy.model.zero_grad()
            loss.backward()
            return torch.cat([p.grad.flatten() for p in policy.trainable()])

        width = max(map(len, prompts))
        left = [[policy.pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        inputs = {
            "prompt_ids": torch.tensor(left)[owner],
            "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])[owner],
            "completion_ids": done.ids_BT,
            "completion_mask": done.mask_BT,
            "advantages": advantages,
            "num_items_in_batch": done.mask_BT.sum(),
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
        }
        trainer.current_gradient_accumulation_steps = 1
        policy.model.train()
        theirs = gradient(trainer._compute_loss(policy.model, inputs))
        policy.model.eval()

        logprobs, entropy = completion_logprobs(policy, prompts, owner, done, rows, with_entropy=True)
        if config.entropy.kind == "top_mask":
            mask = top_entropy_mask(entropy.detach(), mask, config.entropy.rho).float()
        weights, _ = token_weights(mask, owner, config.loss.aggregation, config.sampling.max_new_tokens)
        if config.entropy.kind == "top_mask":  # TRL divides by all tokens, not by the kept ones
            weights = weights * mask.sum() / done.mask_BT.sum()
        loss = (LOSSES[config.loss.kind](logprobs, old, advantages, mask, config.loss).loss_BT * weights).sum()
        if config.kl.kind != "off":
            loss = loss + config.kl.coef * (ESTIMATORS[config.kl.kind](logprobs, ref, old) * weights).sum()
        if config.entropy.kind == "bonus":
            loss = loss - config.entropy.coef * (entropy * weights).sum()
        ours = gradient(loss)
    assert (ours - theirs).norm() < 1e-4 * ours.norm()


def test_module_needs_no_trl_to_say_what_it_maps():
    config = SimpleNamespace(trainer="ours", trl=SimpleNamespace(options={}))
    from reasonrl.trl_options import mistakes

    assert list(mistakes(config)) == []
