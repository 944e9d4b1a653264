"""Rewards in parts: values, format checkers on text and ids, repetition, and weight schedules."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from reasonrl.errors import ConfigError, VerifierError
from reasonrl.overlong import OverlongConfig
from reasonrl.rewards import (
    PartConfig,
    RewardConfig,
    WeightSchedule,
    format_check,
    load_scorers,
    repetition_share,
    reward_parts,
    think_format,
    think_format_ids,
)
from reasonrl.types import Completions, Problem, Rollouts

ALL_PARTS = {"correctness": PartConfig(), "format": PartConfig(weight=0.3), "repetition": PartConfig(weight=0.1)}


def rollouts(lengths, correct, texts=None):
    """One problem, a row per length; ids count 1, 2, 3, ... except the last row, which repeats one token."""
    width = max(lengths)
    ids = torch.arange(1, width + 1).repeat(len(lengths), 1)
    ids[-1] = 7
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).long()
    zeros = torch.zeros(len(lengths), width)
    done = Completions(ids, mask, zeros, zeros, zeros, ["stop"] * len(lengths))
    texts = texts or ["text"] * len(lengths)
    return Rollouts([Problem("p", "?", "1")], [[1]], done, texts, {}, torch.tensor([correct]), [])


def parts_of(config, found, overlong=None, max_new_tokens=10):
    good = lambda prompt, ids, text: (prompt, ids[0], text) == ([1], 1, "good")  # noqa: E731
    parts = reward_parts(config, overlong or OverlongConfig(), found, max_new_tokens, good, load_scorers(config))
    return {name: part[0].tolist() for name, part in parts.items()}


def test_parts_stay_apart_and_unweighted():
    found = parts_of(RewardConfig(parts=ALL_PARTS), rollouts([4, 5], [1.0, 0.0], ["good", "bad"]))
    # the last row repeats one 4-gram: 2 of them, 1 distinct
    assert found == {"correctness": [1.0, 0.0], "format": [1.0, 0.0], "repetition": [0.0, -0.5]}


def test_right_and_wrong_are_worth_what_is_configured():
    config = RewardConfig(correct=1.0, wrong=-1.0)
    assert parts_of(config, rollouts([2, 2, 2], [1.0, 0.0, 0.5])) == {"correctness": [1.0, -1.0, 0.0]}


def test_soft_overlong_is_its_own_part_scaled_to_the_reward_span():
    # limit 100, cache 20, length 90: -0.5 for a span of 2 (+-1), so -0.25 for a span of 1 (0 and 1)
    soft, found = OverlongConfig(kind="soft", cache_tokens=20), rollouts([90, 80], [1.0, 1.0])
    assert parts_of(RewardConfig(), found, soft, 100)["overlong_soft"] == pytest.approx([-0.25, 0.0])
    assert parts_of(RewardConfig(wrong=-1.0), found, soft, 100)["overlong_soft"] == pytest.approx([-0.5, 0.0])


def lengths_of(problems, texts):
    """A user's reward: the text's length, None where there is no text."""
    return [len(text) or None for text in texts]


def test_a_users_function_gets_problems_and_texts_and_none_means_no_reward():
    config = RewardConfig(parts={"mine": PartConfig(function=f"{__name__}.lengths_of")})
    found = parts_of(config, rollouts([1, 1], [0.0, 0.0], ["abc", ""]))["mine"]
    assert found[0] == 3.0
    assert math.isnan(found[1])


def test_a_users_function_that_is_not_there_is_named_with_its_key():
    config = RewardConfig(parts={"mine": PartConfig(function="no_such_module.reward")})
    with pytest.raises(ConfigError, match=r"reward\.parts\.mine\.function=no_such_module\.reward"):
        parts_of(config, rollouts([1], [0.0]))


def test_a_users_function_that_forgets_a_row_is_told_so():
    config = RewardConfig(parts={"mine": PartConfig(function=f"{__name__}.only_one")})
    with pytest.raises(VerifierError, match=r"reward\.parts\.mine gave 1 rewards for 2 completions"):
        parts_of(config, rollouts([1, 1], [0.0, 0.0]))


def only_one(problems, texts):
    """A user's reward that loses rows."""
    return [1.0]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>because</think>42", True),
        ("  <think>two\nlines</think>\n\nThe answer is 42.", True),
        ("<think></think>42", True),
        ("<think>no answer</think>", False),
        ("<think>no answer</think>  \n", False),
        ("42 <think>late</think>", False),
        ("first <think>then</think>42", False),
        ("</think>wrong order<think>42", False),
        ("<think>never closed 42", False),
        ("no tags 42", False),
        ("<think>a</think><think>b</think>42", False),
        ("<think>a<think>b</think>42", False),
        ("<think>a</think>42</think>", False),
        ("", False),
    ],
)
def test_think_format_wants_both_tags_once_in_order_with_an_answer_behind(text, good):
    assert think_format(text) is good
    # the same on ids: 1 and 2 are the tags, 0 is white space, anything else is text
    pieces = text.replace("<think>", "\1").replace("</think>", "\2")
    ids = [{"\1": 1, "\2": 2}.get(piece, 0 if piece.isspace() else 9) for piece in pieces]
    assert think_format_ids(ids, 1, 2, frozenset({0})) is good


def tokenizer_of(*, special):
    """A word tokenizer in which the two tags are special tokens or ordinary added ones."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "42": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]")
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")], special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("prompt", "text", "good"),
    [
        ("a", "<think> a </think> 42 </s>", True),
        ("a", "<think> a </think> </s>", False),
        ("a", "a </think> 42 </s>", False),
        ("a <think>", "a </think> 42 </s>", True),  # the chat template opened the tag
        ("a <think>", "<think> a </think> 42 </s>", False),
        ("<think> a </think>", "a </think> 42 </s>", False),
        ("a", "42 </s>", False),
    ],
)
def test_format_is_read_from_ids_where_the_text_has_lost_its_tags(special, prompt, text, good):
    tokenizer = tokenizer_of(special=special)
    policy = SimpleNamespace(tokenizer=tokenizer, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    task = SimpleNamespace(thinks=True, format_ok=think_format)
    ids = tokenizer(text)["input_ids"]
    decoded = policy.decode(ids)
    assert ("think" in decoded) == (not special and "think" in text)
    assert format_check(policy, task)(tokenizer(prompt)["input_ids"], ids, decoded) is good


def test_a_task_with_a_form_of_its_own_is_asked_itself():
    assert format_check(None, SimpleNamespace(format_ok=lambda text: text == "x"))([], [], "x")


@pytest.mark.parametrize(
    ("ids", "n", "share"),
    [
        ([1, 2, 3, 4, 5], 2, 0.0),
        ([1, 2, 1, 2, 1], 2, 0.5),  # 12 21 12 21: two of four are repeats
        ([7] * 13, 4, 0.9),  # ten 4-grams, one distinct
        ([1, 2, 3], 4, 0.0),  # shorter than one n-gram
        ([], 4, 0.0),
    ],
)
def test_repetition_is_the_share_of_n_grams_seen_before(ids, n, share):
    assert repetition_share(ids, n) == pytest.approx(share)


def schedule():
    part = PartConfig(weight=1.0, decay_to=0.2, decay_at=0.9, decay_steps=4)
    return WeightSchedule({"format": part, "correctness": PartConfig(weight=2.0)})


def test_format_weight_stays_until_learned_then_falls_in_a_line_and_rests():
    weights = schedule()
    weights.update(1, {"format": 0.5})
    assert weights.weight("format", 1) == 1.0
    # running mean .9 * .5 + .1 = .55, .595, ...: 1 - .5 * .9^k passes .9 first at k = 16
    for step in range(2, 30):
        weights.update(step, {"format": 1.0, "correctness": 0.1})
    assert weights.learned_at == {"format": 17}
    found = [weights.weight("format", step) for step in (17, 18, 19, 20, 21, 40)]
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert weights.weight("correctness", 40) == 2.0


def test_a_relapse_does_not_restart_the_schedule():
    weights = schedule()
    weights.update(1, {"format": 0.95})
    weights.update(2, {"format": 0.0})
    weights.update(3, {"format": 1.0})
    assert weights.learned_at == {"format": 1}


def test_a_step_without_a_usable_reward_does_not_poison_the_running_mean():
    weights = schedule()
    weights.update(1, {"format": 0.8})
    weights.update(2, {"format": math.nan})
    weights.update(3, {})
    assert weights.running == {"format": 0.8}


def test_a_part_made_by_another_module_weighs_one():
    assert schedule().weight("overlong_soft", 3) == 1.0
