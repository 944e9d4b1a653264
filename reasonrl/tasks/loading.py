"""Read rows from JSONL, JSON, CSV, TSV, Parquet, Arrow, a folder of these, or a data set of the Hub.

Every row comes with the place it stands at ("train.jsonl:17"); what cannot be read is yielded as such with the
reason, so that the caller can count it, and never ends the reading.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from reasonrl.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?")


@dataclass(frozen=True)
class Row:
    """One row of a data file: its place, its values by key, or why it could not be read."""

    place: str
    values: dict[str, Any] | None
    fault: str = ""


def read_rows(path: str, split: str | None, key: str = "task.path") -> Iterator[Row]:
    """Yield the rows of `path` (file, folder or Hub name `owner/name[:config]`); `split` chooses inside a folder.

    Raises DataError, naming the configuration `key`, when there is no such data or no such split.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return _read_file(root, key)
    if root.is_dir():
        return _chain(_files_of_split(root, split, key), key)
    match = _HUB_NAME.fullmatch(path)
    if match and not root.suffix and not root.parent.exists():
        return _read_hub(match["name"], match["config"], split or "train", key)
    raise DataError(f"{key}={path}: {missing(path)}")


def missing(path: str) -> str | None:
    """Return why nothing can be read from `path` at all, or None; does not open anything."""
    root = Path(path).expanduser()
    if root.exists() or (_HUB_NAME.fullmatch(path) and not root.suffix and not root.parent.exists()):
        return None
    return f"there is no such file or folder.{_neighbours(root)}"


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either (paths are taken from {Path.cwd()})."
    found = sorted(item.name for item in folder.iterdir() if _suffix(item) in SUFFIXES)
    near = [name for name in found if Path(name).stem == path.stem] or difflib.get_close_matches(path.name, found, 3)
    if near:
        return f" Did you mean {' or '.join(str(folder / name) for name in near)}?"
    return f" {folder.resolve()} holds no data file of a similar name."


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _chain(files: list[Path], key: str) -> Iterator[Row]:
    for file in files:
        yield from _read_file(file, key)


def _files_of_split(folder: Path, split: str | None, key: str) -> list[Path]:
    """Return the data files of one split of a folder: by file name, by subfolder, or as saved by `datasets`."""
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or _suffix(file) not in SUFFIXES or file.name in ("dataset_info.json", "state.json"):
            continue
        if file.name == "dataset_dict.json" or file.name.startswith(("cache-", ".")):
            continue
        splits.setdefault(_split_name(file, folder), []).append(file)
    if not splits:
        raise DataError(f"{key}={folder}: the folder holds no {', '.join(SUFFIXES)} file.")
    if split is None:
        split = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else None
    if split in splits:
        return splits[split]
    which = key.replace("path", "split")
    raise DataError(f"{which}={split}: {folder} has the splits {', '.join(sorted(splits))}; choose one of them.")


def _split_name(file: Path, folder: Path) -> str:
    """`data/train-00000-of-00002.parquet` -> train; `test/data-00000-of-00001.arrow` -> test; `dev.jsonl` -> dev."""
    stem = file.name.split(".")[0]
    stem = re.sub(r"[-_]\d+(?:-of-\d+)?$", "", stem)
    if stem == "data" and file.parent != folder:
        return file.parent.name
    return stem


def _read_file(path: Path, key: str) -> Iterator[Row]:
    suffix = _suffix(path)
    readers = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
               ".parquet": _read_parquet, ".arrow": _read_arrow}  # fmt: skip
    if suffix not in readers:
        raise DataError(f"{key}={path}: files ending in {suffix or 'nothing'} are not read; use {', '.join(SUFFIXES)}.")
    return readers[suffix](path)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _object(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(place, None, f"is a {type(value).__name__}, not an object with keys")
    return Row(place, value)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or line.strip() == b"\xef\xbb\xbf":
                continue
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield Row(f"{path.name}:{number}", None, _reason(error))
                continue
            yield _object(f"{path.name}:{number}", value)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8 text"
    return "is not JSON" if isinstance(error, (ValueError, RecursionError)) else f"cannot be read ({error})"


def _read_json(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        data = file.read()
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        lines = [line for line in data.splitlines() if line.strip()]
        if len(lines) > 1 and lines[0].strip().startswith(b"{") and lines[0].strip().endswith(b"}"):
            yield from _read_jsonl(path)  # one object per line under a .json name, as many data sets have it
            return
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path} {_reason(error)}{where}.") from error
    yield from _from_json(path.name, value)


def _from_json(name: str, value: Any) -> Iterator[Row]:
    """A list of rows, rows under one key ("data"), or a dictionary of equally long columns."""
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list)}
        rows = [item for item in lists.values() if item and isinstance(item[0], dict)]
        if len(rows) == 1:
            value = rows[0]
        elif lists and len(lists) == len(value) and len({len(item) for item in lists.values()}) == 1:
            value = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        else:
            value = [value]
    if not isinstance(value, list):
        raise DataError(f"{name} holds a {type(value).__name__}; wanted is a list of rows.")
    for index, item in enumerate(value):
        yield _object(f"{name}[{index}]", item)


def _read_csv(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        text = file.read().decode("utf-8-sig", errors="surrogateescape")
    csv.field_size_limit(2**27)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if _suffix(path) == ".tsv" else ",")
    header = next(reader, None)
    if header is None:
        return
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Row(f"{path.name}:{start}", None, f"is not CSV ({error})")
            continue
        place = f"{path.name}:{start}"
        if not cells:
            continue
        if len(cells) != len(header):
            yield Row(place, None, f"has {len(cells)} cells where the header has {len(header)}")
        elif any("\udc80" <= char <= "\udcff" for cell in cells for char in cell):
            yield Row(place, None, "is not UTF-8 text")
        else:
            yield Row(place, dict(zip(header, cells, strict=True)))


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
        yield from _from_batches(path, batches)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a sound Parquet file: {_first_line(error)}.") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    """Files of `Dataset.save_to_disk`: Arrow streams; Arrow's own file format is read as well."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                batches = list(pa.ipc.open_stream(source))
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
            yield from _from_batches(path, iter(batches))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a sound Arrow file: {_first_line(error)}.") from error


def _from_batches(path: Path, batches: Iterator[Any]) -> Iterator[Row]:
    index = 0
    for batch in batches:
        for values in batch.to_pylist():
            yield Row(f"{path.name}[{index}]", values)
            index += 1


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _read_hub(name: str, config: str | None, split: str, key: str) -> Iterator[Row]:
    """Load from the Hub (or its local cache) through the optional `datasets` package."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{key}={name}: there is no such file or folder. To load it from the Hub: pip install datasets; "
            "or download it and give the folder."
        ) from None
    try:
        datasets.disable_progress_bars()
        for library in ("datasets", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises many kinds; all mean "no such data here"
        raise DataError(f"{key}={name}: the Hub data set could not be loaded: {_first_line(error)}.") from error
    return (Row(f"{name}/{split}[{index}]", dict(row)) for index, row in enumerate(rows))
