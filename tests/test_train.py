"""Whole runs on a tiny model: the record, stopping and pausing, resuming, and what each choice computes."""

from __future__ import annotations

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from reasonrl.alerts import Alert, AlertMonitor
from reasonrl.config import run_key
from reasonrl.errors import CheckpointError, ConfigError, TrainingError
from reasonrl.events import read_events
from reasonrl.metrics import METRICS, TIMINGS
from reasonrl.rewards import WeightSchedule
from reasonrl.rollout.batch import odd_lengths
from reasonrl.train import score, train
from reasonrl.types import Completions, Problem, Rollouts

# Everything that carries state from step to step: refills, the gate, the thermostat, a weight schedule, a reference.
STATEFUL = {
    "data.kind": "dynamic_sampling",
    "data.difficulty_gate": 1,
    "entropy.kind": "thermostat",
    "entropy.target": 5.0,
    "kl.kind": "k3",
    "kl.coef": 0.01,
    "optim.schedule": "cosine",
    "reward.parts": {"correctness": {}, "format": {"weight": 1.0, "decay_to": 0.2, "decay_at": -1.0, "decay_steps": 3}},
    "advantage.kind": "gdpo",
    "alerts.profile": "graded",
    "alerts.on_stop": "continue",
    "steps": 4,
}


def events_of(run_dir, kind=None):
    return [event for event in read_events(run_dir / "events.jsonl") if kind in (None, event["type"])]


def rows_of(run_dir):
    """{step: metrics without timings}, the last writing of a step; likewise for held-out scores."""

    def plain(event):
        return {name: value for name, value in event["metrics"].items() if not name.startswith(TIMINGS)}

    steps = {event["step"]: plain(event) for event in events_of(run_dir, "step")}
    evals = {event["step"]: (plain(event), event["problems"]) for event in events_of(run_dir, "eval")}
    return steps, evals


def answer_at(kind, step, answer):
    """An on_event that gives `answer` at one event."""
    return lambda event: answer if event["type"] == kind and event.get("step") == step else None


def weights_of(run_dir, step):
    from safetensors.torch import load_file

    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "weights.safetensors")


# -- the record ----------------------------------------------------------------------------------------------


def test_events_come_in_the_agreed_order_and_form(make_config, tmp_path):
    config = make_config({"checkpoint.every": 2})
    told = []
    summary = train(config, tmp_path, lambda event: told.append(json.loads(json.dumps(event))))
    events = events_of(tmp_path)
    assert [(e["type"], e.get("step")) for e in events] == [
        ("start", None),
        ("eval", 0),
        ("samples", 0),
        ("step", 1),
        ("eval", 2),
        ("samples", 2),
        ("step", 2),
        ("checkpoint", 2),
        ("eval", 3),
        ("samples", 3),
        ("step", 3),
        ("checkpoint", 3),
        ("end", 3),
    ]
    assert told == events  # the caller hears of exactly what is in the log
    start, end = events[0], events[-1]
    key = run_key(config)
    assert (start["key"], start["name"], start["seed"], start["steps"]) == (key, key, 0, 3)
    assert (start["resumed_from"], start["pid"]) == (None, os.getpid())
    assert start["config"]["optim"]["lr"] == 1e-3
    assert {"code", "torch", "transformers", "python"} <= set(start["versions"])
    assert (end["status"], end["reason"], end["error_class"]) == ("finished", None, None)
    held_out = events[1]
    assert len(held_out["problems"]) == 4 and held_out["samples"] == 2
    assert held_out["metrics"]["eval/accuracy"] == sum(held_out["problems"]) / 8
    shown = events[2]["rows"][0]
    assert {"prompt", "completion", "reward", "finish"} <= set(shown)
    assert (tmp_path / events[7]["path"]).is_dir()
    assert (summary.status, summary.step, summary.key) == ("finished", 3, key)
    assert summary.metrics["eval/accuracy"] == events[8]["metrics"]["eval/accuracy"]


def test_every_metric_is_in_the_table_and_finite(make_config, tmp_path):
    train(make_config({**STATEFUL, "overlong.kind": "soft", "overlong.cache_tokens": 4}), tmp_path)
    for event in events_of(tmp_path, "step") + events_of(tmp_path, "eval"):
        unknown = {name for name in event["metrics"] if name not in METRICS and not name.startswith("kl/")}
        assert not unknown
        assert all(math.isfinite(value) for value in event["metrics"].values())


def test_first_minibatch_of_every_step_has_ratio_one(make_config, tmp_path):
    two_hot = {"sampling.temperature": 0.9, "sampling.temperature_high": 1.3, "sampling.entropy_threshold": 3.0}
    train(make_config(two_hot), tmp_path)
    assert max(metrics["shift/first_ratio_error"] for metrics in rows_of(tmp_path)[0].values()) < 1e-5


def test_entropy_change_is_predicted_the_step_before(make_config, tmp_path):
    train(make_config(), tmp_path)
    rows = rows_of(tmp_path)[0]
    assert "entropy/predicted_change" not in rows[1]
    for step in (2, 3):
        before = rows[step - 1]
        expected = -before["optim/lr"] * before["optim/updates"] * before["entropy/cov"]
        assert rows[step]["entropy/predicted_change"] == pytest.approx(expected)
        change = rows[step]["entropy/mean"] - before["entropy/mean"]
        assert rows[step]["entropy/measured_change"] == pytest.approx(change)
    assert rows[3]["optim/gradient_steps"] == 6.0  # 2 minibatches x 1 epoch x 3 steps


def test_one_seed_repeats_itself_and_another_does_not(make_config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(make_config(seed=seed), tmp_path / name)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert rows_of(tmp_path / "a")[0] != rows_of(tmp_path / "c")[0]


def test_arms_share_problems_and_draws_until_their_first_update(make_config, tmp_path):
    for name, high in (("symmetric", 0.2), ("higher", 0.28)):
        train(make_config({"loss.high": high, "optim.inner_epochs": 4}, steps=1), tmp_path / name)
    one, other = (rows_of(tmp_path / name) for name in ("symmetric", "higher"))
    assert one[1][0] == other[1][0]
    sampled = [name for name in one[0][1] if name.startswith(("reward/", "length/", "entropy/", "advantage/", "data/"))]
    assert len(sampled) > 10
    assert all(one[0][1][name] == other[0][1][name] for name in sampled)


# -- stopping, pausing, failing ------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "status"), [("stop", "stopped"), ("pause", "paused")])
@pytest.mark.parametrize("kind", ["step", "eval"])
def test_stop_and_pause_act_within_the_step(make_config, tmp_path, answer, status, kind):
    summary = train(make_config(steps=9), tmp_path, answer_at(kind, 2, answer))
    assert (summary.status, summary.step) == (status, 2)
    tail = [(e["type"], e["step"]) for e in events_of(tmp_path)[-3:]]
    assert tail == [("step", 2), ("checkpoint", 2), ("end", 2)]
    assert events_of(tmp_path, "end")[0]["status"] == status


def test_stop_outranks_pause(make_config, tmp_path):
    answers = {"eval": "stop", "step": "pause"}
    summary = train(make_config(steps=9), tmp_path, lambda e: answers.get(e["type"]) if e.get("step") == 2 else None)
    assert summary.status == "stopped"


def test_pause_before_the_first_step_keeps_a_checkpoint_to_go_on_from(make_config, tmp_path):
    assert train(make_config(), tmp_path, answer_at("start", None, "pause")).status == "paused"
    assert train(make_config(), tmp_path).status == "finished"
    train(make_config(), tmp_path / "whole")
    assert rows_of(tmp_path) == rows_of(tmp_path / "whole")


def test_answer_at_the_last_step_does_not_undo_the_finish(make_config, tmp_path):
    assert train(make_config(), tmp_path, answer_at("step", 3, "pause")).status == "finished"


def raise_at(step, severity="stop"):
    """A monitor that raises one alert."""
    alert = Alert("U01", "scripted", severity, step, "because", {"window": [1, step]}, ["optim.lr=1e-5"])
    return lambda self, now, metrics: [alert] if now == step else []


def test_a_stop_alert_ends_the_run_with_its_reason(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(AlertMonitor, "update", raise_at(2))
    summary = train(make_config(steps=9), tmp_path)
    assert (summary.status, summary.step, summary.reason["code"]) == ("stopped", 2, "U01")
    alert, end = events_of(tmp_path, "alert")[0], events_of(tmp_path, "end")[0]
    assert (alert["severity"], alert["evidence"], alert["intervention"]) == (
        "stop",
        {"window": [1, 2]},
        ["optim.lr=1e-5"],
    )
    assert end["reason"]["code"] == "U01"
    assert events_of(tmp_path, "checkpoint")[-1]["step"] == 2


@pytest.mark.parametrize(("severity", "on_stop"), [("flag", "stop"), ("stop", "continue")])
def test_flags_and_ignored_stops_let_the_run_finish(make_config, tmp_path, monkeypatch, severity, on_stop):
    monkeypatch.setattr(AlertMonitor, "update", raise_at(2, severity))
    assert train(make_config({"alerts.on_stop": on_stop}), tmp_path).status == "finished"
    assert len(events_of(tmp_path, "alert")) == 1


def test_alerts_are_given_the_settings_they_compute_advice_from(make_config, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(AlertMonitor, "update", lambda self, step, metrics: seen.update(self.settings) or [])
    train(make_config(steps=1), tmp_path)
    assert (seen["optim.lr"], seen["sampling.group_size"]) == (1e-3, 4)


def test_a_starved_run_ends_as_failed_and_says_so(make_config, tmp_path):
    config = make_config(
        {"data.kind": "dynamic_sampling", "data.max_rounds": 1, "data.patience": 1, "reward.random": False}
    )
    with pytest.raises(TrainingError):
        train(config, tmp_path)
    end = events_of(tmp_path, "end")[0]
    assert end["status"] == "failed"
    assert "TrainingError" in end["reason"]
    assert end["error_class"] == "user_code"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (OSError(28, "No space left on device"), "infrastructure"),
        (KeyboardInterrupt(), "killed"),
        (ZeroDivisionError("mine"), "user_code"),
    ],
)
def test_the_end_says_which_way_a_run_failed(make_config, tmp_path, error, kind):
    def fail(event):
        if event["type"] == "step":
            raise error

    with pytest.raises(type(error)):
        train(make_config(), tmp_path, fail)
    end = events_of(tmp_path)[-1]
    assert (end["type"], end["status"], end["step"], end["error_class"]) == ("end", "failed", 1, kind)


def test_an_empty_step_is_recorded_and_counted_as_no_update(make_config, tmp_path):
    settings = {"data.kind": "dynamic_sampling", "data.max_rounds": 1, "data.patience": 9, "reward.random": False}
    train(make_config(settings, steps=2), tmp_path)
    for metrics in rows_of(tmp_path)[0].values():
        assert (metrics["data/kept"], metrics["data/short"], metrics["data/dropped"]) == (0.0, 4.0, 4.0)
        assert metrics["optim/gradient_steps"] == 0.0


def test_all_mistakes_are_told_before_anything_is_written(make_config, tmp_path):
    with pytest.raises(ConfigError, match="2 mistakes"):
        train(make_config({"sampling.group_size": 1, "optim.lr": -1.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_reward_functions_that_are_not_there_are_all_named_before_anything_is_written(make_config, tmp_path):
    parts = {"one": {"function": "nowhere.a"}, "two": {"function": "math.nothing"}, "three": {"function": "math.sin"}}
    with pytest.raises(ConfigError, match=r"(?s)2 mistakes.*parts\.one\.function.*parts\.two\.function"):
        train(make_config({"reward.parts": parts}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_none_leaves_no_folder(make_config, tmp_path):
    config = make_config({"model.kind": "hf", "model.path": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="is not a folder"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- resuming ------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(make_config, tmp_path):
    """An uninterrupted run with everything that carries state."""
    train(make_config(STATEFUL), tmp_path / "whole")
    return tmp_path / "whole"


def test_a_paused_run_repeats_the_rows_of_an_uninterrupted_one_exactly(make_config, tmp_path, whole):
    run_dir = tmp_path / "run"
    for step in (1, 3):
        assert train(make_config(STATEFUL), run_dir, answer_at("step", step, "pause")).status == "paused"
    assert train(make_config(STATEFUL), run_dir).status == "finished"
    assert rows_of(run_dir) == rows_of(whole)
    assert [event["resumed_from"] for event in events_of(run_dir, "start")] == [None, 1, 3]
    one, other = weights_of(run_dir, 4), weights_of(whole, 4)
    assert all(torch.equal(one[name], other[name]) for name in one)
    state = [json.loads((d / "checkpoints/step_000004/state.json").read_text()) for d in (run_dir, whole)]
    for one in state:  # the last row seen holds this run's seconds
        row = one["alerts"]["history"]["row"]
        one["alerts"]["history"]["row"] = {k: v for k, v in row.items() if not k.startswith(TIMINGS)}
    for name in ("problems", "alpha", "running", "learned_at", "alerts", "gradient_steps", "entropy"):
        assert state[0][name] == state[1][name], name
    assert state[0]["alpha"] > 0 and state[0]["learned_at"]  # the states compared are not empty ones


def run_and_kill(config, run_dir, kind, step):
    """Train in a child process that SIGKILLs itself at an event."""

    def die(event):
        if event["type"] == kind and event.get("step") == step:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        train(config, run_dir, die)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_killed_run_repeats_the_rows_of_an_uninterrupted_one_exactly(make_config, tmp_path, whole):
    run_dir = tmp_path / "run"
    config = make_config({**STATEFUL, "checkpoint.every": 2})
    run_and_kill(config, run_dir, "step", 3)  # one row behind the last checkpoint
    with (run_dir / "events.jsonl").open("ab") as log:
        log.write(b'{"type":"step","step":4,"metr')  # and a torn line
    train(config, run_dir)
    assert rows_of(run_dir) == rows_of(whole)
    steps = [event["step"] for event in events_of(run_dir, "step")]
    assert steps == [1, 2, 3, 3, 4]
    assert events_of(run_dir, "start")[1]["resumed_from"] == 2


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_and_the_rows_stay_the_same(make_config, tmp_path, whole):
    run_dir = tmp_path / "run"
    config = make_config({**STATEFUL, "checkpoint.every": 1})
    train(config, run_dir, answer_at("step", 3, "pause"))
    weights = run_dir / "checkpoints" / "step_000003" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    train(config, run_dir)
    warnings = [event["message"] for event in events_of(run_dir, "warning")]
    assert any("step_000003 is damaged" in message for message in warnings)
    assert events_of(run_dir, "start")[1]["resumed_from"] == 2
    assert rows_of(run_dir) == rows_of(whole)


@pytest.mark.parametrize(
    ("lost", "resumed"),
    [("tail", 2), ("all", None), ("row", 1), ("evaluation", 1)],
)
def test_rows_that_the_log_has_lost_are_made_again_rather_than_skipped(make_config, tmp_path, whole, lost, resumed):
    run_dir = tmp_path / "run"
    config = make_config({**STATEFUL, "checkpoint.every": 1, "checkpoint.keep": 9})
    train(config, run_dir)
    path = run_dir / "events.jsonl"
    lines = [(json.loads(line), line) for line in path.read_text().splitlines(keepends=True)]
    third = next(i for i, (event, _) in enumerate(lines) if event["type"] == "step" and event["step"] == 3)
    kept = {
        "tail": [line for _, line in lines[:third]],
        "all": [],
        "row": [line for event, line in lines if (event["type"], event.get("step")) != ("step", 2)],
        "evaluation": [line for event, line in lines if (event["type"], event.get("step")) != ("eval", 2)],
    }
    path.write_text("".join(kept[lost]))
    train(config, run_dir)
    assert rows_of(run_dir) == rows_of(whole)
    assert events_of(run_dir, "start")[-1]["resumed_from"] == resumed
    said = [event["message"] for event in events_of(run_dir, "warning")]
    assert sum("step_000004 is not used: the event log has lost rows" in message for message in said) == 1


def test_a_finished_run_started_again_only_says_so(make_config, tmp_path):
    train(make_config(), tmp_path)
    rows = rows_of(tmp_path)
    summary = train(make_config(), tmp_path)
    assert (summary.status, summary.step) == ("finished", 3)
    assert rows_of(tmp_path) == rows
    assert [event["type"] for event in events_of(tmp_path)[-2:]] == ["start", "end"]


def test_a_fork_continues_the_weights_and_starts_alerts_afresh(make_config, tmp_path, monkeypatch):
    loads = []
    monkeypatch.setattr(AlertMonitor, "load_state", lambda self, state: loads.append(state))
    train(make_config(), tmp_path, answer_at("step", 2, "pause"))
    train(make_config(), tmp_path, answer_at("start", None, "pause"))
    assert len(loads) == 1  # the same run goes on with its alert history
    train(make_config({"optim.lr": 1e-4}), tmp_path)
    assert len(loads) == 1
    assert events_of(tmp_path, "start")[-1]["resumed_from"] == 2
    assert any("Forked at step 2" in event["message"] for event in events_of(tmp_path, "warning"))
    assert rows_of(tmp_path)[0][3]["optim/lr"] == 1e-4


def test_what_is_only_watched_is_no_fork(make_config, tmp_path):
    train(make_config(), tmp_path, answer_at("step", 1, "pause"))
    train(make_config({"checkpoint.keep": 3}, name="other"), tmp_path)
    assert not events_of(tmp_path, "warning")


def test_a_checkpoint_of_another_model_is_refused_in_words(make_config, tmp_path):
    train(make_config(steps=1), tmp_path)
    folder = tmp_path / "checkpoints" / "step_000001"
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "weights.safetensors")
    weights.pop("0")
    save_file(weights, folder / "weights.safetensors")
    from reasonrl.checkpoint import _sha256

    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["weights.safetensors"] = _sha256(folder / "weights.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        train(make_config(), tmp_path)


def test_export_is_an_ordinary_model_folder_with_the_trained_weights(make_config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(make_config({"checkpoint.export": True}, steps=1), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("^12=")["input_ids"]
    saved = weights_of(tmp_path, 1)
    assert all(torch.equal(saved[str(i)], p) for i, p in enumerate(model.parameters()))


# -- choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"loss.kind": "gspo", "loss.low": 3e-4, "loss.high": 4e-4, "loss.aggregation": "sequence_mean"},
        {"loss.kind": "cispo"},
        {"loss.dual_clip": 3.0, "loss.aggregation": "prompt_mean"},
        {"loss.aggregation": "constant", "advantage.kind": "dr_grpo"},
        {"advantage.kind": "rloo", "optim.micro_batch_size": 3},
        {"advantage.kind": "batch_std", "reward.wrong": -1.0},
        {"kl.kind": "k2", "kl.coef": 0.01, "kl.token_weight": "linear"},
        {"kl.kind": "k3_unbiased", "kl.coef": {"n4": 0.01}, "kl.token_weight": "answer"},
        {"kl.kind": "k1", "kl.coef": 0.01, "kl.in_reward": True},
        {"entropy.kind": "top_mask"},
        {"entropy.kind": "top_mask", "entropy.scope": "sequence"},
        {"entropy.kind": "bonus"},
        {"entropy.kind": "clip_cov", "entropy.cov_share": 0.05},
        {"entropy.kind": "kl_cov", "entropy.cov_share": 0.05},
        {"overlong.kind": "filter"},
        {"sampling.top_p": 0.9, "sampling.top_k": 8, "sampling.replay_filter": True},
        {"model.gradient_checkpointing": True},
        {"model.dtype": "bfloat16"},
        {"model.lora.r": 4, "kl.kind": "k3", "kl.coef": 0.01},
    ],
    ids=lambda overrides: "+".join(f"{k.split('.', 1)[1]}={v}" for k, v in overrides.items())[:60],
)
def test_every_mechanism_trains(make_config, tmp_path, overrides):
    summary = train(make_config(overrides, steps=2), tmp_path)
    assert summary.status == "finished"
    rows = rows_of(tmp_path)[0]
    assert rows[2]["optim/updates"] == 2.0
    assert all(math.isfinite(value) for value in rows[2].values())
    # bf16 has 8 bits of mantissa: the sampler's batch and the trainer's differ by rounding, not by distribution
    limit = 0.05 if "model.dtype" in overrides else 1e-5
    assert max(metrics["shift/first_ratio_error"] for metrics in rows.values()) < limit


def test_no_reference_model_is_made_unless_kl_needs_one(make_config, tmp_path, monkeypatch):
    import reasonrl.run as module

    made = []
    real = module.make_reference
    monkeypatch.setattr(module, "make_reference", lambda policy: made.append(1) or real(policy))
    train(make_config(steps=1), tmp_path / "off")
    assert made == []
    assert "kl/ref" not in rows_of(tmp_path / "off")[0][1]
    train(make_config({"kl.monitor": True}, steps=2), tmp_path / "monitor")
    assert made == [1]
    rows = rows_of(tmp_path / "monitor")[0]
    assert rows[1]["kl/ref"] == pytest.approx(0.0, abs=1e-6)  # before the first update it is the policy itself
    assert rows[2]["kl/ref"] > 1e-5
    assert {"kl/n4", "kl/n5", "kl/n6"} & set(rows[2])
    plain = make_config(steps=2)
    train(plain, tmp_path / "plain")
    unwatched = rows_of(tmp_path / "plain")[0][2]
    assert all(rows[2][name] == value for name, value in unwatched.items())  # watching changes nothing


# -- scoring -------------------------------------------------------------------------------------------------


def scored(config, rollouts, ref_BT=None):
    run = SimpleNamespace(
        config=config,
        policy=None,
        task=SimpleNamespace(format_ok=lambda text: text == "good"),
        weights=WeightSchedule(config.reward.parts),
        scorers={},
    )
    return score(run, rollouts, ref_BT, step=1)


def two_groups(correct, finish=None, texts=None):
    """Two problems x 2 completions of lengths 1, 2, 3, 4; log-probs -1 everywhere."""
    mask = (torch.arange(4) < torch.tensor([1, 2, 3, 4]).unsqueeze(-1)).long()
    ids, ones = torch.arange(4).repeat(4, 1), torch.ones(4, 4)
    done = Completions(ids, mask, -1.0 * mask, ones, ones, finish or ["stop"] * 4)
    problems = [Problem("p", "?", "1", "math"), Problem("q", "?", "2", "code")]
    return Rollouts(problems, [[1], [2]], done, texts or ["a", "b", "c", "d"], {}, torch.tensor(correct), [""] * 4)


def test_kl_in_the_reward_is_a_part_of_its_own(make_config):
    # d = 0.5 a token, lengths 1 2 3 4; math costs .1, code .2: -.05 -.1 -.3 -.4
    config = make_config({"kl.kind": "k1", "kl.in_reward": True, "kl.coef": {"math": 0.1, "code": 0.2}})
    batch, metrics = scored(config, two_groups([[1.0, 0.0], [0.0, 0.0]]), torch.full((4, 4), -1.5))
    assert metrics["reward/kl_penalty"] == pytest.approx(-0.2125)
    assert metrics["reward/total"] == pytest.approx(0.25 - 0.2125)
    assert metrics["reward/correctness"] == 0.25
    assert not batch.beta_B.any()
    # group 2 is flat in correctness but not in the penalty: -+.05 around the mean over a std of .0707
    assert batch.advantages_B[2:].tolist() == pytest.approx([0.7071, -0.7071], rel=2e-3)


def test_kl_to_the_reference_is_reported_per_domain(make_config):
    config = make_config({"kl.kind": "k2", "kl.coef": 0.1})
    ref = torch.full((4, 4), -1.5)
    ref[2:] = -1.0 + math.log(2)
    batch, metrics = scored(config, two_groups([[1.0, 0.0], [1.0, 0.0]]), ref)
    # k3 at d = .5: .1065; at d = -ln 2: .3069; 3 and 7 tokens
    assert metrics["kl/math"] == pytest.approx(0.1065, abs=1e-4)
    assert metrics["kl/code"] == pytest.approx(0.3069, abs=1e-4)
    assert metrics["kl/ref"] == pytest.approx((3 * 0.10653 + 7 * 0.30685) / 10, abs=1e-4)
    assert batch.beta_B.tolist() == pytest.approx([0.1] * 4)


def test_cut_rows_stay_in_the_group_statistics_and_leave_the_loss(make_config):
    config = make_config({"overlong.kind": "filter"})
    rollouts = two_groups([[1.0, 0.0], [1.0, 0.0]], finish=["stop", "length", "stop", "error"])
    batch, _ = scored(config, rollouts)
    assert batch.advantages_B.tolist() == pytest.approx([0.7071, -0.7071] * 2, rel=1e-3)
    assert batch.loss_mask_BT.sum(-1).tolist() == [1.0, 0.0, 3.0, 4.0]


def test_rows_that_cannot_be_scored_are_masked_and_counted(make_config):
    rollouts = two_groups([[1.0, math.nan], [1.0, 0.0]])
    batch, metrics = scored(make_config(), rollouts)
    assert metrics["data/invalid"] == 1.0
    assert batch.loss_mask_BT.sum(-1).tolist() == [1.0, 0.0, 3.0, 4.0]
    assert batch.advantages_B[:2].tolist() == [0.0, 0.0]  # one valid row makes no comparison
    assert metrics["reward/correctness"] == pytest.approx(2 / 3)
    assert metrics["reward/total"] == pytest.approx(2 / 3)


def test_a_step_without_a_single_score_has_no_reward_metrics_rather_than_nan(make_config):
    _, metrics = scored(make_config(), two_groups([[math.nan, math.nan], [math.nan, math.nan]]))
    assert metrics["data/invalid"] == 4.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_weights_come_after_the_parts(make_config):
    parts = {"correctness": {"weight": 1.0}, "format": {"weight": 0.3}}
    rollouts = two_groups([[1.0, 0.0], [0.0, 0.0]], texts=["good", "bad", "good", "good"])
    _, metrics = scored(make_config({"reward.parts": parts}), rollouts)
    assert (metrics["reward/correctness"], metrics["reward/format"]) == (0.25, 0.75)
    assert metrics["reward/total"] == pytest.approx(0.25 + 0.3 * 0.75)


# -- odd lengths ---------------------------------------------------------------------------------------------


def lengths(lengths, texts, finish="stop"):
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).long()
    done = Completions(mask, mask, mask, mask, mask, [finish] * len(lengths))
    return Rollouts([], [], done, texts, {}, torch.zeros(1, len(lengths)), [])


def test_equal_lengths_of_different_texts_are_suspicious():
    assert "3 tokens although their texts differ" in odd_lengths(lengths([3, 3, 3], ["a", "b", "a"]))
    assert odd_lengths(lengths([3, 3, 3], ["a", "a", "a"])) is None
    assert odd_lengths(lengths([3, 2, 3], ["a", "b", "a"])) is None


def test_a_batch_cut_as_a_whole_points_at_the_limit():
    assert "sampling.max_new_tokens" in odd_lengths(lengths([9, 9], ["a", "b"], "length"))


def test_a_batch_of_empty_completions_is_told():
    assert "are empty" in odd_lengths(lengths([1, 1], ["", " "]))


def test_a_suspicion_is_recorded_once_per_run(make_config, tmp_path):
    train(make_config({"sampling.max_new_tokens": 1}), tmp_path)
    messages = [event["message"] for event in events_of(tmp_path, "warning")]
    kinds = [message.split("completions")[1][:10] for message in messages]
    assert kinds and len(kinds) == len(set(kinds)) <= 2  # cut or equally long, each said once in three steps
