"""A PostgreSQL server of a test's own, on loopback, with its data in a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


def programs() -> Path | None:
    """The folder of PostgreSQL's server programs; None without them."""
    config = shutil.which("pg_config")
    found = shutil.which("initdb")
    if found is None and config is not None:
        folder = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True).stdout.strip()
        found = shutil.which("initdb", path=folder)
    return Path(found).parent if found else None


class Server:
    """One server; its only user, `sweeper`, needs no password from this machine."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self._bin = programs()
        # The server refuses to run as root.
        self._as = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}

    def url(self, database: str = "postgres", user: str = "sweeper", port: int | None = None) -> str:
        """The URL for `study.storage`."""
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    def create(self) -> None:
        """Make the data folder."""
        if self._as:
            os.chown(self.folder, NOBODY, NOBODY)
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "sweeper", "-A", "trust", "--no-sync")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-o", options, "-l", log, "start")

    def stop(self) -> None:
        """Stop the server at once, like a power cut."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", "immediate", "stop")

    def run_sql(self, text: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """The rows of one statement."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        assert self._bin is not None
        done = subprocess.run(
            [str(self._bin / program), *arguments], cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, timeout=60, **self._as,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@contextmanager
def running_server() -> Iterator[Server]:
    """A running server, stopped and removed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    server = Server(folder, port)
    try:
        server.create()
        server.start()
        yield server
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
