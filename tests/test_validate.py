"""What is known to be wrong before any work starts, and which settings make no difference."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from reasonrl.config import Config, canonical, doubts, from_dict, run_key, validate
from reasonrl.errors import ConfigError
from reasonrl.rewards import PartConfig


def config(**overrides):
    """A default configuration with dotted keys, written with __ for the dots."""
    values: dict = {}
    for key, value in overrides.items():
        *path, last = key.split("__")
        section = values
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return from_dict(values)


def keys(**overrides):
    return [mistake.key for mistake in validate(config(**overrides))]


def test_the_default_configuration_is_sound():
    assert validate(Config()) == []
    assert doubts(Config()) == []


GUARDS = {
    "sampling.group_size": ({"sampling__group_size": 1}, "at least 2"),
    "kl.kind": ({"kl__kind": "k1", "kl__coef": 0.1}, "expected gradient of zero"),
    "sampling.top_p": ({"sampling__top_p": 0.9}, "another distribution"),
    "sampling.top_k": ({"sampling__top_k": 50}, "another distribution"),
    "advantage.kind": ({"advantage__kind": "gdpo"}, "two or more reward parts"),
    "kl.coef": ({"kl__coef": 0.1}, "no effect with kl.kind=off"),
    "kl.in_reward": ({"kl__kind": "k3", "kl__coef": 0.1, "kl__in_reward": True}, "uses k1"),
    "loss.dual_clip": ({"loss__dual_clip": 0.5}, "above 1"),
    "loss.low": ({"loss__low": 0.0}, "above 0"),
    "loss.high": ({"loss__high": -0.1}, "above 0"),
    "loss.cap": ({"loss__cap": 0.0}, "above 0"),
    "optim.lr": ({"optim__lr": 0.0}, "above 0"),
    "optim.minibatches": ({"optim__minibatches": 33}, "whole prompts"),
    "optim.micro_batch_size": ({"optim__micro_batch_size": 0}, "at least 1"),
    "optim.betas": ({"optim__betas": [0.9]}, "two numbers"),
    "overlong.cache_tokens": ({"overlong__kind": "soft", "overlong__cache_tokens": 28}, "max_new_tokens=28"),
    "entropy.rho": ({"entropy__kind": "top_mask", "entropy__rho": 0.0}, "above 0"),
    "entropy.cov_share": ({"entropy__kind": "kl_cov", "entropy__cov_share": 2.0}, "at most 1"),
    "entropy.cov_low": ({"entropy__kind": "clip_cov", "entropy__cov_low": 9.0}, "below entropy.cov_high"),
    "sampling.temperature_high": ({"sampling__temperature_high": 1.2}, "set both or neither"),
    "sampling.temperature": ({"sampling__temperature": 0.0}, "above 0"),
    "eval.max_new_tokens": ({"eval__max_new_tokens": 0}, "at least 1"),
    "reward.correct": ({"reward__correct": 0.0}, "above reward.wrong"),
    "reward.parts.mine": ({"reward__parts": {"mine": {}, "correctness": {}}}, "unknown part"),
    "reward.parts": ({"reward__parts": {"correctness": {"weight": 0.0}}}, "all weigh 0"),
    "reward.parts.rm.model.path": ({"reward__parts": {"rm": {"model": {"path": ""}}}}, "a folder or a hub name"),
    "reward.parts.rm.model": (
        {"reward__parts": {"rm": {"function": "a.b", "model": {"path": "m"}}}},
        "excludes .function",
    ),
    "reward.parts.rm.model.dtype": (
        {"reward__parts": {"rm": {"model": {"path": "m", "dtype": "int8"}}}},
        "one of auto",
    ),
    "task.operands": ({"task__operands": [9]}, "always sum to 45"),
    "model.base_operands": ({"model__base_operands": [9]}, "from 2 to 8"),
    "model.path": ({"model__kind": "hf"}, "is not set"),
    "model.kind": ({"task__kind": "records", "task__path": "tests/data"}, "knows only the characters"),
    "checkpoint.keep": ({"checkpoint__keep": 0}, "at least 1"),
}


@pytest.mark.parametrize(("key", "case"), GUARDS.items(), ids=GUARDS)
def test_each_mistake_is_found_with_key_reason_and_alone(key, case):
    overrides, reason = case
    mistakes = [mistake for mistake in validate(config(**overrides)) if mistake.key == key]
    assert len(mistakes) == 1
    assert reason in str(mistakes[0])


@pytest.mark.parametrize("section", ["data", "loss", "kl", "advantage", "entropy", "overlong", "model", "tracking"])
def test_an_unknown_kind_lists_the_known_ones(section):
    mistakes = [m for m in validate(config(**{f"{section}__kind": "nonsense"})) if m.key == f"{section}.kind"]
    assert len(mistakes) == 1
    assert str(mistakes[0]).startswith(f"{section}.kind=nonsense: unknown; choose ")
    default = getattr(Config(), section).kind
    assert default in mistakes[0].allowed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(bad):
    found = keys(optim__lr=bad, optim__weight_decay=bad, sampling__temperature=bad, entropy__target=bad)
    assert {"optim.lr", "optim.weight_decay", "sampling.temperature", "entropy.target"} <= set(found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "key",
    ["loss.low", "loss.high", "loss.cap", "loss.dual_clip", "optim.lr", "kl.coef", "advantage.eps", "reward.wrong"],
)
def test_every_number_must_be_finite_and_is_named_once(key, bad):
    found = [mistake for mistake in validate(config(**{key.replace(".", "__"): bad})) if mistake.key == key]
    assert [mistake.allowed for mistake in found] == ["must be a finite number"]


def test_numbers_in_lists_and_open_sections_must_be_finite_too():
    parts = {"correctness": {"weight": math.inf}}
    found = keys(task__operand_weights=[1.0, math.nan, 1.0], reward__parts=parts)
    assert {"task.operand_weights[1]", "reward.parts.correctness.weight"} <= set(found)


@pytest.mark.parametrize("key", ["operands", "operand_weights", "heldout_operands"])
def test_an_empty_list_is_a_mistake_with_a_cure(key):
    (mistake,) = validate(config(**{f"task__{key}": [], "task__guess_right": 0.5}))
    assert mistake.key == f"task.{key}" and mistake.cure


def test_all_mistakes_are_reported_at_once_on_one_screen():
    wrong = {
        "sampling__group_size": 1,
        "sampling__top_p": 0.9,
        "kl__kind": "k4",
        "advantage__kind": "gdpo",
        "optim__lr": -1.0,
        "loss__aggregation": "sum",
        "checkpoint__keep": 0,
    }
    mistakes = validate(config(**wrong))
    expected = {"sampling.group_size", "sampling.top_p", "kl.kind", "advantage.kind", "optim.lr"}
    assert {m.key for m in mistakes} == expected | {"loss.aggregation", "checkpoint.keep"}
    text = str(ConfigError(mistakes))
    assert text.startswith("The configuration has 7 mistakes:")
    assert len(text.splitlines()) == 8
    assert "kl.kind=k4: unknown; choose off, k1, k2, k3, k3_unbiased." in text


def test_what_makes_a_choice_sound_is_accepted():
    assert keys(sampling__top_p=0.9, sampling__replay_filter=True) == []
    assert keys(kl__kind="k1", kl__coef=0.1, kl__in_reward=True) == []
    assert keys(kl__kind="k3", kl__coef={"math": 0.0, "code": 0.001}) == []
    assert keys(kl__monitor=True) == []
    assert keys(advantage__kind="gdpo", reward__parts={"correctness": {}, "format": {"weight": 0.3}}) == []
    assert keys(advantage__kind="gdpo", overlong__kind="soft") == []  # the punishment is the second part
    assert keys(sampling__temperature_high=1.2, sampling__entropy_threshold=0.5) == []


def test_a_coefficient_that_is_no_number_is_refused():
    for bad in ("much", {"math": "much"}, -0.1, True, [0.1]):
        assert "kl.coef" in keys(kl__kind="k3", kl__coef=bad)


def test_doubtful_settings_are_allowed_and_told():
    gspo = config(loss__kind="gspo")
    assert validate(gspo) == []
    assert "GSPO uses 3e-4 and 4e-4" in doubts(gspo)[0]
    assert doubts(config(loss__kind="gspo", loss__low=3e-4, loss__high=4e-4)) == []
    assert "group_size=2" in doubts(config(sampling__group_size=2))[0]


INERT = {
    "name and place": {"name": "x", "run_dir": "y", "quiet": True},
    "what is kept": {"checkpoint__every": 3, "tracking__mode": "disabled"},
    "rounds of plain data": {"data__max_rounds": 3},
    "cap without cispo": {"loss__cap": 9.0},
    "batch step without gdpo": {"advantage__batch_norm": False},
    "entropy settings without a kind": {"entropy__rho": 0.5, "entropy__target": 0.9},
    "zone without soft": {"overlong__cache_tokens": 5},
    "replay without a filter": {"sampling__replay_filter": True},
    "kl weights without kl": {"kl__token_weight": "linear", "kl__reasoning_weight": 0.3},
    "n-grams without repetition": {"reward__ngram": 7},
    "decay without a goal": {"reward__parts": {"correctness": {"decay_at": 0.5, "decay_steps": 7}}},
    "adapter without rank": {"model__lora": {"alpha": 64}},
    "another kind of task": {"task__question_key": "q", "task__verifier": "math"},
}


@pytest.mark.parametrize("overrides", INERT.values(), ids=INERT)
def test_settings_without_effect_leave_the_key_of_a_run_alone(overrides):
    assert run_key(config(**overrides)) == run_key(Config())


ONE_UPDATE = {"optim__minibatches": 1, "optim__inner_epochs": 1}


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (ONE_UPDATE, {"loss__high": 0.28}),
        (ONE_UPDATE, {"loss__kind": "gspo", "loss__low": 3e-4, "loss__high": 4e-4}),
        (ONE_UPDATE, {"loss__kind": "cispo"}),
        ({"loss__kind": "cispo"}, {"loss__high": 0.28}),
        ({"advantage__kind": "rloo"}, {"advantage__eps": 1e-6}),
        ({"kl__kind": "k1", "kl__coef": 0.1, "kl__in_reward": True}, {"kl__token_weight": "linear"}),
        ({"kl__kind": "k3", "kl__coef": 0.1}, {"kl__answer_tokens": 3}),
    ],
)
def test_arms_that_differ_only_in_what_cannot_act_are_one_experiment(base, change):
    assert canonical(config(**base)) == canonical(config(**base, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"loss__high": 0.28},
        {"data__kind": "dynamic_sampling"},
        {"kl__monitor": True},
        {"reward__parts": {"correctness": {"weight": 2.0}}},
        {"reward__parts": {"correctness": {"decay_to": 0.2}}},
        {"model__noise": 0.3},
        {"model__lora": {"r": 4}},
        {"optim__lr": 1e-5},
        {"sampling__top_p": 0.9, "sampling__replay_filter": True},
        {"eval__samples": 8},
        {"alerts__profile": "off"},
    ],
    ids=str,
)
def test_settings_with_an_effect_change_the_key_of_a_run(change):
    assert run_key(config(**change)) != run_key(Config())


def test_parts_are_typed():
    parts = config(reward__parts={"format": {"weight": 0.3}}).reward.parts
    assert parts == {"correctness": PartConfig(), "format": PartConfig(weight=0.3)}  # given parts join the default


def test_a_coin_needs_the_part_it_replaces():
    made = Config()
    made.reward.random, made.reward.parts = True, {"format": PartConfig()}
    assert [mistake.key for mistake in validate(made)] == ["reward.random"]


def test_configuration_and_its_mistakes_need_no_torch():
    code = "import sys, reasonrl.config as c; c.validate(c.Config()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_launcher_that_splits_the_work_otherwise_is_refused_not_ignored(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    (mistake,) = validate(Config())
    assert (mistake.key, mistake.value) == ("accelerate", "Megatron-LM") and "distributed_type: FSDP" in mistake.cure
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    assert validate(Config()) == []
