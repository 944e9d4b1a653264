"""Find logs under a path and read each by what it contains, not by how it is called."""

from __future__ import annotations

import csv
import json
import re
import tempfile
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from analysis.logs.binary import read_tensorboard, read_wandb
from analysis.logs.console import read_console
from analysis.logs.separated import read_separated
from analysis.logs.table import Log, Table, build
from analysis.logs.units import settle
from reasonrl.errors import AnalysisError
from reasonrl.events import count_damaged, read_events

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".log", ".txt", ".html", ".ipynb")
SETTINGS = (
    "optim.lr", "optim.inner_epochs", "kl.coef", "loss.high", "sampling.max_new_tokens", "reward.parts.format.weight",
    "eval.problems", "eval.samples",
)  # fmt: skip

JSON_START = re.compile(r"""\s*(?:\{\s*(?:"|$)|\[\s*(?:\{|$))""")
ROWS_START = re.compile(r'"[^"]*"\s*:\s*\[\s*(?=\{)')


def find_logs(path: Path) -> list[Path]:
    """Return the logs under a path: the path itself, or a folder's event logs, trainer states, W&B runs, tfevents.

    Raises AnalysisError when there is no such path or no log in it.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise AnalysisError(f"{path} does not exist.")
    found = [*path.rglob("events.jsonl"), *_newest_states(path), *path.rglob("*.wandb")]
    found += sorted({file.parent for file in path.rglob("*tfevents*")})
    runs = {file.parent for file in found if file.name == "events.jsonl"}
    found = [file for file in found if file.name == "events.jsonl" or not runs & set(file.parents)]
    if not found:
        found = [file for file in path.iterdir() if file.is_file() and _has_suffix(file)]
    if not found:
        raise AnalysisError(
            f"{path} holds no log I can read ({', '.join(SUFFIXES)}, trainer_state.json, *.wandb, tfevents)."
        )
    return sorted(found)


def _has_suffix(file: Path) -> bool:
    return Path(file.name.removesuffix(".gz")).suffix in SUFFIXES


def _newest_states(path: Path) -> list[Path]:
    """Of every run's checkpoints only the newest trainer_state.json: it repeats the older ones."""
    best: dict[Path, tuple[int, Path]] = {}
    for file in path.rglob("trainer_state.json"):
        number = re.fullmatch(r"checkpoint-(\d+)", file.parent.name)
        run = file.parent.parent if number else file.parent
        best[run] = max(best.get(run, (-1, file)), (int(number[1]) if number else 0, file))
    return [file for _, file in best.values()]


def read_log(path: Path) -> Log:
    """Read one log; raises AnalysisError when it holds no rows of numbers."""
    try:
        log = _read_gzip(path) if _is_gzip(path) else _read(path)
    except (OSError, csv.Error) as error:
        raise AnalysisError(f"{path} cannot be read: {error}") from error
    if log is None or not log.rows:
        raise AnalysisError(f"{path} holds no rows of numbers.")
    settle(log)
    return log


def _is_gzip(path: Path) -> bool:
    if path.is_dir():
        return False
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _read_gzip(path: Path) -> Log | None:
    """Read what can be unpacked of a compressed log, as the file it was."""
    unpack = zlib.decompressobj(wbits=31)
    try:
        data = unpack.decompress(path.read_bytes())
    except zlib.error as error:
        raise AnalysisError(f"{path} cannot be unpacked: {error}.") from error
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, path.name.removesuffix(".gz"))
        inner.write_bytes(data)
        try:
            log = _read(inner)
        except AnalysisError as error:
            raise AnalysisError(str(error).replace(str(inner), str(path))) from error
    if log is not None:
        log.path = path
        if not unpack.eof:
            log.notes.append("the compressed file is cut off")
    return log


def _read(path: Path) -> Log | None:
    if path.is_dir():
        return read_tensorboard(path)
    if path.suffix == ".wandb":
        return read_wandb(path)
    if "tfevents" in path.name:
        return read_tensorboard(path)
    data = path.read_bytes()
    if not data.strip():
        raise AnalysisError(f"{path} is empty.")
    if b"\0" in data[:1024] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise AnalysisError(f"{path} is a binary file of an unknown kind.")
    text = data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig", "replace")
    start = text.lstrip()[:1]
    if start in "{[":
        log = _read_json(path, text)
        if log is not None:
            return log
    if start == "<":
        return _read_html(path, text)
    log = read_console(path, text)
    if log is None and JSON_START.match(text):
        raise AnalysisError(f"{path} is not valid JSON ({_json_fault(text)}), and holds no rows before that.")
    return log or read_separated(path, text)


# ---- JSON
def _read_json(path: Path, text: str) -> Log | None:
    try:
        whole = json.loads(text)
    except ValueError:
        return _read_json_lines(path, text) or _read_cut_json(path, text)
    if isinstance(whole, dict) and isinstance(whole.get("type"), str) and "\n" not in text.strip():
        return _read_json_lines(path, text)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return build(path, "trainer state", _dicts(whole["log_history"]))
    if isinstance(whole, dict) and isinstance(whole.get("cells"), list):
        return _read_html(path, _notebook_html(whole))
    if isinstance(whole, list):
        return build(path, "JSON", _dicts(whole))
    if isinstance(whole, dict):
        for value in whole.values():
            if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                return build(path, "JSON", value)
        columns = {name: value for name, value in whole.items() if isinstance(value, list) and value}
        if columns:
            length = max(len(column) for column in columns.values())
            rows = [{n: c[i] for n, c in columns.items() if i < len(c)} for i in range(length)]
            return build(path, "JSON columns", rows)
        return build(path, "JSON", [whole])
    return None


def _dicts(items: Iterable[Any]) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)]


def _read_cut_json(path: Path, text: str) -> Log | None:
    """The rows before the fault of a trainer state, or another list of rows, that is cut off or damaged."""
    start = re.search(r'"log_history"\s*:\s*\[', text) or re.match(r"\s*\[", text) or ROWS_START.search(text)
    if start is None or not JSON_START.match(text):
        return None
    records, at, decoder = [], start.end(), json.JSONDecoder()
    while item := re.compile(r"[\s,]*(?=\{)").match(text, at):
        try:
            record, at = decoder.raw_decode(text, item.end())
        except ValueError:
            break
        records.append(record)
    if not records:
        return None
    kind = "trainer state" if "log_history" in start[0] else "JSON"
    return build(
        path, kind, records, [f"not valid JSON ({_json_fault(text)}): the {len(records)} rows before are read"]
    )


def _json_fault(text: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    return "several values, one after the other"


def _read_json_lines(path: Path, text: str) -> Log | None:
    records, damaged = [], 0
    for line in text.split("\n"):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                damaged += 1
                continue
            if isinstance(record, dict):
                records.append(record)
    if not records or damaged > len(records):
        return None
    if any(record.get("type") in ("start", "step") and ("metrics" in record or "key" in record) for record in records):
        return _read_events(path)
    notes = [f"{damaged} damaged line{'s' if damaged > 1 else ''} left out"] if damaged else []
    return build(path, "JSONL", records, notes)


def _read_events(path: Path) -> Log:
    """Our own event log: step and eval events; the run's settings come from its start event.

    The evaluation before the first step is left out: the run did not show it to the rules either.
    """
    table = Table()
    config: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    trained = False
    for event in read_events(path):
        trained |= event["type"] == "step"
        if event["type"] == "eval" and isinstance(event.get("problems"), list):
            evaluation = {"eval.problems": len(event["problems"]), "eval.samples": event.get("samples")}
        if trained and event["type"] in ("step", "eval") and isinstance(event.get("step"), int | float):
            table.add(float(event["step"]), event.get("metrics") or {})
        elif event["type"] == "start":
            config = event.get("config") or config
    rows, notes = table.finish()
    damaged = count_damaged(path)
    if damaged:
        notes.append(f"{damaged} damaged line{'s' if damaged > 1 else ''} left out")
    settings = {key: value for key in SETTINGS if (value := _dig(config, key)) is not None} | evaluation
    return Log(path, "event log", rows, notes, settings, int(_dig(config, "sampling.group_size") or 0))


def _dig(config: Any, key: str) -> Any:
    for word in key.split("."):
        config = config.get(word) if isinstance(config, dict) else None
    return config


# ---- tables
class _Tables(HTMLParser):
    """Collects the rows of every HTML table that has a header."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self.cell = []

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.cell is not None:
            self.tables[-1][-1].append("".join(self.cell).strip())
            self.cell = None


def _read_html(path: Path, text: str) -> Log | None:
    parser = _Tables()
    parser.feed(text)
    parser.close()
    tables = [[row for row in table if row] for table in parser.tables]
    longest = max(tables, key=len, default=[])
    if len(longest) < 2:
        return None
    names = longest[0]
    return build(path, "HTML table", [dict(zip(names, row, strict=False)) for row in longest[1:]])


def _notebook_html(notebook: dict[str, Any]) -> str:
    """The HTML outputs of a notebook's cells."""
    parts = []
    for cell in _dicts(notebook["cells"]):
        for output in _dicts(cell.get("outputs", [])):
            html = (output.get("data") or {}).get("text/html", "")
            parts.append("".join(html) if isinstance(html, list) else str(html))
    return "\n".join(parts)
