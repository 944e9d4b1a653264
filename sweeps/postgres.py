"""Several coordinators on one sweep: who is there and who holds which run, in three tables beside the study.

Every coordinator holds one lease, renewed all the time; a claim is worth what its owner's lease is worth. Times are
the database's, so that clocks need not agree. A coordinator that cannot renew lets go of its runs before the lease
ends, hence two never work on one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from reasonrl.errors import EngineError
from reasonrl.events import make_folder
from sweeps.claims import without_password
from sweeps.ledger import write_atomic
from sweeps.lock import FolderHeldError, FolderLock, Holder, is_alive, read_holder
from sweeps.types import Plan
from sweeps.versions import about, differences

try:
    import psycopg
except ImportError:  # the extra [postgres]
    psycopg = None  # type: ignore[assignment]

T = TypeVar("T")

FOLDER_MARK = "shared.json"
MARK_S = 10.0  # for a file another machine wrote to become visible here
RETRY_S = 2.0
# Parts of a lease that are left when a coordinator that cannot renew lets go, and when a worker does that has not
# heard of its coordinator since: both before the lease ends, and the coordinator, which can explain it, first.
LET_GO, WORKER_ENDS = 0.25, 0.1

_TABLES = """
CREATE TABLE IF NOT EXISTS reasonrl_sweeps (study text PRIMARY KEY, mark text NOT NULL, folder text NOT NULL);
CREATE TABLE IF NOT EXISTS reasonrl_coordinators (study text, token text, host text, pid int, since float8,
  about text, expires timestamptz, PRIMARY KEY (study, token));
CREATE TABLE IF NOT EXISTS reasonrl_claims (study text, key text, owner text, size bigint DEFAULT 0,
  PRIMARY KEY (study, key));
"""
# A server notices a machine that went dark within half a minute, not within its default of two hours.
_SESSION = "-c statement_timeout=10000 -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"


class PostgresClaims:
    """See `sweeps.claims.Claims`. Entering joins the sweep; EngineError says why that cannot be."""

    shared = True

    def __init__(self, plan: Plan) -> None:
        self._url = str(plan.study["storage"]).replace("postgresql+psycopg:", "postgresql:", 1)
        self._study, self._directory = plan.name, plan.directory
        self._lease = float(plan.study.get("lease_s") or 60.0)
        self._about = about(plan)
        self._token = ""
        self._connection: Any = None
        self._until = self._tried = 0.0
        self._dropped = False
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._owed: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._others: list[Holder] = []
        self._presence: FolderLock | None = None

    @property
    def name(self) -> str:
        """Host and process, which tell this coordinator's files from those of the others."""
        return f"{socket.gethostname()}-{os.getpid()}"

    # -- coming and going -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if psycopg is None:
            raise EngineError(f"{self._what} needs the package psycopg: pip install 'reasonrl[postgres]'.")
        make_folder(self._directory)
        holder = read_holder(self._directory / "coordinator.lock")
        if holder is not None and is_alive(holder, self._directory / "coordinator.lock"):
            raise FolderHeldError(f"{self._directory} is held by {holder.describe()}, which does not share it.")
        try:
            self._join()
        except psycopg.Error as error:
            self._hang_up()
            raise EngineError(self._refusal(error)) from error
        except BaseException:
            self._hang_up()
            raise
        for path in self._directory.glob("coordinator-*.lock"):  # of coordinators that were killed
            holder = read_holder(path)
            if holder is not None and not is_alive(holder, path):
                path.unlink(missing_ok=True)
        self._presence = FolderLock(self._directory, f"coordinator-{self.name}.lock")
        self._presence.__enter__()
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._keeper.join()
        self._try(self._leave)
        self._hang_up()
        if self._presence is not None:
            self._presence.__exit__(None, None, None)

    def _join(self) -> None:
        connection = self._connect()
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('reasonrl'))")
            connection.execute(_TABLES)
        with self._sole(connection):
            living = self._living(connection)
            self._same_plan(living)
            self._same_folder(connection, living)
            self._enlist(connection)
        self._others = [holder for holder, _ in living]

    def _enlist(self, connection: Any) -> None:
        self._token = secrets.token_hex(8)
        began = time.monotonic()
        connection.execute(
            "INSERT INTO reasonrl_coordinators VALUES (%s, %s, %s, %s, %s, %s,"
            " clock_timestamp() + make_interval(secs => %s))",
            (self._study, self._token, socket.gethostname(), os.getpid(), time.time(), json.dumps(self._about),
             self._lease),
        )  # fmt: skip
        self._until, self._dropped = began + self._lease, False

    def _living(self, connection: Any) -> list[tuple[Holder, dict[str, Any]]]:
        rows = connection.execute(
            "SELECT pid, host, since, token, about FROM reasonrl_coordinators"
            " WHERE study = %s AND token <> %s AND expires > clock_timestamp() ORDER BY since",
            (self._study, self._token),
        ).fetchall()
        return [(Holder(*row[:4]), json.loads(row[4])) for row in rows]

    def _same_plan(self, living: list[tuple[Holder, dict[str, Any]]]) -> None:
        """Refuse to join coordinators that would run something else under the same name."""
        for holder, theirs in living:
            found = differences(theirs, self._about)
            if found:
                listed = "\n".join(f"  - {line}" for line in found)
                raise EngineError(
                    f"{holder.describe()} works on {self._study} with something else than this machine has:\n{listed}\n"
                    "Nothing was started. Give the same command with the same code and packages on each machine."
                )

    def _same_folder(self, connection: Any, living: list[tuple[Holder, dict[str, Any]]]) -> None:
        """Refuse when the results folder here is not the one the living coordinators write to."""
        path = self._directory / FOLDER_MARK
        row = connection.execute("SELECT mark, folder FROM reasonrl_sweeps WHERE study = %s", (self._study,)).fetchone()
        deadline = time.monotonic() + (MARK_S if row and living else 0.0)
        while row and (_mark(path) != row[0]) and time.monotonic() < deadline:
            time.sleep(0.5)
        if row and _mark(path) == row[0]:
            return
        if row and living:
            raise EngineError(
                f"results folder {self._directory} is not the one {living[0][0].describe()} works in ({row[1]}):"
                f" its {FOLDER_MARK} is {'another' if path.exists() else 'not'} here. Nothing was started."
                " Mount the same shared folder on each machine and name it with results=FOLDER."
            )
        # Nobody works on it: the folder decides, and what was noted of runs in another one is void.
        mark = _mark(path) or secrets.token_hex(8)
        write_atomic(path, json.dumps({"mark": mark, "study": self._study}))
        place = f"{socket.gethostname()}:{self._directory.resolve()}"
        with connection.transaction():
            connection.execute("DELETE FROM reasonrl_claims WHERE study = %s", (self._study,))
            connection.execute(
                "INSERT INTO reasonrl_sweeps VALUES (%s, %s, %s)"
                " ON CONFLICT (study) DO UPDATE SET mark = EXCLUDED.mark, folder = EXCLUDED.folder",
                (self._study, mark, place),
            )

    def _leave(self, connection: Any) -> None:
        with connection.transaction():
            self._pay(connection)
            connection.execute(
                "UPDATE reasonrl_claims SET owner = NULL WHERE study = %s AND owner = %s", (self._study, self._token)
            )
            connection.execute(
                "DELETE FROM reasonrl_coordinators WHERE study = %s AND (token = %s OR expires < clock_timestamp())",
                (self._study, self._token),
            )

    # -- claims -----------------------------------------------------------------------------------------------

    def take(self, key: str) -> bool | None:
        """Claim `key`, also from a coordinator whose lease ended; row locks let one of several have it."""
        if self._dropped or not self._holds():
            return None

        def ask(connection: Any) -> bool:
            with connection.transaction():
                connection.execute(
                    "INSERT INTO reasonrl_claims VALUES (%s, %s) ON CONFLICT DO NOTHING", (self._study, key)
                )
                owner, size = connection.execute(
                    "SELECT owner, size FROM reasonrl_claims WHERE study = %s AND key = %s FOR UPDATE",
                    (self._study, key),
                ).fetchone()
                if owner is not None and owner != self._token and self._lives(connection, owner):
                    return False
                connection.execute(
                    "UPDATE reasonrl_claims SET owner = %s WHERE study = %s AND key = %s",
                    (self._token, self._study, key),
                )
            self._sizes[key] = int(size or 0)
            return True

        if key in self._owed:  # it is still in our name
            del self._owed[key]
        return self._try(ask)

    def _lives(self, connection: Any, owner: str) -> bool:
        # Locking the row waits for a renewal that is under way this moment.
        row = connection.execute(
            "SELECT expires > clock_timestamp() FROM reasonrl_coordinators WHERE study = %s AND token = %s FOR UPDATE",
            (self._study, owner),
        ).fetchone()
        return bool(row and row[0])

    def expected(self, key: str) -> int:
        """Bytes of the run's event log when it was last given back."""
        return self._sizes.get(key, 0)

    def give_back(self, key: str, size: int = 0) -> None:
        """Let go of `key`, now or as soon as the database is there again."""
        self._owed[key] = size
        self._try(self._pay)

    def _pay(self, connection: Any) -> None:
        for key, size in list(self._owed.items()):
            connection.execute(
                "UPDATE reasonrl_claims SET owner = NULL, size = greatest(size, %s)"
                " WHERE study = %s AND key = %s AND owner = %s",
                (size, self._study, key, self._token),
            )
            self._owed.pop(key, None)

    def theirs(self) -> frozenset[str] | None:
        """The keys other living coordinators hold."""

        def ask(connection: Any) -> frozenset[str]:
            self._pay(connection)
            self._others = [holder for holder, _ in self._living(connection)]
            rows = connection.execute(
                "SELECT c.key FROM reasonrl_claims c JOIN reasonrl_coordinators k ON k.study = c.study"
                " AND k.token = c.owner WHERE c.study = %s AND c.owner <> %s AND k.expires > clock_timestamp()",
                (self._study, self._token),
            ).fetchall()
            return frozenset(row[0] for row in rows)

        return self._try(ask)

    def begun(self) -> frozenset[str]:
        """The keys that were ever claimed in this sweep, duties left out."""

        def ask(connection: Any) -> frozenset[str]:
            rows = connection.execute(
                "SELECT key FROM reasonrl_claims WHERE study = %s AND key NOT LIKE 'duty %%'", (self._study,)
            ).fetchall()
            return frozenset(row[0] for row in rows)

        return self._try(ask) or frozenset()

    def others(self) -> list[Holder]:
        """The other living coordinators, as last heard."""
        return self._others

    # -- the lease --------------------------------------------------------------------------------------------

    def _holds(self) -> bool:
        return time.monotonic() < self._until - LET_GO * self._lease

    def worker_lease(self) -> float:
        """Seconds a worker may go on without hearing of its coordinator."""
        return max(0.0, self._until - WORKER_ENDS * self._lease - time.monotonic())

    def beat(self) -> bool:
        """False, once, when the lease is lost or cannot be known to hold any longer."""
        if self._presence is not None:
            self._presence.beat()
        if self._dropped or self._holds():
            return True
        self._dropped = True
        return False

    def _keep(self) -> None:
        """Renew the lease, in a thread and over a connection of its own: no slow disk and no report may cost it."""
        connection: Any = None
        while not self._stop.wait(self._lease / 8):
            try:
                connection = connection or self._open()
                self._renew(connection)
            except psycopg.Error:
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _renew(self, connection: Any) -> None:
        began = time.monotonic()
        renewed = connection.execute(
            "UPDATE reasonrl_coordinators SET expires = clock_timestamp() + make_interval(secs => %s)"
            " WHERE study = %s AND token = %s AND expires > clock_timestamp()",
            (self._lease, self._study, self._token),
        )
        if renewed.rowcount == 1:
            self._until, self._dropped = began + self._lease, False
        elif self._dropped:  # its runs were let go; it may come back as someone new
            self._enlist(connection)
        else:
            self._until = 0.0

    # -- the connection ---------------------------------------------------------------------------------------

    def _try(self, ask: Callable[[Any], T]) -> T | None:
        """The answer, or None while the database is away (it is looked for now and then)."""
        if self._connection is None and time.monotonic() - self._tried < RETRY_S:
            return None
        self._tried = time.monotonic()
        try:
            return ask(self._connection or self._connect())
        except psycopg.Error:
            self._hang_up()
            return None

    def _connect(self) -> Any:
        self._connection = self._open()
        return self._connection

    def _open(self) -> Any:
        return psycopg.connect(
            self._url.replace("postgres://", "postgresql://", 1), autocommit=True, connect_timeout=5, options=_SESSION,
            application_name=f"reasonrl {self.name}"[:63], keepalives_idle=10, keepalives_interval=5,
            keepalives_count=3, tcp_user_timeout=10000,
        )  # fmt: skip

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _sole(self, connection: Any) -> Iterator[None]:
        """One coordinator of this sweep at a time; ends with the connection at the latest."""
        connection.execute("SET statement_timeout = 60000")
        connection.execute("SELECT pg_advisory_lock(hashtext('reasonrl'), hashtext(%s))", (self._study,))
        try:
            yield
        finally:
            with contextlib.suppress(psycopg.Error):
                connection.execute("SELECT pg_advisory_unlock(hashtext('reasonrl'), hashtext(%s))", (self._study,))
                connection.execute("SET statement_timeout = 10000")

    @property
    def _what(self) -> str:
        return f"study.storage={without_password(self._url)}"

    def _refusal(self, error: Exception) -> str:
        """One message for a database that cannot be used, with the cure."""
        lines = str(error).strip().splitlines()
        reason = lines[0].strip().rstrip(".") if lines else type(error).__name__
        cure = "Check host, port, user and database, and that the server is running."
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            cure = "Let its owner run: GRANT CREATE ON SCHEMA public TO the user, and give it the tables reasonrl_*."
        elif "password" in reason or "authentication" in reason:
            cure = "Put the password in ~/.pgpass or PGPASSWORD."
        elif "does not exist" in reason and "database" in reason:
            cure = "Create it once: createdb NAME."
        return f"{self._what}: {reason}. Nothing was started. {cure}"


def _mark(path: Any) -> str | None:
    try:
        return str(json.loads(path.read_text())["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
