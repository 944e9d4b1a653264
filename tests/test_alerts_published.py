"""DAPO's published curves in rollout steps: the collapsing arm is stopped, the arms that win never are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "published_curves", Path(__file__).resolve().parents[1] / "benchmarks" / "published_curves.py"
)
assert SPEC is not None and SPEC.loader is not None
curves = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(curves)


def found(name_or_curves, severity):
    points = curves.DAPO[name_or_curves] if isinstance(name_or_curves, str) else name_or_curves
    return [(alert.code, alert.step) for alert in curves.replay(points) if alert.severity == severity]


def test_the_arm_that_collapses_is_stopped_by_entropy_after_its_lead_in_accuracy():
    """It leads in accuracy until rollout step 48; entropy .018 at step 62."""
    code, step = found("clip-higher, without", "stop")[0]
    assert code == "A03" and 48 < step < 90


def test_the_clip_higher_arm_is_never_stopped_or_flagged():
    assert found("clip-higher, with", "stop") == found("clip-higher, with", "flag") == []


@pytest.mark.parametrize("accuracy", [True, False], ids=["with accuracy", "entropy and length only"])
@pytest.mark.parametrize("dip", [200, 400, 800, 1600, 3200, 5000])
def test_the_final_run_is_never_stopped_wherever_its_dip_lies(dip, accuracy):
    """Entropy .72 to .32 to .53, length 742 to 566 to 4693: three times the length, half the entropy; it wins."""
    assert found(curves.final_run(dip, accuracy=accuracy), "stop") == []


def test_the_collapsing_arm_is_stopped_too_when_its_accuracy_is_logged_as_the_reward():
    arm = curves.DAPO["clip-higher, without"]
    as_reward = {"entropy/mean": arm["entropy/mean"], "reward/total": arm["eval/accuracy"]}
    winner = curves.DAPO["clip-higher, with"]
    assert found(as_reward, "stop")[0][0] == "A03"
    assert found({"entropy/mean": winner["entropy/mean"], "reward/total": winner["eval/accuracy"]}, "stop") == []


def test_without_overlong_filter_the_late_surge_is_stopped():
    """Entropy .05 at gradient step 3500, 4.78 at 3888."""
    assert "A04" in [code for code, _ in found("overlong filter, without", "stop")]
