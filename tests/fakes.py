"""A trainer that costs nothing, for tests and benchmarks of everything around it.

`train` has the signature of `reasonrl.train.train`, takes the plain config dict, writes real event logs and real
checkpoint folders, continues from them, and obeys "stop" and "pause" within the step. What it measures is a chain
of hashes over seed, step and parameters: a row is right only if every row before it was made exactly once.

`config["fake"]` scripts its behaviour:
    sleep      seconds per step                     speed      steps per call of sleep (uneven lengths)
    die_at     SIGKILL to itself at this step       times      how often the scripted mishap happens (default 1)
    raise_at   ValueError at this step              exit_at    os._exit(3) at this step
    hang_at    sleeps for an hour at this step      disk_at    OSError(ENOSPC) at this step
    bad_device a device whose worker is killed at every step
    oom_above  out of memory while optim.micro_batch_size is above this
    alert_at   raises a stop alert at this step     flag_at    raises a flag at this step
    collapse_at  entropy, reward and accuracy fall from this step on (a stop alert follows after 5 steps)
    accuracy   final accuracy (else from the params)     no_eval   records no metric
    child      seconds to keep a child process of the worker alive
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrl.events import EventLog
from sweeps.types import Plan, RunSpec

Event = dict[str, Any]


@dataclass
class Summary:
    """What the real trainer returns, as far as a worker looks at it."""

    status: str
    step: int


class _Run:
    def __init__(self, config: Mapping[str, Any], run_dir: Path, on_event: Callable[[Event], str | None]) -> None:
        self.config, self.run_dir, self.on_event = config, run_dir, on_event
        self.fake: Mapping[str, Any] = config.get("fake") or {}
        self.log = EventLog(run_dir / "events.jsonl")
        self.command: str | None = None
        self.reason: Any = None

    def emit(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "time": time.time(), **fields}
        self.log.append(event)
        answer = self.on_event(event)
        if answer == "stop" or (answer == "pause" and self.command is None):
            self.command = answer

    def mishap(self, name: str, step: int) -> bool:
        """True when the scripted mishap is due; each happens `times` times over all attempts."""
        if self.fake.get(name) != step:
            return False
        path = self.run_dir / f"mishap_{name}"
        count = int(path.read_text()) if path.exists() else 0
        if count >= int(self.fake.get("times", 1)):
            return False
        path.write_text(str(count + 1))
        return True

    def save(self, step: int, chain: str) -> None:
        root = self.run_dir / "checkpoints"
        draft, target = root / f".draft_{step}", root / f"step_{step:06d}"
        draft.mkdir(parents=True, exist_ok=True)
        (draft / "state.json").write_text(json.dumps({"step": step, "chain": chain}))
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        keep = int((self.config.get("checkpoint") or {}).get("keep", 2))
        for old in sorted(root.glob("step_*"), reverse=True)[keep:]:
            shutil.rmtree(old, ignore_errors=True)
        self.emit("checkpoint", step=step, path=f"checkpoints/step_{step:06d}")


def train(config: Mapping[str, Any], run_dir: Path, on_event: Callable[[Event], str | None]) -> Summary:
    """Run the script of `config["fake"]` for `config["steps"]` steps."""
    run_dir.mkdir(parents=True, exist_ok=True)
    run = _Run(config, run_dir, on_event)
    try:
        return _loop(run)
    except BaseException as error:
        with contextlib.suppress(OSError):
            run.emit("end", step=0, status="failed", reason=f"{type(error).__name__}: {error}", error_class=None)
        raise
    finally:
        run.log.close()


train.takes_dict = train.no_torch = True  # type: ignore[attr-defined]


def spy(config: Mapping[str, Any], run_dir: Path, on_event: Callable[[Event], str | None]) -> None:
    """A "trainer" that tells which variables its worker was started with."""
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    on_event({"type": "spy", "seen": {name: os.environ.get(name) for name in names}})


spy.takes_dict = spy.no_torch = True  # type: ignore[attr-defined]


def train_on_ranks(config: Mapping[str, Any], run_dir: Path, on_event: Callable[[Event], str | None]) -> None:
    """A trainer on several processes: every rank leaves a file, the first one trains."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    (run_dir / f"rank_{rank}_of_{size}").write_text(str(os.getpid()))
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        (run_dir / f"fsdp_{rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    if rank == "0":
        deadline = time.monotonic() + 60  # the end of the first one ends all, also those that begin late
        while len(list(run_dir.glob(f"rank_*_of_{size}"))) < int(size) and time.monotonic() < deadline:
            time.sleep(0.02)
        train(config, run_dir, on_event)
    else:
        time.sleep(float((config.get("fake") or {}).get("rank_sleep", 0)))


train_on_ranks.takes_dict = train_on_ranks.no_torch = True  # type: ignore[attr-defined]


def _loop(run: _Run) -> Summary:
    config, steps = run.config, int(run.config["steps"])
    step, chain = _newest(run.run_dir / "checkpoints")
    run.emit(
        "start", key=run.run_dir.name, name=config.get("name"), seed=config["seed"], steps=steps, config=dict(config),
        versions={}, resumed_from=step or None, pid=os.getpid(),
    )  # fmt: skip
    if run.fake.get("child"):
        subprocess.Popen(["sleep", str(run.fake["child"])])
    every_eval = int((config.get("eval") or {}).get("every", 5))
    every_save = int((config.get("checkpoint") or {}).get("every", 5))
    if step == 0:
        _evaluate(run, 0, chain)
    while step < steps and run.command is None:
        step += 1
        _mishaps(run, step)
        if run.fake.get("sleep"):
            time.sleep(float(run.fake["sleep"]))
        chain = hashlib.sha256(f"{chain}{config['seed']}{step}{_knobs(config)}".encode()).hexdigest()[:16]
        if every_eval and (step % every_eval == 0 or step == steps):
            _evaluate(run, step, chain)
        run.emit("step", step=step, metrics=_metrics(run.fake, step, chain))
        _alerts(run, step)
        if (every_save and step % every_save == 0) or run.command or step == steps:
            run.save(step, chain)
    status = {None: "finished", "stop": "stopped", "pause": "paused"}[run.command]
    if step >= steps and run.reason is None:
        status = "finished"
    run.emit("end", step=step, status=status, reason=run.reason, error_class=None)
    return Summary(status, step)


def _knobs(config: Mapping[str, Any]) -> str:
    """What decides the rows, in the real trainer's sense: not the micro-batch, not the script of mishaps."""
    optim = {key: value for key, value in (config.get("optim") or {}).items() if key != "micro_batch_size"}
    return json.dumps([optim, config.get("loss")], sort_keys=True)


def _newest(root: Path) -> tuple[int, str]:
    folders = sorted(root.glob("step_*"), reverse=True)
    if not folders:
        return 0, ""
    state = json.loads((folders[0] / "state.json").read_text())
    return state["step"], state["chain"]


def _noise(chain: str) -> float:
    return int(chain[:8] or "0", 16) / 0xFFFFFFFF - 0.5


def _sickness(fake: Mapping[str, Any], step: int) -> float:
    """1 while healthy, falling to 0 within five steps of `collapse_at`."""
    since = step - int(fake.get("collapse_at") or 1_000_000_000)
    return 1.0 if since < 0 else max(0.0, 1.0 - since / 5)


def _metrics(fake: Mapping[str, Any], step: int, chain: str) -> dict[str, float]:
    health = _sickness(fake, step)
    return {
        "reward/total": health * (1 - math.exp(-step / 20)) + 0.01 * _noise(chain),
        "entropy/mean": health * (0.2 + 0.4 * math.exp(-step / 20)) + 0.01 * _noise(chain[8:]),
        "speed/tokens_per_s": 1000.0,
        "chain": float(int(chain[:12], 16)),
    }


def _evaluate(run: _Run, step: int, chain: str) -> None:
    if run.fake.get("no_eval"):
        return
    steps = int(run.config["steps"])
    final = run.fake.get("accuracy")
    if final is None:
        # Best at lr 1e-4, like a search expects; the seed moves it a little.
        lr = float((run.config.get("optim") or {}).get("lr", 1e-4))
        final = 0.8 - 0.1 * abs(math.log10(lr) + 4)
    accuracy = float(final) * _sickness(run.fake, step) * (step + 1) / (steps + 1) * (1 + 0.01 * _noise(chain))
    run.emit("eval", step=step, metrics={"eval/accuracy": accuracy}, problems=[1, 0], samples=1)


def _alerts(run: _Run, step: int) -> None:
    due = run.fake.get("alert_at")
    if run.fake.get("collapse_at"):
        due = int(run.fake["collapse_at"]) + 5
    if run.fake.get("flag_at") == step:
        run.emit("alert", **_alert(step, "flag"))
    if due == step:
        run.emit("alert", **_alert(step, "stop"))
        if (run.config.get("alerts") or {}).get("on_stop", "stop") == "stop":
            run.command, run.reason = "stop", _alert(step, "stop")


def _alert(step: int, severity: str) -> dict[str, Any]:
    return {
        "step": step, "code": "A03", "title": "entropy collapse", "severity": severity,
        "message": f"0.02 nats at step {step} (was 0.61)",
        "evidence": {"window": [max(1, step - 5), step], "mean": 0.02},
        "intervention": ["optim.lr=1e-5"],
    }  # fmt: skip


def _mishaps(run: _Run, step: int) -> None:
    limit = run.fake.get("oom_above")
    if limit is not None and int((run.config.get("optim") or {}).get("micro_batch_size") or 64) > int(limit):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if run.fake.get("bad_device") and run.fake["bad_device"] == os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.kill(os.getpid(), signal.SIGKILL)
    if run.mishap("die_at", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if run.mishap("exit_at", step):
        os._exit(3)
    if run.mishap("hang_at", step):
        time.sleep(3600)
    if run.mishap("raise_at", step):
        raise ValueError(f"a bug at step {step}")
    if run.mishap("disk_at", step):
        raise OSError(errno.ENOSPC, "No space left on device")


class FakeComposer:
    """Makes runs and forks from values without Hydra; a run's key is a hash of its config, as it should be."""

    def __init__(self, base: Mapping[str, Any]) -> None:
        self.base = base

    def make_run(
        self, sweep: str, params: Mapping[str, Any], seed: int, stage: str = "", arm: str | None = None,
        overrides: Any = (),
    ) -> RunSpec:  # fmt: skip
        """One run: `params` are dotted keys."""
        texts = [*overrides, *(f"{key}={value}" for key, value in params.items())]
        name = arm if arm is not None else ",".join(texts) or "base"
        return make_spec(name, seed, with_overrides(self.base, texts), stage, dict(params), texts)

    def make_child(self, sweep: str, run: RunSpec, overrides: Any, step: int) -> RunSpec:
        """A fork of `run`."""
        spec = make_spec(run.arm, run.seed, with_overrides(run.config, overrides), run.stage, run.params)
        spec.key = hashlib.sha256(f"{run.key}{step}{spec.key}".encode()).hexdigest()[:12]
        spec.name, spec.overrides = f"{run.name}+{step}", [*run.overrides, *overrides]
        spec.parent, spec.parent_step = run.key, step
        return spec


def with_overrides(base: Mapping[str, Any], texts: Any) -> dict[str, Any]:
    """A copy of `base` with `key.key=value` put in."""
    config: dict[str, Any] = json.loads(json.dumps(base))
    for text in texts:
        path, _, value = text.partition("=")
        *parents, leaf = path.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        try:
            node[leaf] = json.loads(value)
        except ValueError:
            node[leaf] = value
    return config


def make_spec(
    arm: str, seed: int, config: Mapping[str, Any], stage: str = "", params: Any = None, overrides: Any = ()
) -> RunSpec:
    """A run spec with a key hashed from its config and seed."""
    config = {**config, "seed": seed}
    key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
    return RunSpec(
        key, f"{arm}-s{seed}", arm, seed, stage, list(overrides), config, int(config["steps"]), dict(params or {})
    )


def base_config(steps: int = 10, **fake: Any) -> dict[str, Any]:
    """A small config of a fake run; keyword arguments script its behaviour."""
    return {
        "steps": steps, "eval": {"every": 5}, "checkpoint": {"every": 2, "keep": 2}, "alerts": {"on_stop": "stop"},
        "optim": {"lr": 1e-4, "minibatches": 4, "micro_batch_size": None}, "data": {"prompts_per_step": 32},
        "sampling": {"group_size": 8}, "fake": fake,
    }  # fmt: skip


def make_plan(
    directory: Path, arms: Mapping[str, Mapping[str, Any]] | None = None, seeds: Any = (0, 1), steps: int = 10,
    **settings: Any,
) -> Plan:  # fmt: skip
    """A plan of fake runs: `arms` maps a name to the script of its runs; `seed_scripts` to scripts of one seed.

    Further keyword arguments go to the sections they name: engine, study, sweep, space, stages, base.
    """
    base = settings.get("base") or base_config(steps)
    scripts = settings.get("seed_scripts") or {}
    runs = []
    for seed in seeds:
        for arm, fake in (arms or {}).items():
            script = {"arm": arm, **fake, **scripts.get((arm, seed), {})}
            runs.append(make_spec(arm, seed, {**base, "steps": steps, "fake": script}))
    engine = {
        "kind": "local", "slots": 2, "devices": None, "threads": 1, "per_trial_gpus": 1, "trials_per_gpu": 1,
        "hang_timeout_s": 60.0, "max_retries": 2, "train": "tests.fakes:train",
    }  # fmt: skip
    study = {
        "storage": None, "sampler": "none", "trials": 0, "metric": "eval/accuracy", "direction": "maximize",
        "pruner": "none", "seed": 0, "startup_trials": 5, "abandon": True,
    }  # fmt: skip
    sweep = {"schedule": "depth", "rungs": 4, "budget": {}, "on_alert": "stop", "max_children": 1}
    names = list(arms or {})
    return Plan(
        name=directory.name,
        question="does the sweep hold?",
        runs=runs,
        arms=names,
        baseline=names[0] if names else "",
        seeds=list(seeds),
        sweep={**sweep, **settings.get("sweep", {})},
        engine={**engine, **settings.get("engine", {})},
        study={**study, **settings.get("study", {})},
        directory=directory,
        space=settings.get("space", []),
        stages=settings.get("stages", []),
        code_version="fake",
        composer=FakeComposer({**base, "steps": steps}),  # type: ignore[arg-type]
    )


def rows_of(directory: Path) -> dict[str, dict[int, dict[str, float]]]:
    """{key: {step: metrics}} of all runs of a sweep folder, the last writing of a step winning; clocks left out."""
    from reasonrl.events import read_events

    found: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted((directory / "runs").glob("*/events.jsonl")):
        rows: dict[int, dict[str, float]] = {}
        for event in read_events(path):
            if event["type"] == "step":
                rows[int(event["step"])] = event["metrics"]
        found[path.parent.name] = rows
    return found


def group_members(group: int) -> list[int]:
    """Pids of the processes in a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def main() -> int:
    """A coordinator in a process of its own: `python -m tests.fakes FOLDER JSON-of-make_plan's-arguments`."""
    from sweeps import summary
    from sweeps.runner import run
    from sweeps.types import _entry as read_entry
    from sweeps.types import _stage as read_stage

    summary.make_report = lambda sweep: None  # the report has tests of its own
    settings = json.loads(sys.argv[2])
    scripts = settings.pop("seed_scripts", {})
    pairs = {(arm, int(seed)): script for arm, by_seed in scripts.items() for seed, script in by_seed.items()}
    settings["space"] = [read_entry(entry) for entry in settings.get("space", [])]
    settings["stages"] = [read_stage(stage) for stage in settings.get("stages", [])]
    return run(make_plan(Path(sys.argv[1]), seed_scripts=pairs, **settings))


if __name__ == "__main__":
    raise SystemExit(main())
