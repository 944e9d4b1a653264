"""Parsed event logs kept as Parquet beside the results, so that only logs that grew are parsed again.

Three files in `<results folder>/cache/`: rows.parquet (all step rows), evals.parquet, and runs.parquet (per
run the size and time of its log, how many rows it has in the other two, and its header as JSON). The folder
can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.eventlog import RunLog

Stamp = tuple[int, int]  # size in bytes and modification time in ns of an event log

_VERSION = b"1"
_FILES = ("rows", "evals", "runs")


def stamp(path: Path) -> Stamp:
    """Size and modification time of a log; raises OSError when it is not there."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def read_cache(folder: Path, stamps: Mapping[str, Stamp]) -> dict[str, RunLog]:
    """The logs among `stamps` (run -> stamp of its log) that have not changed since the cache was written.

    A missing, torn or older cache gives none; it is never an error.
    """
    try:
        tables = {name: pq.read_table(folder / f"{name}.parquet") for name in _FILES}
    except (OSError, pa.ArrowException):
        return {}
    marks = {_mark(table) for table in tables.values()}
    if len(marks) != 1 or not next(iter(marks)).startswith(_VERSION + b" "):
        return {}
    out, row, evaluation = {}, 0, 0
    for record in tables["runs"].to_pylist():
        rows, evals = record["num_rows"], record["num_evals"]
        if stamps.get(record["run"]) == (record["size"], record["mtime_ns"]):
            steps = tables["rows"].slice(row, rows)
            out[record["run"]] = RunLog(steps, tables["evals"].slice(evaluation, evals), json.loads(record["header"]))
        row, evaluation = row + rows, evaluation + evals
    return out


def write_cache(folder: Path, stamps: Mapping[str, Stamp], logs: Mapping[str, RunLog]) -> None:
    """Write all logs; a folder that cannot be written to is left as it is."""
    records = [
        {"run": run, "size": stamps[run][0], "mtime_ns": stamps[run][1], "header": json.dumps(log.header)}
        | {"num_rows": log.steps.num_rows, "num_evals": log.evals.num_rows}
        for run, log in logs.items()
    ]
    tables = {
        "rows": pa.concat_tables([log.steps for log in logs.values()], promote_options="default"),
        "evals": pa.concat_tables([log.evals for log in logs.values()], promote_options="default"),
        "runs": pa.Table.from_pylist(records),
    }
    mark = _VERSION + b" " + hashlib.sha256(repr(sorted(stamps.items())).encode()).hexdigest().encode()
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for name in _FILES:  # runs last: it is what makes the other two count
            temporary = folder / f".{name}.{os.getpid()}"
            table = tables[name].replace_schema_metadata({b"reasonrl": mark})
            pq.write_table(table, temporary, compression="lz4", use_dictionary=False)
            os.replace(temporary, folder / f"{name}.parquet")


def _mark(table: pa.Table) -> bytes:
    return (table.schema.metadata or {}).get(b"reasonrl", b"")
