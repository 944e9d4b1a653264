"""A few long-lived processes that compare answers, each comparison under a hard limit.

The limit counts processor seconds of the comparison, so a busy machine does not turn right answers into timeouts;
a wall-clock limit several times as long stands behind it. A comparison that passes either, runs out of memory or
crashes costs its process, which is replaced, and nothing else. Processes end with their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from reasonrl.errors import VerifierError

WALL_FACTOR = 20.0  # wall-clock limit as a multiple of the processor limit
START_S = 300.0  # for a process to import what it needs, on a busy machine
ROWS_PER_WORKER = 8  # fewer open comparisons than this do not deserve another process
CACHE_SIZE = 100_000


class _Worker:
    """One process and the row it works on."""

    def __init__(self, module: str, limit_s: float) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(limit_s), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C belongs to the parent
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.ready = False
        self.row: int | None = None
        self.deadline = time.monotonic() + START_S
        self.buffer = b""

    def read_line(self) -> bytes | None:
        """Return a whole line, b"" when there is none yet, None when the process is gone."""
        data = os.read(self.output.fileno(), 65536)
        if not data:
            return None
        self.buffer += data
        if b"\n" not in self.buffer:
            return b""
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        for stream in (self.input, self.output):
            with contextlib.suppress(OSError):
                stream.close()
        self.process.wait()


class Pool:
    """Runs (gold, answer) comparisons in processes of `module`; each may use `limit_s` processor seconds."""

    def __init__(self, module: str, limit_s: float, size: int | None = None) -> None:
        self.module = module
        self.limit_s = limit_s
        self.size = size or max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self._workers: list[_Worker] = []
        self._cache: dict[tuple[str, str], str] = {}
        self._pid = os.getpid()

    def compare(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        """Return a reason (correct, wrong, undecided, timeout) per row; equal rows are compared once."""
        rows = list(rows)
        todo = [row for row in dict.fromkeys(rows) if row not in self._cache]
        if todo:
            if len(self._cache) + len(todo) > CACHE_SIZE:
                self._cache = {row: self._cache[row] for row in set(rows) - set(todo)}
            self._cache |= dict(zip(todo, self._run(todo), strict=True))
        return [self._cache[row] for row in rows]

    def close(self) -> None:
        """End all processes; the next comparison starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _run(self, rows: list[tuple[str, str]]) -> list[str]:
        if self._pid != os.getpid():  # a fork must not talk to its parent's processes
            self._workers, self._pid = [], os.getpid()
        reasons = [""] * len(rows)
        waiting = list(range(len(rows)))[::-1]
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while not all(reasons):
                self._hire(selector, len(waiting))
                for worker in self._workers:
                    if worker.ready and worker.row is None and waiting:
                        self._assign(worker, waiting.pop(), rows)
                first = min((w.deadline for w in self._workers if not w.ready or w.row is not None), default=0.0)
                events = selector.select(max(0.0, min(first - time.monotonic(), 5.0)))
                for event, _ in events:
                    self._receive(event.data, reasons, selector)
                for worker in list(self._workers):
                    if (not worker.ready or worker.row is not None) and time.monotonic() > worker.deadline:
                        self._dismiss(worker, reasons, selector)
        return reasons

    def _hire(self, selector: selectors.BaseSelector, num_waiting: int) -> None:
        busy = sum(worker.row is not None for worker in self._workers)
        wanted = min(self.size, busy + -(-num_waiting // ROWS_PER_WORKER))
        while len(self._workers) < wanted:
            worker = _Worker(self.module, self.limit_s)
            self._workers.append(worker)
            selector.register(worker.output, selectors.EVENT_READ, worker)

    def _assign(self, worker: _Worker, index: int, rows: list[tuple[str, str]]) -> None:
        worker.row = index
        worker.deadline = time.monotonic() + self.limit_s * WALL_FACTOR
        with contextlib.suppress(OSError):  # it died meanwhile: its closed output tells
            worker.input.write(json.dumps(rows[index]).encode() + b"\n")
            worker.input.flush()

    def _receive(self, worker: _Worker, reasons: list[str], selector: selectors.BaseSelector) -> None:
        line = worker.read_line()
        if line is None:
            self._dismiss(worker, reasons, selector)
        elif line and not worker.ready:
            worker.ready = True
        elif line and worker.row is not None:
            reasons[worker.row] = line.decode()
            worker.row = None

    def _dismiss(self, worker: _Worker, reasons: list[str], selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.output)
        self._workers.remove(worker)
        worker.kill()
        if not worker.ready:
            raise VerifierError(
                f"A verifier process ({self.module}) could not start (exit status {worker.process.returncode}). "
                f"Run `{sys.executable} -m {self.module} 3` to see why."
            )
        if worker.row is not None:
            reasons[worker.row] = "timeout"


_POOLS: dict[tuple[str, float], Pool] = {}


def shared_pool(module: str, limit_s: float) -> Pool:
    """Return this process's pool for `module` and limit, making it on first use."""
    return _POOLS.setdefault((module, limit_s), Pool(module, limit_s))


@atexit.register
def close_pools() -> None:
    """End the processes of all pools of this process."""
    for pool in _POOLS.values():
        if pool._pid == os.getpid():
            pool.close()
