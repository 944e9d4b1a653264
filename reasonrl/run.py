"""The state of one run and its record: what is loaded, resumed, checkpointed, logged and told to the caller."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl import checkpoint, distributed, sharding
from reasonrl.alerts import Alert, AlertMonitor
from reasonrl.config import Config, canonical, code_version, doubts, run_key, to_dict
from reasonrl.data import ProblemStream
from reasonrl.entropy import Thermostat
from reasonrl.errors import CheckpointError, classify
from reasonrl.evaluate import evaluate
from reasonrl.events import Event, EventLog, make_folder, read_events
from reasonrl.kl import needs_reference
from reasonrl.lazy import torch
from reasonrl.logline import log_line
from reasonrl.models import load_policy
from reasonrl.models.policy import Policy, Reference, make_reference
from reasonrl.optim import Optimizer
from reasonrl.rewards import Scorer, WeightSchedule, load_scorers
from reasonrl.tasks import Task, load_task
from reasonrl.tracking import Tracker, make_tracker
from reasonrl.types import Problem, Summary

PRIORITY = {None: 0, "pause": 1, "stop": 2}
STATUS = {None: "finished", "pause": "paused", "stop": "stopped"}


@dataclass
class Run:
    """Everything that lives as long as a run; `step` is the last finished rollout step."""

    config: Config
    run_dir: Path
    log: EventLog | None  # None on processes that do not write
    on_event: Callable[[Event], str | None]
    tracker: Any
    policy: Policy
    reference: Reference | None
    task: Task
    heldout: list[Problem]
    problems: ProblemStream
    optimizer: Optimizer
    monitor: AlertMonitor
    weights: WeightSchedule
    scorers: dict[str, Scorer]
    thermostat: Thermostat
    sharded: sharding.Sharded | None = None
    step: int = 0
    gradient_steps: int = 0
    starved: int = 0
    entropy: float | None = None
    predicted_change: float = 0.0  # of the entropy, by the last step's updates
    command: str | None = None
    stop_reason: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    saved: int | None = None
    warned: set[str] = field(default_factory=set)

    # -- the record ------------------------------------------------------------------------------------------

    def emit(self, kind: str, sync: bool = False, **fields: Any) -> None:
        """Append one event to the log, pass it on, and keep the strongest answer (stop over pause)."""
        if self.log is None:
            return
        event = {"type": kind, "time": time.time(), **fields}
        self.log.append(event, sync=sync)
        if not self.config.quiet:
            line = log_line(event, self.config.steps)
            if line:
                print(line, flush=True)
        self.tracker.log(event)
        answer = self.on_event(event)
        if PRIORITY.get(answer, 0) > PRIORITY[self.command]:
            self.command = answer

    def learner(self) -> contextlib.AbstractContextManager[Policy]:
        """Yield the policy whose weights the optimizer changes: the one that samples, or its sharded twin."""
        return contextlib.nullcontext(self.policy) if self.sharded is None else self.sharded.training()

    def goes_on(self) -> bool:
        """Return whether another step is due; all processes take the first one's word for it."""
        self.command, self.stop_reason = distributed.gather([(self.command, self.stop_reason)])[0]
        return self.step < self.config.steps and self.command is None

    def warn(self, message: str) -> None:
        """Record a warning."""
        self.emit("warning", message=message)

    def warn_once(self, message: str | None) -> None:
        """Record a warning unless it has been said with these or other numbers; None says nothing."""
        kind = re.sub(r"\d+", "#", message or "")
        if message is not None and kind not in self.warned:
            self.warned.add(kind)
            self.warn(message)

    def record_step(self, metrics: dict[str, float]) -> None:
        """End rollout step `step + 1`: held-out score when due, the row, alerts, checkpoint when due."""
        self.step += 1
        config = self.config
        held_out = self.evaluate() if _evaluated(config, self.step) else {}
        self.metrics = {**self.metrics, **metrics, **held_out}
        self.emit("step", step=self.step, metrics=metrics)
        for alert in self.monitor.update(self.step, {**metrics, **held_out}):
            self.raise_alert(alert)
        every = config.checkpoint.every
        due = (every and self.step % every == 0) or self.command or self.step == config.steps
        if distributed.from_main(lambda: bool(due)):
            self.save()

    def raise_alert(self, alert: Alert) -> None:
        """Record an alert; a stop ends the run when `alerts.on_stop=stop`."""
        self.emit(**_event_fields(alert))
        if alert.severity == "stop" and self.config.alerts.on_stop == "stop":
            self.command = "stop"
            self.stop_reason = self.stop_reason or alert.to_event()

    def begin(self) -> None:
        """Measure held-out accuracy before the first step, which alerts compare with; nothing in a continued run."""
        if self.step == 0:
            for alert in self.monitor.update(0, self.evaluate()):
                self.raise_alert(alert)

    def evaluate(self) -> dict[str, float]:
        """Measure held-out accuracy now, record it, and return its metrics."""
        started = time.perf_counter()
        config = self.config
        result = evaluate(self.policy, self.task, self.heldout, config.eval, config.sampling)
        metrics = {**result.metrics, "time/eval": time.perf_counter() - started}
        self.emit("eval", step=self.step, metrics=metrics, problems=result.right, samples=config.eval.samples)
        self.emit("samples", step=self.step, rows=result.samples)
        return result.metrics

    # -- the checkpoint --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the state after `step`, once; all processes call it, the first one writes."""
        if self.saved == self.step:
            return
        tensors = {"optimizer.safetensors": self.optimizer.tensors()}
        if self.log is None:
            self.saved = self.step
            return
        tensors["weights.safetensors"] = {str(i): p for i, p in enumerate(self.policy.trainable())}
        state = {
            "step": self.step,
            "gradient_steps": self.gradient_steps,
            "starved": self.starved,
            "entropy": self.entropy,
            "predicted_change": self.predicted_change,
            "alpha": self.thermostat.alpha,
            "running": self.weights.running,
            "learned_at": self.weights.learned_at,
            "problems": self.problems.state(),
            "alerts": self.monitor.state(),
            "metrics": self.metrics,
            "canonical": canonical(self.config),
        }
        root = self.run_dir / "checkpoints"
        path = checkpoint.save(root, self.step, tensors, state, self.config.checkpoint.keep)
        self.saved = self.step
        self.emit("checkpoint", sync=True, step=self.step, path=str(path.relative_to(self.run_dir)))

    def load(self, loaded: checkpoint.Loaded, same_run: bool) -> None:
        """Continue from a checkpoint; a fork (another configuration) starts with a fresh alert history."""
        state, weights = loaded.state, loaded.tensors["weights.safetensors"]
        parameters = {str(index): parameter for index, parameter in enumerate(self.policy.trainable())}
        if {name: weight.shape for name, weight in weights.items()} != {n: p.shape for n, p in parameters.items()}:
            raise CheckpointError(
                f"The checkpoint of step {loaded.step} in {self.run_dir} belongs to another model than "
                f"{self.policy.name}. Choose another run_dir, or the model it was made with."
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        if self.sharded is not None:
            self.sharded.take()
        self.optimizer.load_tensors(loaded.tensors["optimizer.safetensors"])
        self.step, self.gradient_steps = state["step"], state["gradient_steps"]
        self.starved, self.entropy = state["starved"], state["entropy"]
        self.predicted_change = state["predicted_change"]
        self.thermostat.alpha = state["alpha"]
        self.weights.running, self.weights.learned_at = state["running"], state["learned_at"]
        self.problems.load_state(state["problems"])
        self.metrics = state["metrics"]
        if same_run:
            self.monitor.load_state(state["alerts"])
            self.saved = self.step

    def finish(self) -> Summary:
        """Write the end of the run and return its summary."""
        status = STATUS[self.command] if self.step < self.config.steps or self.stop_reason else "finished"
        self.save()
        if self.config.checkpoint.export and status == "finished" and self.log is not None:
            export(self.policy, self.run_dir / "model")
        self.emit("end", sync=True, step=self.step, status=status, reason=self.stop_reason, error_class=None)
        self.tracker.finish(status)
        return Summary(run_key(self.config), status, self.step, self.stop_reason, self.metrics, str(self.run_dir))


def _event_fields(alert: Alert) -> dict[str, Any]:
    event = dict(alert.to_event())
    return {"kind": event.pop("type"), **{key: value for key, value in event.items() if key != "time"}}


def export(policy: Policy, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face form, for `from_pretrained`."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def versions(trainer: str = "ours", sharded: sharding.Sharded | None = None) -> dict[str, str]:
    """Return what the numbers of a run depend on besides its configuration."""
    import numpy
    import transformers

    other = {} if trainer == "ours" else {trainer: importlib.metadata.version(trainer)}
    if sharded is not None:
        other["sharding"] = f"fsdp, reshard_after_forward={str(sharded.reshards).lower()}"
    return other | {
        "code": code_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "threads": str(torch.get_num_threads()),
        "processes": str(distributed.size()),
    }


@contextlib.contextmanager
def open_run(
    config: Config,
    run_dir: Path,
    on_event: Callable[[Event], str | None],
    load: Callable[[Config], Policy] | None = None,
) -> Iterator[Run]:
    """Load everything, resume from the newest sound checkpoint if there is one, and record how it ends.

    `load` replaces the loading of the policy for another trainer, which then keeps its own reference.

    Data and model are loaded before anything is written, so that bad input leaves no half-made folder.
    """
    torch.manual_seed(config.seed)
    sharding.load_everywhere()
    scorers = load_scorers(config.reward)
    task = load_task(config.task, config.seed)
    policy = load(config) if load is not None else load_policy(config.model, config.task.operands)
    policy.configure_prompts(config.task.system, config.task.chat)
    _drop_long_prompts(task, policy, config)
    heldout = task.heldout(config.eval.problems)
    settings = _dotted(to_dict(config)) | {"eval.problems": len(heldout)}  # a data set may hold fewer
    reference = make_reference(policy) if needs_reference(config.kl) and load is None else None
    sharded = sharding.shard(policy) if load is None else None
    main = distributed.is_main()
    make_folder(run_dir)
    thermostat = Thermostat(config.entropy.target, config.entropy.delta, config.entropy.max_coef)
    run = Run(
        config=config,
        run_dir=run_dir,
        log=EventLog(run_dir / "events.jsonl") if main else None,
        on_event=on_event,
        tracker=make_tracker(config, run_dir) if main else Tracker(),
        policy=policy,
        reference=reference,
        task=task,
        heldout=heldout,
        problems=ProblemStream(task, config.seed, config.data.difficulty_gate),
        optimizer=Optimizer((sharded.twin if sharded else policy).trainable(), config.optim),
        monitor=AlertMonitor(config.alerts, settings=settings, group_size=config.sampling.group_size),
        weights=WeightSchedule(config.reward.parts),
        scorers=scorers,
        thermostat=thermostat,
        sharded=sharded,
    )
    try:
        _start(run)
        yield run
    except BaseException as error:
        with contextlib.suppress(Exception):
            text = f"{type(error).__name__}: {error}"
            run.emit("end", sync=True, step=run.step, status="failed", reason=text, error_class=classify(error))
            run.tracker.finish("failed")
        raise
    finally:
        if run.log is not None:
            run.log.close()


def recorded_up_to(path: Path, config: Config) -> int:
    """Return the last rollout step up to which the event log at `path` is whole: every row and every evaluation due.

    A checkpoint behind it would leave a hole for good. A fork's log begins at the step it was forked from; 0 where
    there is no log.
    """
    rows: set[int] = set()
    evaluations: set[int] = set()
    first: int | None = None
    for event in read_events(path) if path.exists() else ():
        if event["type"] == "start" and first is None:
            first = event.get("resumed_from") or 0
        elif event["type"] in ("step", "eval"):
            (rows if event["type"] == "step" else evaluations).add(event["step"])
    step = first or 0
    if first == 0 and 0 not in evaluations:
        return 0
    while step + 1 in rows and (not _evaluated(config, step + 1) or step + 1 in evaluations):
        step += 1
    return step


def _evaluated(config: Config, step: int) -> bool:
    """Return whether held-out accuracy is measured after `step`."""
    return bool(config.eval.every and step % config.eval.every == 0) or step == config.steps


def _start(run: Run) -> None:
    """Load the newest sound checkpoint and write the start event."""
    complaints: list[str] = []
    config = run.config
    known = distributed.from_main(lambda: recorded_up_to(run.run_dir / "events.jsonl", config))

    def ours(state: dict[str, Any]) -> bool:
        return _plain(state["canonical"]) == _plain(canonical(config))

    def objection(step: int, state: dict[str, Any]) -> str | None:
        if step <= known or not ours(state):
            return None
        return f"the event log has lost rows behind step {known}, and they are made again"

    loaded = checkpoint.load_newest(run.run_dir / "checkpoints", complaints.append, objection)
    same_run = loaded is None or ours(loaded.state)
    if loaded is not None:
        run.load(loaded, same_run)
    resumed = run.step if loaded is not None else None
    name = config.name or run_key(config)
    start: dict[str, Any] = {"key": run_key(config), "name": name, "seed": config.seed, "steps": config.steps}
    process: dict[str, Any] = {"resumed_from": resumed, "pid": os.getpid()}
    run.emit("start", **start, config=to_dict(config), versions=versions(config.trainer, run.sharded), **process)
    for complaint in complaints + doubts(config):
        run.warn(complaint)
    if not same_run:
        run.warn(f"Forked at step {run.step}: the checkpoint belongs to another configuration; alerts start afresh.")
    skipped = getattr(run.task, "notes", [])
    for note in skipped:
        run.warn(note)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the configuration as {"optim.lr": ...}, from which alerts compute what to try."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _drop_long_prompts(task: Task, policy: Policy, config: Config) -> None:
    """Let the task drop prompts that do not fit the window beside a whole completion, or `task.max_prompt_tokens`."""
    drop = getattr(task, "drop_long_prompts", None)
    if drop is None:
        return
    room = policy.window - max(config.sampling.max_new_tokens, config.eval.max_new_tokens or 0)
    limit = min(room, config.task.max_prompt_tokens or room)
    around = len(policy.encode(Problem("", "", "")))

    def num_tokens(problem: Problem) -> int:
        bound = len(problem.prompt.encode()) + around  # no tokenizer makes more tokens than bytes
        return bound if bound <= limit else len(policy.encode(problem))

    drop(num_tokens, limit)


def _plain(value: Any) -> Any:
    """Fold tuples and int-like floats, which JSON does not keep apart."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 12)
    return value
