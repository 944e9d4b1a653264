"""Make each disease on purpose with the built-in task and see which alerts it raises.

`python benchmarks/diseases.py [NAME...] [--seeds 0 1 2 3 4] [--folder DIR]`: one process, one run after the other;
about half a minute a run on one CPU core. Every disease must raise one of its codes as a flag or a stop; `healthy`
(the default configuration, one run per seed) must raise neither. Exit code 1 when anything is otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reasonrl.config import from_dict  # noqa: E402
from reasonrl.events import read_events  # noqa: E402


@dataclass(frozen=True)
class Disease:
    """Overrides that make it, the codes that name it, and for faults no setting can make, the fault put in."""

    overrides: dict[str, Any]
    codes: tuple[str, ...]
    why: str
    fault: str = ""


QUICK = {"eval": {"every": 5, "problems": 100, "samples": 2}, "checkpoint": {"every": 0}, "quiet": True}
DISEASES: dict[str, Disease] = {
    "learning_rate_too_high": Disease(
        {"optim": {"lr": 2e-3}}, ("A11", "A15", "A04"), "16 updates a step at 50 times the sound rate"
    ),
    "symmetric_clip_many_updates": Disease(
        {"loss": {"low": 0.2, "high": 0.2}, "optim": {"inner_epochs": 8, "lr": 3e-4}, "steps": 30},
        ("A14", "A15", "A03"),
        "32 updates on one batch: the policy runs away from the sampler",
    ),
    "short_budget_no_filter": Disease(
        {"sampling": {"max_new_tokens": 8}, "model": {"careful": 1.0}},
        ("A08",),
        "traces of 12 to 16 tokens under a budget of 8",
    ),
    "all_hard": Disease(
        {"steps": 40}, ("A05",), "training problems that nobody can solve: no answer is the right one", "unsolvable"
    ),
    "format_weight_5": Disease(
        {
            "model": {"careful": 0.95, "mode_share": 0.9, "noise": 0.4, "bracket_share": 0.02, "guess_bracket": True},
            "task": {"guess_right": 0.0},
            "reward": {"parts": {"correctness": {"weight": 1.0}, "format": {"weight": 5.0}}},
            "steps": 60,
        },
        ("A12",),
        "guesses carry the bracket, traces do not, and the bracket pays five times the answer",
    ),
    "reference_drift": Disease(
        {"reward": {"random": True}, "kl": {"monitor": True}, "model": {"careful": 1.0}, "optim": {"lr": 1e-4}},
        ("A09",),
        "a coin flip for a reward: nothing to learn, and nothing holds the policy near its reference",
    ),
    "wrong_temperature": Disease(
        {"sampling": {"temperature": 1.5}}, ("A17",), "log-probs without the sampler's temperature", "temperature"
    ),
}


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """Put a fault into trainer or data that no setting can make."""
    from reasonrl import update
    from reasonrl.lazy import torch
    from reasonrl.tasks.arithmetic import Arithmetic

    right, solvable = update.completion_logprobs, Arithmetic.train_problem

    def forgets_temperature(policy, prompts, owner_B, completions, rows_B, **options):  # type: ignore[no-untyped-def]
        cold = dataclasses.replace(completions, temperature_BT=torch.ones_like(completions.temperature_BT))
        return right(policy, prompts, owner_B, cold, rows_B, **options)

    def unsolvable(task: Arithmetic, index: int):  # type: ignore[no-untyped-def]
        return dataclasses.replace(solvable(task, index), gold="none")

    patches = {
        "": contextlib.nullcontext(),
        "temperature": mock.patch.object(update, "completion_logprobs", forgets_temperature),
        "unsolvable": mock.patch.object(Arithmetic, "train_problem", unsolvable),
    }
    with patches[name]:
        yield


def run(overrides: dict[str, Any], seed: int, folder: Path, fault_name: str = "") -> list[dict[str, Any]]:
    """Train once and return the alert events."""
    from reasonrl.train import train

    config = from_dict({**QUICK, "seed": seed, **overrides})
    with fault(fault_name):
        train(config, folder)
    return [event for event in read_events(folder / "events.jsonl") if event["type"] == "alert"]


def summary(alerts: Sequence[dict[str, Any]]) -> str:
    """Flags and stops as 'A11 stop@23'."""
    found = [f"{a['code']} {a['severity']}@{a['step']:g}" for a in alerts if a["severity"] != "note"]
    return ", ".join(found) or "nothing above a note"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the diseases and the healthy seeds; 1 when one is missed or a healthy run is flagged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DISEASES)}, healthy; default all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds of the healthy runs")
    parser.add_argument("--folder", type=Path, help="where to keep the runs; default: nowhere")
    args = parser.parse_args(argv)
    wanted = args.names or [*DISEASES, "healthy"]
    unknown = [name for name in wanted if name not in DISEASES and name != "healthy"]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(DISEASES)}, healthy")
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        for name in wanted:
            seeds = args.seeds if name == "healthy" else args.seeds[:1]
            for seed in seeds:
                disease = DISEASES.get(name, Disease({}, (), "the default configuration"))
                started = time.monotonic()
                alerts = run(disease.overrides, seed, folder / f"{name}_{seed}", disease.fault)
                loud = [a for a in alerts if a["severity"] != "note"]
                right = any(a["code"] in disease.codes for a in loud) if disease.codes else not loud
                failed += not right
                verdict = "ok    " if right else "WRONG "
                expected = " or ".join(disease.codes) or "nothing"
                seconds = time.monotonic() - started
                print(
                    f"{verdict} {name} seed {seed}: {summary(alerts)} (expected {expected}; {seconds:.0f} s)",
                    flush=True,
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
