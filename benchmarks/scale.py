"""How many slots one coordinator can serve: the real plan, loop, ledger and study over simulated workers.

    python benchmarks/scale.py                                  # 10,000 runs over 1,000 slots
    python benchmarks/scale.py --arms 100 --slots 100,1000,4000

Nothing is trained and nobody waits: workers are a discrete-event simulation, and the clock that the coordinator sees
jumps to the next event. The coordinator's own CPU time moves the clock too, so that a coordinator that falls behind
its workers is seen to: slots then wait for it. Runs fail (killed, out of memory), are stopped by alerts and are tried
again at the given rates. Files, event by event JSON, ledger and SQLite study are the real ones.

Columns: events the coordinator handled, its CPU per event (microseconds), the peak memory it added, the share of slot
time without a run between the first start and the moment the last run begins, and the share of the simulated time in
which the coordinator was busy. "saturates at" is 1 / (CPU per event), in events per second of all slots together.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import io
import itertools
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOAD_S = 10.0  # for a worker to import torch
METRICS = 40  # numbers in a row, as many as the real trainer records


@dataclass
class Rates:
    """Per run: the chance to be killed once, to run out of memory once, to be stopped by an alert."""

    killed: float = 0.02
    oom: float = 0.01
    stopped: float = 0.05
    step_s: float = 10.0


@dataclass
class Clock:
    """Simulated seconds; `rest` maps the CPU time spent by the coordinator onto it."""

    now: float = 1_700_000_000.0
    engine_cpu: float = 0.0
    _seen: float = field(default_factory=time.process_time)
    coordinator_cpu: float = 0.0

    def catch_up(self) -> None:
        """Count the CPU time since the last call as the coordinator's, and let it pass."""
        cpu = time.process_time()
        self.coordinator_cpu += cpu - self._seen
        self.now += cpu - self._seen
        self._seen = cpu

    def skip_own(self) -> None:
        """Leave out the CPU time since the last call: it was the simulation's."""
        cpu = time.process_time()
        self.engine_cpu += cpu - self._seen
        self._seen = cpu


class SimulatedEngine:
    """Slots whose workers are generators of (seconds until, message); see `sweeps.engines.base.Engine`."""

    def __init__(self, num_slots: int, rates: Rates, clock: Clock) -> None:
        from sweeps.engines.base import Slot

        self.notes: list[str] = []
        self._slots = [Slot(index, (str(index),)) for index in range(num_slots)]
        self._rates, self._clock = rates, clock
        self._due: list[tuple[float, int, int, int, str]] = []
        self._ties = itertools.count()
        self._alive: dict[int, int] = {}  # slot -> which worker of the slot
        self._reached: dict[str, int] = {}
        self._mishaps: dict[str, str | None] = {}
        self._scripts: dict[int, Iterator[tuple[float, dict[str, Any]]]] = {}
        self.events = 0
        self.busy_s, self.first, self.last_start = 0.0, 0.0, 0.0
        self._taken: dict[int, float] = {}
        self.spans: list[tuple[float, float]] = []
        self._row = {f"metric/{index}": 0.123456789 * index for index in range(METRICS)}

    def slots(self) -> Sequence[Any]:
        return self._slots

    def start(self, slot: Any) -> None:
        self.kill(slot)
        self._alive[slot.index] = next(self._ties)
        self._say(slot.index, LOAD_S, {"type": "ready", "pid": 1})

    def send(self, slot: Any, message: dict[str, Any]) -> None:
        if message["type"] != "run":
            return
        self._clock.catch_up()
        self.first = self.first or self._clock.now
        self.last_start = self._clock.now
        self._taken[slot.index] = self._clock.now
        self._scripts[slot.index] = self._train(message)
        self._advance(slot.index)
        self._clock.skip_own()

    def poll(self, timeout: float) -> list[tuple[Any, dict[str, Any]]]:
        self._clock.catch_up()
        clock = self._clock
        if not self._due or self._due[0][0] > clock.now:
            nearest = self._due[0][0] if self._due else clock.now + timeout
            clock.now = min(nearest, clock.now + timeout)
        lines = []
        while self._due and self._due[0][0] <= clock.now:
            at, _, index, worker, line = heapq.heappop(self._due)
            if self._alive.get(index) == worker:
                lines.append((self._slots[index], line))
                self._follow(index, line, at)
        self.events += len(lines)
        clock.skip_own()
        return [(slot, json.loads(line)) for slot, line in lines]

    def kill(self, slot: Any) -> None:
        self._alive.pop(slot.index, None)
        self._scripts.pop(slot.index, None)

    def close(self) -> None:
        self._alive.clear()

    def _say(self, index: int, after: float, message: dict[str, Any], at: float | None = None) -> None:
        line = json.dumps(message)
        begin = self._clock.now if at is None else at
        heapq.heappush(self._due, (begin + after, next(self._ties), index, self._alive[index], line))

    def _follow(self, index: int, line: str, at: float) -> None:
        if '"done"' in line[:20] or '"failed"' in line[:20] or '"exit"' in line[:20]:
            began = self._taken.pop(index, None)
            if began is not None:
                self.spans.append((began, at))
        self._advance(index, at)

    def _advance(self, index: int, at: float | None = None) -> None:
        script = self._scripts.get(index)
        step = next(script, None) if script is not None else None
        if step is None:
            self._scripts.pop(index, None)
        else:
            self._say(index, *step, at=at)

    def _train(self, job: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """What the worker of one run says, and after how many seconds."""
        key, config = job["key"], job["config"]
        steps, every = int(config["steps"]), int(config["eval"]["every"] or 10**9)
        dice = random.Random(key)
        fate, at = self._fate(key, dice, steps)
        pace = self._rates.step_s * dice.uniform(0.8, 1.2)
        step = self._reached.get(key, 0)

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": "event", "key": key, "event": {"type": kind, "time": self._clock.now, **fields}}

        yield 0.1, event("start", resumed_from=step or None)
        while step < steps:
            if step == at and fate == "killed":
                self._alive_exit(key)
                yield pace / 2, {"type": "exit", "code": -9, "signal": 9, "oom": False}
                return
            if step == at and fate == "oom":
                self._alive_exit(key)
                yield pace / 2, {"type": "failed", "key": key, "error_class": "oom", "message": "out of memory"}
                return
            step += 1
            yield pace, event("step", step=step, metrics=self._row)
            if step % every == 0 or step == steps:
                yield pace / 5, event("eval", step=step, metrics={"eval/accuracy": dice.random()})
            if step % 10 == 0:
                self._reached[key] = step
                yield 0.0, event("checkpoint", step=step)
            if step == at and fate == "stopped":
                alert = {
                    "step": step,
                    "code": "A03",
                    "title": "entropy collapse",
                    "severity": "stop",
                    "message": "it fell",
                }
                yield 0.0, event("alert", **alert)
                yield 0.0, event("end", step=step, status="stopped", reason=alert)
                yield 0.0, {"type": "done", "key": key}
                return
        yield 0.0, event("end", step=step, status="finished", reason=None)
        yield 0.0, {"type": "done", "key": key}

    def _fate(self, key: str, dice: random.Random, steps: int) -> tuple[str | None, int]:
        draw, at = dice.random(), dice.randrange(1, steps)
        limits = (("killed", self._rates.killed), ("oom", self._rates.oom), ("stopped", self._rates.stopped))
        for name, chance in limits:
            if draw < chance:
                return (None, at) if self._mishaps.get(key) == "over" else (name, at)
            draw -= chance
        return None, at

    def _alive_exit(self, key: str) -> None:
        self._mishaps[key] = "over"  # each happens once


def make_the_plan(arms: int, seeds: int, steps: int, results: Path) -> Any:
    """The real plan of a grid of learning rates over seeds, made the way `sweep.py` makes it."""
    from hydra.types import RunMode

    from sweeps.compose import make_loader
    from sweeps.config import register
    from sweeps.plan import make_plan

    register()
    rates = ",".join(f"{1e-5 * (1 + index / 100):.6g}" for index in range(arms))
    overrides = [
        f"optim.lr={rates}",
        f"seed=range(0,{seeds})",
        f"steps={steps}",
        f"results={results}",
        "sweep.name=scale",
    ]
    loader = make_loader()
    cfg = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
    return make_plan(cfg, loader, overrides, cfg.hydra)


def simulate(arms: int, seeds: int, steps: int, num_slots: int, rates: Rates) -> dict[str, float]:
    """Run one sweep to its end; what it cost."""
    from sweeps import runner, summary
    from sweeps.story import read_plan

    summary.make_report = lambda sweep: None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        plan = make_the_plan(arms, seeds, steps, Path(folder))
        plan_cpu = time.process_time() - began
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        clock = Clock()
        engine = SimulatedEngine(num_slots, rates, clock)
        runner.make_engine = lambda settings, logs: engine  # type: ignore[assignment]
        real = time.monotonic, time.time, time.sleep
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                time.monotonic = time.time = lambda: clock.now  # type: ignore[assignment]
                time.sleep = lambda seconds: None
                began_at = clock.now
                code = runner.run(plan)
            finally:
                time.monotonic, time.time, time.sleep = real
        counts = {line for line in said.getvalue().splitlines() if "finished," in line and " in " in line}
        assert code == 0 and counts, said.getvalue()[-2000:]
        assert read_plan(plan.directory) is not None
        window = engine.last_start - engine.first
        busy = sum(min(end, engine.last_start) - start for start, end in engine.spans if start < engine.last_start)
        return {
            "runs": len(plan.runs), "slots": num_slots, "events": engine.events,
            "cpu_us": 1e6 * clock.coordinator_cpu / engine.events,
            "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
            "idle": 1 - busy / (window * num_slots) if window > 0 else float("nan"),
            "load": clock.coordinator_cpu / (clock.now - began_at), "plan_s": plan_cpu,
            "hours": (clock.now - began_at) / 3600,
            "study_mb": sum(path.stat().st_size for path in plan.directory.glob("study.db*")) / 2**20,
        }  # fmt: skip


def main() -> None:
    """Print one row per number of slots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="rollout steps per run")
    parser.add_argument("--slots", default="1000", help="one or several numbers of slots")
    parser.add_argument("--step-s", type=float, default=10.0, help="seconds per rollout step")
    args = parser.parse_args()
    print("| runs | slots | plan (CPU s) | events | CPU us per event | saturates at (events/s) | coordinator busy |"
          " slots idle | memory MB | study MB | simulated hours |")  # fmt: skip
    print("|---" * 11 + "|")
    for slots in args.slots.split(","):
        row = simulate(args.arms, args.seeds, args.steps, int(slots), Rates(step_s=args.step_s))
        cells = (
            f"{row['runs']:.0f}", f"{row['slots']:.0f}", f"{row['plan_s']:.1f}", f"{row['events']:.0f}",
            f"{row['cpu_us']:.0f}", f"{1e6 / row['cpu_us']:.0f}", f"{100 * row['load']:.1f} %",
            f"{100 * row['idle']:.2f} %", f"{row['memory_mb']:.0f}", f"{row['study_mb']:.1f}", f"{row['hours']:.2f}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
