"""The one line a run prints per step, and what it prints of other events."""

from __future__ import annotations

from reasonrl.events import Event
from reasonrl.metrics import METRICS

_FIXED = (
    ("reward", "reward/total", "{:.3f}"),
    ("loss", "loss/total", "{:+.4f}"),
    ("kl", "kl/ref", "{:.4f}"),
    ("tok/s", "speed/tokens_per_s", "{:.0f}"),
    ("len", "length/mean", "{:.1f}"),
    ("adv", "advantage/mean", "{:+.3f}"),
    ("adv_std", "advantage/std", "{:.3f}"),
    ("entropy", "entropy/mean", "{:.3f}"),
    ("shift", "shift/kl_old", "{:.5f}"),
    ("flat", "groups/flat", "{:.2f}"),
)


def log_line(event: Event, num_steps: int) -> str | None:
    """Return the printed form of an event, or None where it is not printed."""
    kind = event["type"]
    if kind == "step":
        return _step_line(event, num_steps)
    if kind == "eval":
        metrics = event["metrics"]
        shown = " ".join(f"{name.removeprefix('eval/')} {metrics[name]:.3f}" for name in metrics if name in METRICS)
        return f"  held out @{event['step']}: {shown}"
    if kind == "alert":
        tried = f" Try: {' '.join(event['intervention'])}" if event.get("intervention") else ""
        return f"  [{event['severity']}] {event['code']} {event['title']}: {event['message']}{tried}"
    if kind == "warning":
        return f"  warning: {event['message']}"
    return None


def _step_line(event: Event, num_steps: int) -> str:
    metrics = event["metrics"]
    words = [f"step {event['step']}/{num_steps}"]
    for label, name, form in _FIXED:
        words.append(f"{label} {form.format(metrics[name])}" if name in metrics else f"{label} -")
        if name == "reward/total":
            parts = sorted(k for k in metrics if k.startswith("reward/") and k not in ("reward/total", "reward/std"))
            words += [f"{part.removeprefix('reward/')} {metrics[part]:.3f}" for part in parts]
    return " | ".join(words)
