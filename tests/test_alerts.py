"""The monitor: warm-up, confirmation, hysteresis, skipped inputs, units, resuming, user rules, configuration."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest

from reasonrl.alerts import AlertMonitor, AlertsConfig, Finding, alert_rule, edge_alert
from reasonrl.alerts.profiles import GRADED, PROFILES
from reasonrl.errors import ConfigError

NAN = float("nan")


def collapsing(step: int) -> dict[str, float]:
    """Entropy .6 until step 25, then down to .01 by step 60, with a reward that stands still."""
    entropy = 0.6 if step <= 25 else max(0.01, 0.6 - 0.59 * (step - 25) / 35)
    return {"entropy/mean": entropy, "reward/total": 0.3 + 0.01 * (step % 3)}


def run(rows, **config):
    monitor = AlertMonitor(AlertsConfig(**config))
    return [alert for step, row in rows for alert in monitor.update(step, row)]


def test_alert_carries_code_numbers_window_and_overrides():
    alert = run([(s, collapsing(s)) for s in range(1, 80)])[0]
    assert (alert.code, alert.severity, alert.title) == ("A03", "flag", "entropy collapse")
    assert alert.evidence["ratio"] == pytest.approx(alert.evidence["entropy"] / 0.6, rel=1e-3)
    assert alert.evidence["window"][1] == alert.step
    assert alert.intervention == ["loss=clip_higher", "entropy=thermostat"]
    event = alert.to_event()
    assert event["type"] == "alert" and event["step"] == alert.step and isinstance(event["step"], int)
    json.dumps(event, allow_nan=False)


def test_interventions_get_their_numbers_from_the_settings():
    monitor = AlertMonitor(settings={"optim.lr": 4e-5})
    (alert,) = monitor.update(1, {"loss/total": NAN})
    assert alert.intervention == ["optim.lr=1.33e-05", "optim.max_grad_norm=1.0"]


def test_learning_rate_is_read_from_the_log_when_the_settings_do_not_tell():
    monitor = AlertMonitor()
    monitor.update(1, {"optim/lr": 3e-5})
    (alert,) = monitor.update(2, {"loss/total": NAN, "optim/lr": 3e-5})
    assert alert.intervention[0] == "optim.lr=1e-05"


def test_nothing_is_raised_before_the_warm_up():
    rows = [(s, {"entropy/mean": 1.0 if s < 15 else 0.1, "reward/total": 0.3}) for s in range(1, 60)]
    assert min(a.step for a in run(rows, warmup=45)) >= 46
    assert min(a.step for a in run(rows, warmup=20)) < 46


def test_a_finding_must_hold_for_the_confirmations_in_a_row():
    # entropy is low for four rows of window mean only: found twice, never three times in a row
    rows = [(s, {"entropy/mean": 0.0001 if 30 <= s < 36 else 1.0}) for s in range(1, 80)]
    assert [a.code for a in run(rows, confirm=1)] == ["A03"]
    assert run(rows, confirm=8) == []


def test_a_finding_is_raised_once_and_again_only_when_worse():
    level = {1: 0.2, 2: 0.09}  # a fifth of the start, then less than half of that
    rows = [(s, {"entropy/mean": 1.0 if s < 30 else level[1 if s < 100 else 2]}) for s in range(1, 200)]
    alerts = [a for a in run(rows) if a.code == "A03"]
    assert [a.evidence["ratio"] for a in alerts] == sorted((a.evidence["ratio"] for a in alerts), reverse=True)
    steady = [a for a in alerts if 45 <= a.step < 100]
    assert steady == []
    assert any(a.step >= 100 for a in alerts)


def test_missing_inputs_are_said_and_never_count_as_fine():
    monitor = AlertMonitor()
    for step in range(1, 40):
        monitor.update(step, {"reward/total": 0.5, "entropy/mean": 0.5})
    skipped = monitor.skipped()
    assert skipped["A09"] == ["kl/ref"]
    assert skipped["A02"] == ["reward/std", "optim/grad_norm", "shift/kl_old or kl/ref or clip/fraction"]
    assert skipped["A10"] == ["eval"]
    assert skipped["A12"] == ["parts"]
    assert "A03" not in skipped and "A11" not in skipped
    assert monitor.limited()["A03"] == ["groups/flat"]


def test_a_missing_value_is_not_nan():
    assert run([(s, {"reward/total": 0.5} if s % 2 else {"kl/ref": 0.1}) for s in range(1, 30)]) == []


def test_nan_is_a_flag_and_twice_in_a_row_a_stop():
    alerts = run([(1, {"kl/ref": 0.1}), (2, {"kl/ref": NAN}), (3, {"kl/ref": math.inf})])
    assert [(a.severity, a.step) for a in alerts] == [("flag", 2), ("stop", 3)]


def test_nan_with_a_finite_row_between_is_no_stop():
    alerts = run([(1, {"kl/ref": NAN}), (2, {"kl/ref": 0.1}), (3, {"kl/ref": NAN})])
    assert [a.severity for a in alerts] == ["flag"]


def test_an_evaluation_row_between_does_not_break_a_nan_streak():
    alerts = run([(1, {"loss/total": NAN}), (1, {"eval/accuracy": 0.5}), (2, {"loss/total": NAN})])
    assert [a.severity for a in alerts] == ["flag", "stop"]


@pytest.mark.parametrize(
    "name", ["reward/tool_use", "eval/accuracy", "reward/std", "completions/mean_terminated_length"]
)
def test_nan_that_says_nothing_about_the_weights_is_only_a_note(name):
    assert {a.severity for a in run([(s, {name: NAN, "loss/total": 0.1}) for s in range(1, 9)])} == {"note"}


def test_nan_in_an_unknown_field_counts():
    assert run([(s, {"my_own_logprob": NAN}) for s in (1, 2)])[-1].severity == "stop"


def test_gradient_steps_are_windows_of_sixteen_rows():
    """The same curve logged at every gradient step raises the same finding, sixteen log steps later per step."""
    rollout = run([(s, collapsing(s)) for s in range(1, 100)])
    monitor = AlertMonitor(AlertsConfig(), unit=16)
    gradient = [a for s in range(16, 1600) for a in monitor.update(s, collapsing(s // 16))]
    for severity in ("flag", "stop"):
        first, later = (next(a for a in alerts if a.severity == severity) for alerts in (rollout, gradient))
        assert first.code == later.code == "A03"
        assert abs(first.step * 16 - later.step) <= 3 * 16


def test_rows_from_the_past_are_counted_and_left_out():
    monitor = AlertMonitor()
    for step in (1, 2, 3, 2, 4):
        monitor.update(step, {"reward/total": 0.5})
    assert monitor.history.late_rows == 1
    assert monitor.history.train["reward/total"].count == 4


def noisy_rows(count: int, seed: int = 0):
    """A run that rises, dips and recovers, with every metric the rules read, and one NaN."""
    rng = random.Random(seed)
    for step in range(1, count + 1):
        level = 0.3 + 0.5 * math.sin(step / 40) ** 2
        row = {
            "reward/total": level + rng.gauss(0, 0.05), "reward/std": 0.3, "reward/format": min(1.0, step / 50),
            "reward/correctness": 0.01 * rng.random(),
            "entropy/mean": max(0.01, 0.6 - step / 150) + rng.random() * 0.02,
            "groups/flat": min(0.95, step / 100), "groups/all_wrong": min(0.9, step / 120),
            "groups/all_right": 0.0, "kl/ref": step * step * 1e-5, "clip/fraction": 0.001 * (1 + step / 10),
            "length/mean": 100 + step * 3, "length/truncated": min(1.0, step / 90), "optim/grad_norm": 1 + step / 20,
            "shift/kl_old": 0.001 * step, "shift/ratio_q99": 1 + step / 20, "text/repetition": step / 200,
            "entropy/low_share": 0.95, "optim/lr": 1e-5, "shift/first_ratio_error": 1e-6,
        }  # fmt: skip
        if step == 33:
            row["optim/grad_norm"] = NAN
        if step % 10 == 0:
            row["eval/accuracy"] = 0.4 + 0.3 * math.sin(step / 50)
        yield step, row


@pytest.mark.parametrize("cut", [1, 7, 33, 34, 61, 119])
def test_a_resumed_run_raises_exactly_the_same(cut):
    rows = list(noisy_rows(160))
    whole = AlertMonitor()
    expected = [whole.update(step, row) for step, row in rows]
    first = AlertMonitor()
    for step, row in rows[:cut]:
        first.update(step, row)
    second = AlertMonitor()
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert [second.update(step, row) for step, row in rows[cut:]] == expected[cut:]
    assert second.state() == whole.state()
    assert sum(len(alerts) for alerts in expected) > 8


def test_memory_does_not_grow_with_the_run():
    def size(steps: int) -> int:
        monitor = AlertMonitor()
        for step, row in noisy_rows(steps):
            monitor.update(step, row)
        held = 0
        for series in monitor.history.train.values():
            held += len(series.window.steps) + len(series.pool.steps) + len(series.blocks)
        return held

    assert size(300) == size(3000)


def test_columns_nobody_reads_are_not_remembered():
    monitor = AlertMonitor()
    for step in range(1, 4):
        monitor.update(step, {f"column/{i}": 1.0 for i in range(3000)} | {"reward/total": 0.1})
    assert set(monitor.history.train) == {"reward/total"}


@alert_rule(
    "U01", "too short", ("length/mean",), warmup=0, confirm=1, intervention=("sampling.max_new_tokens=64",), least=5
)
def too_short(history, limits):
    """A user's rule: answers under `least` tokens."""
    length = history.series("length/mean")
    if length is None or length.mean() >= limits["least"]:
        return None
    return Finding("flag", "Answers are very short.", {"length": length.mean()}, 1)


def test_a_user_adds_a_rule_with_one_function_and_one_line_of_configuration():
    config = AlertsConfig(plugins=[f"{__name__}.too_short"], rules={"U01": {"least": 8}})
    monitor = AlertMonitor(config)
    alerts = [a for s in range(1, 30) for a in monitor.update(s, {"length/mean": 7.0})]
    assert [(a.code, a.severity, a.intervention) for a in alerts] == [("U01", "flag", ["sampling.max_new_tokens=64"])]
    assert AlertMonitor(AlertsConfig(plugins=[f"{__name__}.too_short"])).skipped()["U01"] == ["length/mean"]


def test_a_users_rule_is_found_in_the_working_folder(tmp_path, monkeypatch):
    text = """
from reasonrl.alerts import Finding, alert_rule

@alert_rule("U07", "any row", needs=("any",), warmup=0, confirm=1)
def any_row(history, limits):
    return Finding("flag", "a row")
"""
    (tmp_path / "rules_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (alert,) = AlertMonitor(AlertsConfig(plugins=["rules_of_mine.any_row"])).update(1, {"reward/total": 0.5})
    assert alert.code == "U07"


@pytest.mark.parametrize("path", ["no_such_module.rule", f"{__name__}.collapsing", f"{__name__}.nothing"])
def test_a_plugin_that_is_no_rule_is_refused_with_its_path(path):
    with pytest.raises(ConfigError, match=path):
        AlertMonitor(AlertsConfig(plugins=[path]))


def test_every_mistake_is_named_at_once():
    config = AlertsConfig(
        profile="strict", on_stop="maybe", warmup=-1, window=1, confirm=0, disable=["A77"],
        rules={"A03": {"ratoi": 0.5, "ratio": NAN}, "A99": {"x": 1}}, plugins=["not a path"],
    )  # fmt: skip
    keys = [mistake.key for mistake in config.mistakes()]
    assert keys == [
        "alerts.profile", "alerts.on_stop", "alerts.warmup", "alerts.window", "alerts.confirm", "alerts.plugins",
        "alerts.rules.A03.ratoi", "alerts.rules.A03.ratio",
    ]  # fmt: skip
    assert "fall, flat_growth, ratio" in str(config.mistakes()[6])
    with pytest.raises(ConfigError):
        AlertMonitor(config)


def test_limits_are_configuration():
    rows = [(s, {"entropy/mean": 1.0 if s < 30 else 0.6}) for s in range(1, 80)]
    assert run(rows) == []
    assert [a.code for a in run(rows, rules={"A03": {"ratio": 0.7}})] == ["A03"]
    assert run(rows, rules={"A03": {"ratio": 0.7}}, disable=["A03"]) == []


def test_off_raises_nothing_and_a_bad_unit_is_refused():
    assert run([(s, {"loss/total": NAN}) for s in (1, 2, 3)], profile="off") == []
    assert AlertMonitor(unit="rollout").history.unit == 1
    for unit in (0, -1, math.inf, "epochs"):
        with pytest.raises(ConfigError):
            AlertMonitor(unit=unit)


def test_profiles_have_unique_keys_and_every_rule_of_the_table():
    for rules in PROFILES.values():
        keys = [rule.key for rule in rules]
        assert len(set(keys)) == len(keys)
    codes = {rule.code for rule in GRADED}
    assert codes == {f"A{n:02d}" for n in range(1, 20)} - {"A18"}  # A18 looks at a sweep, not at a run
    assert all(rule.check.__doc__ and rule.check.__doc__.startswith(rule.code) for rule in GRADED)


@pytest.mark.parametrize(
    ("value", "low", "high", "log", "override"),
    [
        (9.9e-5, 1e-6, 1e-4, True, "sweep.space.optim.lr=interval(1e-06,0.01)"),
        (1e-6, 1e-6, 1e-4, True, "sweep.space.optim.lr=interval(1e-08,0.0001)"),
        (0.0, 0.0, 1.0, False, "sweep.space.optim.lr=interval(-1,1)"),
    ],
)
def test_best_value_at_the_edge_of_its_range_is_flagged(value, low, high, log, override):
    alert = edge_alert("optim.lr", value, low, high, log=log)
    assert (alert.code, alert.severity, alert.intervention) == ("A18", "flag", [override])


def test_best_value_inside_its_range_is_not_flagged():
    assert edge_alert("optim.lr", 1e-5, 1e-6, 1e-4, log=True) is None
    assert edge_alert("optim.lr", 3.0, 3.0, 3.0) is None


def test_rules_are_imported_without_torch():
    code = (
        "import reasonrl.alerts, reasonrl.alerts.names, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_evaluation_before_training_starts_no_clock():
    rows = [(s, collapsing(s)) for s in range(1, 80)]
    with_start = [(0, {"eval/accuracy": 0.2}), *rows]
    assert [(a.code, a.step) for a in run(rows)] == [(a.code, a.step) for a in run(with_start)]


def destroyed_at(step: int, dead_from: int) -> dict[str, float]:
    dead = step >= dead_from
    return {
        "reward/total": 0.0 if dead else 0.3, "groups/flat": 1.0 if dead else 0.7,
        "entropy/mean": 0.02 if dead else 0.3, "length/truncated": 1.0 if dead else 0.0,
    }  # fmt: skip


def test_a_policy_that_jumped_and_earns_nothing_since_is_destroyed_whatever_its_text_looks_like():
    healthy = {"reward/total": 0.4, "groups/flat": 0.5, "entropy/mean": 0.3, "length/truncated": 0.0}
    dead = healthy | {"reward/total": 0.0, "groups/flat": 1.0}

    def stops(shift: float) -> list[tuple[str, float]]:
        rows = [(s, healthy | {"shift/kl_old": shift}) for s in (1, 2)] + [(s, dead) for s in range(3, 12)]
        return [(alert.code, alert.step) for alert in run(rows) if alert.severity == "stop"]

    assert stops(2.2) == [("A11", 7)]
    assert stops(0.3) == []


def test_policy_destroyed_in_the_first_rows_is_stopped_after_five_dead_rows_without_waiting_for_the_warm_up():
    stop = next(a for a in run([(s, destroyed_at(s, 4)) for s in range(1, 31)]) if a.severity == "stop")
    assert (stop.code, stop.step, stop.title) == ("A11", 8, "policy destroyed")
    assert stop.evidence["window"] == [4, 8]
    assert stop.evidence["damage"] == ["every answer cut off", "next to no entropy left"]


@pytest.mark.parametrize("alive", ["reward/total", "groups/flat", "length/truncated"])
def test_policy_with_one_sign_of_life_is_not_called_destroyed(alive):
    rows = [(s, destroyed_at(s, 4) | {alive: destroyed_at(1, 4)[alive]}) for s in range(1, 16)]
    assert not [a for a in run(rows) if a.title == "policy destroyed"]


def test_five_unlucky_rows_of_a_log_that_shows_nothing_of_the_policy_are_no_destruction():
    """Batches of six samples, a reward of 0 or more by luck, and neither entropy nor truncation logged."""
    rewards = [1.7, 0.8, 2.1, 0.0, 1.6, 0.0, 0.0, 0.0, 0.0, 0.0, 1.7, 1.7, 1.25]
    rows = [(s, {"reward/total": r, "reward/std": float(r > 0)}) for s, r in enumerate(rewards, 1)]
    assert [a for a in run(rows) if a.severity == "stop"] == []
