"""Many event logs at once: in this process, or shared out among processes where there is much to read.

Threads gain little here: splitting lines and the JSON of evaluations hold the interpreter's lock.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.eventlog import RunLog, read_log

MUCH = 100 * 2**20  # bytes; less is read sooner than a process has started


def read_logs(paths: Sequence[Path], size: int, processes: int | None = None) -> list[RunLog | OSError]:
    """Parse the event logs at `paths`, `size` bytes together; an error in the place of one that cannot be read.

    `processes`: how many share the work (default: one per core from MUCH bytes on, else none but this).
    """
    count = min(len(paths), processes or (_cores() if size >= MUCH else 1))
    if count < 2:
        return [_read(path) for path in paths]
    with ThreadPoolExecutor(count) as pool:  # a thread listens to each process
        parts = list(pool.map(_read_elsewhere, [paths[first::count] for first in range(count)]))
    return [parts[place % count][place // count] for place in range(len(paths))]


def _read(path: Path) -> RunLog | OSError:
    try:
        return read_log(path)
    except OSError as error:
        return error


def _read_elsewhere(paths: Sequence[Path]) -> list[RunLog | OSError]:
    """What a process of its own reads; what it could not do (no memory, killed) is read here."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from analysis.readers import work; work()"
    command = [sys.executable, "-c", code]
    out: list[RunLog | OSError] = []
    worker = None
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(json.dumps([str(path) for path in paths]).encode())
            worker.stdin.close()
            while len(out) < len(paths):
                out.append(_unpack(pickle.load(worker.stdout)))
    except (OSError, EOFError, pickle.UnpicklingError):
        if worker is not None and worker.returncode == -signal.SIGINT:  # Ctrl-C reaches it too
            raise KeyboardInterrupt from None
    return out + [_read(path) for path in paths[len(out) :]]


def work() -> None:
    """Read the paths that come as JSON on standard input, and write each log's tables to standard output."""
    for path in json.load(sys.stdin):
        pickle.dump(_pack(_read(Path(path))), sys.stdout.buffer, protocol=5)


def _pack(log: RunLog | OSError) -> Any:
    """Tables as Arrow streams: five times cheaper than pickling their columns."""
    return log if isinstance(log, OSError) else (_stream(log.steps), _stream(log.evals), log.header)


def _unpack(packed: Any) -> RunLog | OSError:
    if isinstance(packed, OSError):
        return packed
    steps, evals, header = packed
    return RunLog(pa.ipc.open_stream(steps).read_all(), pa.ipc.open_stream(evals).read_all(), header)


def _stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
