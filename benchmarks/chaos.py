"""Kill, stop, cut and delete at random while a sweep runs; the same command must end as if nothing had happened.

    python benchmarks/chaos.py --mishaps 20               # runs that cost nothing, a few minutes
    python benchmarks/chaos.py --mishaps 6 --real         # the built-in task and model

What is done to it: worker and coordinator are killed by SIGKILL, the coordinator is interrupted (SIGINT), a worker
is frozen (SIGSTOP, so that the step timeout has to find it), the study file is deleted, the tail of an event log is
cut in the middle of a line and followed by garbage. The command is given again whenever the coordinator is gone.
At the end: the same keys, the very same rows, every run finished once, no process left, the study complete. Exit
code 1 when any of it is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NAME = "chaos"
HANG_S = {False: 4.0, True: 240.0}
PAUSES_S = {False: (0.3, 2.0), True: (5.0, 25.0)}
CLOCKS = ("time/", "speed/")


@dataclass
class Sweep:
    """A sweep in a folder, given by its command; `real` trains the built-in model, `mishaps` decides its length."""

    results: Path
    real: bool
    mishaps: int
    process: subprocess.Popen[bytes] | None = None
    commands: int = 0
    noted: bool = False
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def directory(self) -> Path:
        return self.results / NAME

    def command(self) -> list[str]:
        """The command as a user would give it."""
        if self.real:
            return [
                sys.executable, "sweep.py", "+sweep=clip_ablation", "-m", "seed=0,1", "eval.every=4",
                "eval.problems=40", f"steps={max(8, 2 * self.mishaps)}", "data.prompts_per_step=8",
                "checkpoint.every=2", f"sweep.name={NAME}", f"results={self.results}", "engine.max_retries=100",
                f"engine.hang_timeout_s={HANG_S[True]}",
            ]  # fmt: skip
        settings = {
            "arms": {"a": {"sleep": 0.05}, "b": {"sleep": 0.08}, "c": {"sleep": 0.03}}, "seeds": [0, 1, 2],
            "steps": max(40, 10 * self.mishaps),
            "engine": {"max_retries": 100, "hang_timeout_s": HANG_S[False]},
        }  # fmt: skip
        return [sys.executable, "-m", "tests.fakes", str(self.directory), json.dumps(settings)]

    def start(self) -> None:
        """Give the command."""
        self.commands += 1
        self.noted = False
        self.results.mkdir(parents=True, exist_ok=True)
        with (self.results / "said.txt").open("ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=log, stderr=log)

    def running(self) -> bool:
        """Whether the coordinator lives; notes its exit code when it has ended."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None and not self.noted:
            self.codes[code] += 1
            self.noted = True
        return code is None

    def workers(self) -> list[int]:
        """Pids of the processes that print into this sweep's folder."""
        found = []
        for link in Path("/proc").glob("[0-9]*/fd/1"):
            with contextlib.suppress(OSError):
                if str(self.directory) in os.readlink(link):
                    found.append(int(link.parts[2]))
        return found

    def finish(self) -> None:
        """Wait for the command's end."""
        assert self.process is not None
        self.process.wait()
        self.running()


def rows_without_clocks(directory: Path) -> dict[str, Any]:
    """{key: {step: metrics}} of all runs, less what depends on the clock."""
    from tests.fakes import rows_of

    return {
        key: {
            step: {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}
            for step, metrics in rows.items()
        }
        for key, rows in rows_of(directory).items()
    }


# -- mishaps: each returns True when it struck ------------------------------------------------------------------------


def kill_worker(sweep: Sweep, dice: random.Random) -> bool:
    """SIGKILL to a worker."""
    return _signal_one(sweep.workers(), signal.SIGKILL, dice)


def freeze_worker(sweep: Sweep, dice: random.Random) -> bool:
    """SIGSTOP to a worker: it makes no step any more."""
    return _signal_one(sweep.workers(), signal.SIGSTOP, dice)


def kill_coordinator(sweep: Sweep, dice: random.Random) -> bool:
    """SIGKILL to the coordinator."""
    assert sweep.process is not None
    sweep.process.kill()
    sweep.process.wait()
    return True


def interrupt(sweep: Sweep, dice: random.Random) -> bool:
    """Ctrl-C, and wait for the checkpoints."""
    assert sweep.process is not None
    sweep.process.send_signal(signal.SIGINT)
    sweep.process.wait()
    return True


def delete_study(sweep: Sweep, dice: random.Random) -> bool:
    """The study file is gone from one moment to the next."""
    found = list(sweep.directory.glob("study.db*"))
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)


def cut_tail(sweep: Sweep, dice: random.Random) -> bool:
    """Everything is killed and the tail of an event log is cut, up to 200 bytes, and followed by garbage."""
    kill_coordinator(sweep, dice)
    _wait_for(lambda: not sweep.workers())
    logs = [path for path in sweep.directory.glob("runs/*/events.jsonl") if b'"finished"' not in path.read_bytes()]
    if logs:
        path = dice.choice(logs)
        data = path.read_bytes()
        path.write_bytes(data[: max(0, len(data) - dice.randrange(1, 200))] + b'{"type":"st\x00')
    return bool(logs)


MISHAPS: dict[str, Callable[[Sweep, random.Random], bool]] = {
    "worker killed": kill_worker,
    "worker frozen": freeze_worker,
    "coordinator killed": kill_coordinator,
    "coordinator interrupted": interrupt,
    "study deleted": delete_study,
    "log tail cut": cut_tail,
}


def _signal_one(pids: list[int], number: int, dice: random.Random) -> bool:
    if not pids:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(dice.choice(pids), number)
        return True
    return False


def _wait_for(condition: Callable[[], bool], timeout: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def torment(sweep: Sweep, count: int, dice: random.Random) -> Counter[str]:
    """Let `count` mishaps happen to a running sweep, then let it finish; returns how often each struck."""
    struck: Counter[str] = Counter()
    deck: list[str] = []
    sweep.start()
    while sum(struck.values()) < count:
        time.sleep(dice.uniform(*PAUSES_S[sweep.real]))
        if not sweep.running():
            if sweep.codes[0]:
                break  # done before everything could happen to it
            sweep.start()
            continue
        deck = deck or dice.sample(sorted(MISHAPS), len(MISHAPS))
        name = deck.pop()
        struck[name] += MISHAPS[name](sweep, dice)
    for _ in range(10):
        sweep.finish()
        if sweep.codes[0]:
            break
        sweep.start()
    return struck


def faults_of(sweep: Sweep, reference: dict[str, Any]) -> list[str]:
    """Everything that is not as if nothing had happened."""
    import optuna

    from reasonrl.events import read_events

    faults = []
    rows = rows_without_clocks(sweep.directory)
    if rows.keys() != reference.keys():
        faults.append(f"keys differ: {sorted(rows.keys() ^ reference.keys())}")
    faults += [f"{key}: its rows differ" for key in rows.keys() & reference.keys() if rows[key] != reference[key]]
    for path in sweep.directory.glob("runs/*/events.jsonl"):
        ends = [event["status"] for event in read_events(path) if event["type"] == "end"]
        if ends.count("finished") != 1:
            faults.append(f"{path.parent.name}: finished {ends.count('finished')} times")
    if not _wait_for(lambda: not sweep.workers(), 10):
        faults.append(f"processes left: {sweep.workers()}")
    study = optuna.load_study(study_name=NAME, storage=f"sqlite:///{sweep.directory}/study.db")
    states = Counter(trial.state.name for trial in study.trials)
    arms = {trial.user_attrs.get("arm") for trial in study.trials if trial.state.name == "COMPLETE"}
    if states["RUNNING"] or states["WAITING"] or len(arms) != 3:
        faults.append(f"the study is not complete: {dict(states)}, arms {arms}")
    return faults


def main() -> int:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mishaps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        calm = Sweep(Path(name) / "calm", args.real, args.mishaps)
        calm.start()
        calm.finish()
        if calm.codes != Counter({0: 1}):
            print((calm.results / "said.txt").read_text()[-3000:])
            return 1
        reference = rows_without_clocks(calm.directory)
        sweep = Sweep(Path(name) / "storm", args.real, args.mishaps)
        struck = torment(sweep, args.mishaps, random.Random(args.seed))
        faults = faults_of(sweep, reference)
        print(f"{'mishap':<26}{'times':>6}")
        for mishap in MISHAPS:
            print(f"{mishap:<26}{struck[mishap]:>6}")
        steps = sum(len(rows) for rows in reference.values())
        print(f"{len(reference)} runs, {steps} steps; the command was given {sweep.commands} times")
        print(f"exit codes {dict(sweep.codes)}")
        if sum(struck.values()) < args.mishaps:
            print(f"the sweep was done after {sum(struck.values())} of {args.mishaps} mishaps")
        for fault in faults:
            print(f"FAULT {fault}")
        if faults:
            print((sweep.results / "said.txt").read_text()[-3000:])
        print("as if nothing had happened" if not faults else f"{len(faults)} faults")
        return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
