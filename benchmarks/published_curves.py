"""DAPO's published curves (Qwen2.5-32B, AIME24 avg@32), replayed row by row in rollout steps through the alert rules.

`python benchmarks/published_curves.py` prints what each profile raises. The points are read off the figures (x in
gradient steps, 16 per rollout step) and joined by straight lines: entropy every rollout step, accuracy as a held-out
score every fifth. The last run is the final one, of which three levels are published without their steps; the dip is
put at several places.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reasonrl.alerts import Alert, AlertMonitor, AlertsConfig  # noqa: E402

UPDATES = 16  # gradient steps per rollout step
Points = Sequence[tuple[float, float]]
Curves = Mapping[str, Points]
# {arm: {metric: [(gradient step, value)]}}; the arms of a figure start from the same model, entropy .67 at step 16.
DAPO: dict[str, Curves] = {
    "clip-higher, with": {
        "entropy/mean": [(16, 0.67), (200, 0.43), (400, 0.39), (1000, 0.44), (1648, 0.344), (3000, 0.49)],
        "eval/accuracy": [(400, 0.23), (800, 0.27), (1600, 0.35), (2480, 0.406)],
    },
    "clip-higher, without": {
        "entropy/mean": [(16, 0.67), (200, 0.35), (300, 0.20), (500, 0.087), (1000, 0.018), (2000, 0.005)],
        "eval/accuracy": [(400, 0.24), (720, 0.269), (2320, 0.25)],
    },
    "overlong filter, with": {
        "entropy/mean": [(16, 0.67), (200, 0.41), (500, 0.29), (1000, 0.13), (2000, 0.04), (4336, 0.007)],
        "eval/accuracy": [(1000, 0.22), (3120, 0.358), (3600, 0.23), (4320, 0.29)],
    },
    "overlong filter, without": {
        "entropy/mean": [(16, 0.67), (500, 0.15), (2288, 0.02), (3500, 0.05), (3888, 4.78), (5000, 1.0)],
        "eval/accuracy": [(1000, 0.16), (2500, 0.27), (4000, 0.2), (4480, 0.302)],
    },
}


def final_run(dip: float, steps: float = 6000, accuracy: bool = True) -> Curves:
    """The final run: entropy .72 -> .32 -> .53 and length 742 -> 566 -> 4693, the dip at gradient step `dip`."""
    curves: dict[str, Points] = {
        "entropy/mean": [(16, 0.72), (dip, 0.32), (steps, 0.53)],
        "length/mean": [(16, 742), (dip, 566), (steps, 4693)],
    }
    return curves | ({"eval/accuracy": [(16, 0.05), (steps, 0.5)]} if accuracy else {})


def at(points: Points, x: float) -> float | None:
    """Value at x on the straight lines between the points; None outside them."""
    for (x0, y0), (x1, y1) in zip(points[:-1], points[1:], strict=True):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def rows(curves: Curves, eval_every: int = 5) -> list[tuple[int, dict[str, float]]]:
    """One row per rollout step."""
    last = max(x for points in curves.values() for x, _ in points)
    out = []
    for step in range(1, int(last // UPDATES) + 1):
        values = {name: at(points, step * UPDATES) for name, points in curves.items()}
        row = {
            n: v for n, v in values.items() if v is not None and (step % eval_every == 0 or not n.startswith("eval/"))
        }
        out.append((step, row))
    return out


def replay(curves: Curves, profile: str = "graded") -> list[Alert]:
    """Every alert a profile raises over the curves."""
    config = AlertsConfig(profile=profile) if profile == "graded" else AlertsConfig(profile, warmup=0, confirm=1)
    monitor = AlertMonitor(config)
    return [alert for step, row in rows(curves) for alert in monitor.update(step, row)]


def main() -> None:
    """Print what each profile raises on each curve."""
    runs = dict(DAPO)
    runs |= {f"final run, dip at rollout step {dip // UPDATES}": final_run(dip) for dip in (320, 960, 2400)}
    for profile in ("textbook", "graded"):
        print(profile)
        for name, curves in runs.items():
            raised = [f"{a.code} {a.severity}@{a.step:g}" for a in replay(curves, profile) if a.severity != "note"]
            print(f"  {name}: {', '.join(raised) or 'never flagged or stopped'}")


if __name__ == "__main__":
    main()
