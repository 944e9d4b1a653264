"""Exports to object stores: any URL that fsspec knows (s3://, gs://, az://, memory://)."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrl.errors import AnalysisError

LAST = "manifest.json"  # names every file with its hash: where it lies, the export is complete


def is_url(place: str) -> bool:
    """True for a place that is no folder of this machine."""
    return "://" in place


def open_store(url: str) -> tuple[Any, str]:
    """(file system, path) behind `url`; AnalysisError when the package for it is missing or the URL makes no sense."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise AnalysisError(f"--out {url}: {error}") from error
    except ValueError as error:
        raise AnalysisError(f"--out {url}: {error}. Name it like s3://bucket/folder or gs://bucket/folder.") from error


def upload(folder: Path, files: Sequence[str], store: tuple[Any, str]) -> None:
    """Copy `files` (relative to `folder`) there, the manifest last; AnalysisError says what could not be written."""
    system, root = store
    for name in sorted(files, key=lambda name: (name == LAST, name)):
        target = posixpath.join(root, name)
        try:
            system.makedirs(posixpath.dirname(target), exist_ok=True)
            system.put_file(str(folder / name), target)
        except Exception as error:  # every store has exceptions of its own
            reason = f"{type(error).__name__}: {error}"
            raise AnalysisError(f"{target} could not be written ({reason}). The export is not complete.") from error
