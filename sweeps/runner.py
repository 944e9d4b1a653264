"""The coordinator of a sweep: one loop that asks for the next run, listens to the workers, and tells the study.

    while there is work:
        every free slot takes the best next run
        every message of a worker is folded into its run, shown, and judged
        hung runs, commands, heartbeat and the study's database are looked after

It alone opens the study and writes the ledger. What a run did is read from its own event log, so that the same
command continues wherever anything was killed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from reasonrl.errors import EngineError, ReasonRLError
from sweeps.claims import Claims, make_claims, without_password
from sweeps.coordinator import Coordinator
from sweeps.engines import Engine, make_engine
from sweeps.failures import is_disk_full
from sweeps.ledger import Ledger, write_atomic
from sweeps.progress import Progress
from sweeps.search import check_sampler
from sweeps.seats import Seat
from sweeps.types import Plan

POLL_S = 0.2
GRACE_S = 60.0  # for running runs to write a checkpoint after Ctrl-C
OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def run(plan: Plan) -> int:
    """Carry out `plan`, or what is left of it; returns the exit code.

    0: every run finished or was stopped for a stated reason. 1: a run failed, or the sweep could not go on.
    2: refused before anything started. 130: interrupted; the same command continues.
    """
    try:
        check_sampler(plan)
        with make_claims(plan) as claims, contextlib.closing(Ledger(plan.directory, claims.name)) as ledger:
            sweep = _carry_out(plan, claims, ledger)
            with handling(signal.default_int_handler):  # nothing can be torn any more: any signal ends it at once
                return sweep.conclude()
    except ReasonRLError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"The disk is full ({error}). Free some space in {plan.directory};", file=sys.stderr)
        print("the same command then continues: no finished run is lost.", file=sys.stderr)
        return FAILED


def _carry_out(plan: Plan, claims: Claims, ledger: Ledger) -> Coordinator:
    """Set everything up, loop, and take everything down again."""
    with interrupts() as asked, contextlib.ExitStack() as open_things:
        write_atomic(plan.directory / "plan.json", without_password(plan.to_json()))
        engine = make_engine(plan.engine, plan.directory / "workers" / claims.name)
        open_things.callback(engine.close)
        progress = Progress(plan)
        open_things.callback(progress.close)
        seats = [Seat(slot) for slot in engine.slots()]
        sweep = Coordinator(plan, engine, seats, progress, ledger, claims)
        open_things.callback(sweep.close)
        loop(sweep, engine, claims, asked)
    return sweep


def loop(sweep: Coordinator, engine: Engine, claims: Claims, asked: list[int]) -> None:
    """Run until nothing is left to do, or until told to leave and every running run has its checkpoint."""
    deadline: float | None = None
    while not sweep.finished:
        sweep.assign()
        busy = sweep.study.work()
        heard = engine.poll(0.0 if busy else POLL_S)
        if not claims.beat():
            if not claims.shared:
                raise EngineError(f"{sweep.plan.directory} was taken over by another coordinator; this one ends.")
            sweep.sharing.let_go()
        for slot, message in heard:
            sweep.handle(slot, message)
        sweep.tend()
        if asked and not sweep.leaving:
            sweep.leave("interrupted", INTERRUPTED)
            sweep.progress.line(f"  again to leave at once; after {GRACE_S:.0f} s it leaves in any case")
        if sweep.leaving:
            deadline = deadline or time.monotonic() + GRACE_S
            nothing_to_save = not any(seat.begun for seat in sweep.running)  # a model that still loads hears nothing
            if len(asked) > 1 or nothing_to_save or time.monotonic() > deadline:
                return


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that grows by every Ctrl-C or SIGTERM, instead of an exception in the middle of a write."""
    asked: list[int] = []

    def note(number: int, _: Any) -> None:
        asked.append(number)

    with handling(note):
        yield asked


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Give Ctrl-C, SIGTERM and SIGHUP to `handler`."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
