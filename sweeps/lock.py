"""One coordinator per results folder: who holds it is written down, kept fresh, and taken over only when dead.

Several that share a folder (see `sweeps.postgres`) each have a file of their own, coordinator-HOST-PID.lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from reasonrl.errors import EngineError
from reasonrl.events import make_folder

try:
    import fcntl
except ImportError:  # no flock on this system: the file itself and its heartbeat have to do
    fcntl = None  # type: ignore[assignment]

LOCK = "coordinator.lock"
HEARTBEAT_S = 5.0
STALE_S = 60.0  # a holder on another machine that was silent for so long is taken for dead


class FolderHeldError(EngineError):
    """Another coordinator works on this results folder."""


@dataclass(frozen=True)
class Holder:
    """Who holds a folder; `born` is the holder's process start time in clock ticks, which tells pid reuse apart."""

    pid: int
    host: str
    since: float
    token: str
    born: int = 0

    def describe(self) -> str:
        """`pid 4711 on host a since 2026-01-31 12:00:00`."""
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"pid {self.pid} on host {self.host} since {since}"


class FolderLock:
    """Holds `directory/coordinator.lock`; use as a context manager, and call `beat` now and then.

    FolderHeldError names the holder when there is a live one. On one machine a holder is dead when its process
    is; on another when its heartbeat is older than STALE_S. The folder's only holder has every claim (see
    `sweeps.claims.Claims`).
    """

    shared = False

    def __init__(self, directory: Path, name: str = LOCK) -> None:
        self.path = directory / name
        self._file: IO[bytes] | None = None
        self._last_beat = 0.0
        born = _born(os.getpid()) or 0
        self.me = Holder(os.getpid(), socket.gethostname(), time.time(), secrets.token_hex(8), born)

    def __enter__(self) -> FolderLock:
        make_folder(self.path.parent)
        if self.path.name == LOCK and (sharers := live_holders(self.path.parent)):
            raise self._held(sharers[0])
        for _ in range(50):
            if self._create():
                return self
            holder = read_holder(self.path)
            if holder is None:
                # Being written this moment, or left empty by a crash in between.
                if _age(self.path) > HEARTBEAT_S:
                    self._remove_stale(None)
                time.sleep(0.05)
            elif is_alive(holder, self.path) or _flocked(self.path):
                raise self._held(holder)
            else:
                self._remove_stale(holder)
        raise FolderHeldError(f"{self.path} could not be taken: others try at the same time. Try again.")

    def __exit__(self, *_: object) -> None:
        if self.still_mine():
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _held(self, holder: Holder) -> FolderHeldError:
        folder = self.path.parent
        return FolderHeldError(
            f"{folder} is held by {holder.describe()}.\n"
            f"Wait for it, or stop it with: python -m sweeps stop {folder.name} --results {folder.parent}"
        )

    @property
    def name(self) -> str:
        """Its files need no name of their own."""
        return ""

    def take(self, key: str) -> bool:
        """Always True: there is nobody else."""
        return True

    def expected(self, key: str) -> int:
        """Nobody else wrote to a run's log."""
        return 0

    def give_back(self, key: str, size: int = 0) -> None:
        """Nobody waits for it."""

    def theirs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def begun(self) -> frozenset[str]:
        """Nothing that the folder does not show."""
        return frozenset()

    def others(self) -> list[Holder]:
        """Nobody."""
        return []

    def worker_lease(self) -> None:
        """A worker dies with its coordinator."""

    def beat(self) -> bool:
        """Refresh the heartbeat when it is due; False when the folder was taken over by someone else."""
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_S:
            return True
        self._last_beat = now
        if not self.still_mine():
            return False
        with contextlib.suppress(OSError):
            os.utime(self.path)
        return True

    def still_mine(self) -> bool:
        """True while the lock file names this coordinator."""
        holder = read_holder(self.path)
        return holder is not None and holder.token == self.me.token

    def _create(self) -> bool:
        # The record is complete before it gets its name, and link fails when the name exists: no half-written lock.
        draft = self.path.with_name(f"{self.path.name}.{self.me.token}")
        draft.write_text(json.dumps(asdict(self.me)))
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return False
        except OSError:  # no hard links here
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(asdict(self.me)))
        finally:
            draft.unlink(missing_ok=True)
        self._flock()
        return True

    def _flock(self) -> None:
        self._file = self.path.open("rb")
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _remove_stale(self, holder: Holder | None) -> None:
        """Move a dead holder's lock away; put it back when another one took it over in the meantime."""
        aside = self.path.with_name(f"{self.path.name}.stale.{self.me.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        taken = read_holder(aside)
        if taken != holder:
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)


def read_holder(path: Path) -> Holder | None:
    """Who the lock file names; None without one."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def live_holders(directory: Path) -> list[Holder]:
    """The coordinators that work on this folder now: none, one, or those that share it."""
    found = [(read_holder(path), path) for path in sorted(directory.glob("coordinator*.lock"))]
    return [holder for holder, path in found if holder is not None and is_alive(holder, path)]


def is_alive(holder: Holder, path: Path) -> bool:
    """Whether the holder still works: its process on this machine, its heartbeat on any other."""
    if holder.host != socket.gethostname():
        return _age(path) < STALE_S
    born = _born(holder.pid)
    if born is None:  # no /proc here, or no such process
        return _exists(holder.pid) and not Path("/proc/self/stat").exists()
    return not holder.born or born == holder.born


def _flocked(path: Path) -> bool:
    """True when a live process holds the file's flock (its pid may be invisible here, as in a container)."""
    if fcntl is None:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no flock on this file system
        return False
    return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _born(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
