"""One training run from the command line: `python sweep.py`."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from reasonrl.config import run_key, validate
from reasonrl.distributed import launched_rank
from reasonrl.errors import ConfigError, EngineError, Mistake
from reasonrl.events import Event, make_folder, read_events
from sweeps import overrides as ov
from sweeps.arms import idle_values
from sweeps.compose import resolve, typed_config, unknown_keys
from sweeps.config import folder_mistakes, run_section
from sweeps.engines.base import PATIENCE

OF_SWEEPS = ("sweep", "study", "engine")
EXIT_CODES = {"finished": 0, "stopped": 3, "paused": 130}
# Libraries that talk on import or per run; what matters to a user reaches the log line or an error.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
SUMMARY = ("eval/accuracy", "reward/total", "entropy/mean", "length/mean", "groups/flat", "shift/kl_old")


def train_once(cfg: DictConfig, texts: Sequence[str] = ()) -> int:
    """Train into `run_dir` (default results/single/<key>) and print a summary; `texts` are the typed overrides.

    Returns 0 when the run finished, 3 when it was stopped, 130 when paused. Under `accelerate launch` the first
    process speaks for all.

    The same command continues an interrupted run and only reports a finished one. Raises ConfigError with all
    mistakes before anything is written.
    """
    mistakes = unknown_keys(cfg)
    if mistakes:
        raise ConfigError(mistakes)
    whole = resolve(cfg)
    config = typed_config(run_section(whole))
    if config.run_dir:
        unusable = folder_mistakes("run_dir", config.run_dir, Path(config.run_dir))
    else:
        unusable = folder_mistakes("results", whole["results"], Path(whole["results"]) / "single")
    if mistakes := validate(config) + unusable + _lost(texts, whole):
        raise ConfigError(mistakes)
    key = run_key(config)
    run_dir = Path(config.run_dir) if config.run_dir else Path(whole["results"]) / "single" / key
    speaks = launched_rank() == 0
    ended = _last_end(run_dir)
    if ended and ended.get("status") in ("finished", "stopped"):
        if speaks:
            print(f"Run {key} is {ended['status']} at step {ended.get('step')}. Remove {run_dir} to repeat.")
        return EXIT_CODES[ended["status"]]
    for name, value in (QUIET | PATIENCE).items():
        os.environ.setdefault(name, value)
    from reasonrl.train import train

    alone = _alone_in(run_dir) if speaks else nullcontext()
    with alone, _pause_on_interrupt(speaks) as pressed, _progress_bar(config.steps, speaks) as advance:

        def on_event(event: Event) -> str | None:
            advance(event)
            return "pause" if pressed else None

        summary = train(config, run_dir, on_event)
    if speaks:
        _print_summary(summary.key, summary.status, summary.step, summary.reason, summary.metrics, run_dir)
    return EXIT_CODES.get(summary.status, 1)


def _lost(texts: Sequence[str], whole: Mapping[str, Any]) -> list[Mistake]:
    """Typed overrides that one run would lose without a word."""
    of_sweeps = [text for text in texts if ov.key_of(text).split(".")[0] in OF_SWEEPS]
    mistakes = [
        Mistake(ov.key_of(text), text.partition("=")[2], "has no effect on a single run", "Add -m, or leave it out.")
        for text in of_sweeps
    ]
    return [*mistakes, *ov.ignored(whole, texts), *ov.repeated(texts), *idle_values(texts, [run_section(whole)])]


@contextmanager
def _alone_in(run_dir: Path) -> Iterator[None]:
    """Keep a second process out of the run's folder; EngineError names the one that trains there.

    The lock is POSIX's: it ends with its process, and the verifiers' processes do not inherit it.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    make_folder(run_dir)
    path = run_dir / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            file.seek(0)
            holder = file.read().strip() or "another one"
            raise EngineError(f"{run_dir} is being trained by process {holder}; wait for it, or end it.") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            for folder in made:  # as empty as before where bad input ended it
                with suppress(OSError):
                    folder.rmdir()


@contextmanager
def _progress_bar(steps: int, speaks: bool) -> Iterator[Callable[[Event], None]]:
    """Show steps done, time and time left below the log lines, on a terminal only; yields what takes the events."""
    if not (speaks and sys.stdout.isatty()):
        yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(soft_wrap=True), transient=True) as bar:
        task = bar.add_task("", total=steps, start=False)

        def advance(event: Event) -> None:
            if event["type"] == "start":
                bar.update(task, completed=event.get("resumed_from") or 0)
                bar.start_task(task)
            elif event["type"] == "step":
                bar.update(task, completed=event["step"])

        yield advance


@contextmanager
def _pause_on_interrupt(speaks: bool = True) -> Iterator[list[int]]:
    """Collects Ctrl-C: the first lets the step end and writes a checkpoint, the second interrupts at once."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        if pressed:
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        pressed.append(number)
        if speaks:
            print("Pausing after this step (Ctrl-C again to leave at once) ...", flush=True)

    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _last_end(run_dir: Path) -> Event | None:
    path = run_dir / "events.jsonl"
    if not path.exists():
        return None
    last: Event | None = None
    for event in read_events(path):
        if event["type"] in ("start", "end"):
            last = event if event["type"] == "end" else None
    return last


def _print_summary(key: str, status: str, step: int, reason: Any, metrics: Mapping[str, float], run_dir: Path) -> None:
    print(f"\nRun {key}: {status} at step {step}")
    if isinstance(reason, Mapping):
        print(f"  because {reason.get('code')} {reason.get('title')}: {reason.get('message')}")
        if reason.get("intervention"):
            print(f"  try: python sweep.py {' '.join(reason['intervention'])}")
    elif reason:
        print(f"  because {reason}")
    shown = [f"{name} {metrics[name]:.3f}" for name in SUMMARY if name in metrics]
    if shown:
        print("  " + ", ".join(shown))
    print(f"  {run_dir}/events.jsonl holds every row, {run_dir}/checkpoints the weights")
    if status == "paused":
        print("  the same command continues it")
