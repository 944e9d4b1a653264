"""Who may run what: alone in a folder (a lock file), or shared by several coordinators (leases in PostgreSQL)."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Protocol, Self

from sweeps.lock import FolderLock, Holder
from sweeps.types import Plan


class Claims(Protocol):
    """What a coordinator asks before it touches a run; used as a context manager around a whole sweep.

    `shared` is False where no other coordinator can be. `name` tells this coordinator's own files from those of the
    others; empty when alone.
    """

    shared: bool

    @property
    def name(self) -> str: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(self, key: str) -> bool | None:
        """Claim `key` (a run, or a duty such as the study); False: another has it, None: cannot be known now."""
        ...

    def expected(self, key: str) -> int:
        """Bytes the event log of a run just taken had when it was last given back."""
        ...

    def give_back(self, key: str, size: int = 0) -> None:
        """Let go of `key`; `size` is how long the run's event log is now, in bytes."""
        ...

    def theirs(self) -> frozenset[str] | None:
        """The keys other living coordinators hold; None when it cannot be known now."""
        ...

    def begun(self) -> frozenset[str]:
        """The keys that were ever claimed in this sweep, as far as it can be known now."""
        ...

    def others(self) -> list[Holder]:
        """The other living coordinators, as last heard."""
        ...

    def beat(self) -> bool:
        """Stay in possession; False when every claim was lost meanwhile."""
        ...

    def worker_lease(self) -> float | None:
        """Seconds a worker may go on without hearing of its coordinator again; None: for as long as it lives."""
        ...


def is_postgres(url: object) -> bool:
    """True for a database URL that several machines can share."""
    return str(url or "").split(":")[0].split("+")[0] in ("postgresql", "postgres")


def make_claims(plan: Plan) -> Claims:
    """The claims of a sweep: shared when its study lives in PostgreSQL."""
    if is_postgres(plan.study.get("storage")):
        from sweeps.postgres import PostgresClaims

        return PostgresClaims(plan)
    return FolderLock(plan.directory)


def without_password(text: str) -> str:
    """`text` with the passwords of URLs in it masked."""
    return re.sub(r"(\w+://[^:/@\s]+):[^@/\s]+@", r"\1:***@", text)
