"""Checkpoints: everything a run needs to continue bit for bit, written atomically, never pickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrl.errors import CheckpointError
from reasonrl.lazy import torch


@dataclass
class CheckpointConfig:
    """When the run's whole state is kept."""

    every: int = 10  # rollout steps; 0 = only at a stop, a pause and the end
    keep: int = 2  # newest ones kept
    export: bool = False  # at the end, write the model in Hugging Face form to run_dir/model


FOLDER = re.compile(r"step_\d{6,}")
REQUIRED = ("weights.safetensors", "optimizer.safetensors", "state.json")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint taken after rollout step `step`."""
    return root / f"step_{step:06d}"


def save(root: Path, step: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any], keep: int) -> Path:
    """Write files of tensors and a JSON state after `step`, then drop all but the newest `keep`.

    The folder appears by one rename after everything is on disk, so that a reader sees it whole or not at all.
    Folders of later steps go too: the run has gone back before them because they were damaged. Raises
    CheckpointError when the disk refuses.
    """
    from safetensors.torch import save_file

    target = folder_of(root, step)
    scratch = root / f".step_{step:06d}.{os.getpid()}"
    try:
        for left_over in root.glob(".step_*"):  # of a process that was killed while it wrote
            shutil.rmtree(left_over, ignore_errors=True)
        scratch.mkdir(parents=True)
        for name, group in tensors.items():
            save_file({key: value.detach().cpu().contiguous() for key, value in group.items()}, scratch / name)
        (scratch / "state.json").write_text(json.dumps(state))
        digests = {path.name: _sha256(path) for path in sorted(scratch.iterdir())}
        (scratch / "manifest.json").write_text(json.dumps({"step": step, "sha256": digests}))
        for path in scratch.iterdir():
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        _sync(root)
    except Exception as error:  # safetensors has its own error type for a full disk
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(f"The checkpoint of step {step} could not be written to {root}: {error}") from error
    folders = _folders(root)
    later = [folder for folder in folders if _step_of(folder) > step]
    for old in later + folders[len(later) + keep :]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _folders(root: Path) -> list[Path]:
    """Return checkpoint folders, newest first; anything else that lies there is left alone."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and FOLDER.fullmatch(path.name)]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def fault_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None if every file is as it was written."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        missing = [name for name in REQUIRED if name not in manifest["sha256"]]
        if missing:
            return f"{', '.join(missing)} is missing from its manifest"
        for name, digest in manifest["sha256"].items():
            if _sha256(folder / name) != digest:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@dataclass
class Loaded:
    """A sound checkpoint: its step, its tensors per file, its state."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


Objection = Callable[[int, dict[str, Any]], str | None]  # (step, state) -> why a sound checkpoint cannot be used


def load_newest(
    root: Path, warn: Callable[[str], None], objection: Objection = lambda step, state: None
) -> Loaded | None:
    """Return the newest sound checkpoint without an objection, or None; those passed over are named with the reason."""
    from safetensors.torch import load_file

    for folder in _folders(root):
        fault = fault_of(folder)
        if fault is not None:
            warn(f"Checkpoint {folder.name} is damaged ({fault}); the one before it is used.")
            continue
        step, state = _step_of(folder), json.loads((folder / "state.json").read_text())
        reason = objection(step, state)
        if reason is not None:
            warn(f"Checkpoint {folder.name} is not used: {reason}.")
            continue
        tensors = {name: load_file(folder / name) for name in REQUIRED if name.endswith(".safetensors")}
        return Loaded(step, tensors, state)
    return None
