"""Run untrusted programs against tests: no network, no files but a scratch folder, limits on everything.

`run_tests` starts one short-lived sandbox per program (`isolate.py`): the kernel's user namespaces, or bubblewrap
where only that may make them. In there a trusted tester (`tester.py`) holds the tests and the expected answers and
talks to the program, a second process, by plain values. Where neither works nothing is run, unless `unsafe=True`
asks for limits without walls.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrl.errors import VerifierError

HERE = Path(__file__).resolve().parent
BUSY_FACTOR = 20.0  # of watch.py: how much longer than wall_s a program may take on a busy machine
FAILED = 97  # exit status of isolate.py when the walls could not be made
MODES = ("asserts", "calls", "stdio")
REFUSAL = (
    "Programs written by a model are only run behind walls, and this machine offers none: {reason}. Install bubblewrap "
    "(apt install bubblewrap), allow unprivileged user namespaces, or set task.unsafe=true to run them with your own "
    "rights (they can then read and delete your files)."
)


@dataclass(frozen=True)
class Limits:
    """What one program may use over all its tests: seconds of running and of waiting, resident memory of all its
    processes, their number, bytes printed or answered, bytes per file."""

    cpu_s: float = 3.0
    wall_s: float = 8.0
    memory_mb: int = 256
    processes: int = 16
    output_bytes: int = 2**20
    file_bytes: int = 8 * 2**20


@dataclass(frozen=True)
class Outcome:
    """How a program did: passed, wrong, timeout, memory, processes, or unusable (the tests are at fault)."""

    status: str
    detail: str = ""


@functools.cache
def walls() -> tuple[str | None, str]:
    """Return (namespaces, bubblewrap or None, why not), found out by running a small program in each."""
    reasons = []
    for kind in ("namespaces", "bubblewrap"):
        if kind == "bubblewrap" and shutil.which("bwrap") is None:
            reasons.append("bubblewrap is not installed")
            continue
        try:
            outcome = _run(
                kind, "def one():\n    return 1\n", "asserts", ["assert one() == 1"], "one", Limits(wall_s=30.0)
            )
        except (VerifierError, OSError) as error:
            reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            continue
        if outcome.status == "passed":
            return kind, ""
        reasons.append(f"{kind}: a trial program was {outcome.status} ({outcome.detail})")
    return None, "; ".join(reasons)


def run_tests(
    program: str,
    mode: str,
    tests: Sequence[Any],
    entry: str | None = None,
    limits: Limits | None = None,
    unsafe: bool = False,
) -> Outcome:
    """Run `program` against `tests` and return how it did.

    mode asserts: pieces of test code that call the program's functions, or define `check(candidate)` for `entry`;
    calls: {"args", "kwargs", "expected"} for the function `entry`; stdio: {"input", "output"} for the whole
    program. Raises VerifierError when there are no walls and `unsafe` is False, or when they cannot be made.
    """
    kind, reason = ("none", "") if unsafe else walls()
    if kind is None:
        raise VerifierError(REFUSAL.format(reason=reason))
    return _run(kind, program, mode, tests, entry, limits or Limits())


def _run(kind: str, program: str, mode: str, tests: Sequence[Any], entry: str | None, limits: Limits) -> Outcome:
    settings = {**vars(limits), "processes": limits.processes + _others(kind)}
    job = {"program": program, "mode": mode, "tests": list(tests), "entry": entry, "limits": settings}
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="program-")) if kind == "none" else "/"
        process = subprocess.Popen(
            _command(kind),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=scratch,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            data = json.dumps(job).encode("utf-8", "surrogatepass")
            out, err = process.communicate(data, timeout=BUSY_FACTOR * limits.wall_s + 30.0)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", "the tester itself had to be ended")
        finally:
            _end(process)
    if process.returncode == FAILED or (not out and err):
        lines = err.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        raise VerifierError(f"The sandbox could not be made ({kind}): {lines[-1]}")
    try:
        verdict = json.loads(out.splitlines()[0])
        return Outcome(str(verdict["status"]), str(verdict["detail"]))
    except (ValueError, KeyError, IndexError, TypeError):
        return Outcome("wrong", f"the tester ended without a verdict (exit status {process.returncode})")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the sandbox's first process; the kernel ends the rest with it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _command(kind: str) -> list[str]:
    python = os.path.realpath(sys.executable)
    script = [python, "-I", "-S", "-B", "-X", "utf8"]
    if kind != "bubblewrap":
        return [*script, str(HERE / "isolate.py"), kind, str(os.getpid())]
    folders = ["/usr", "/lib", "/lib64", "/bin", "/sbin", os.path.realpath(sys.base_prefix), "/etc/ld.so.cache"]
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]
    for folder in folders:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.exists(folder):
            command += ["--ro-bind", folder, folder]
    command += ["--ro-bind", str(HERE), "/sandbox", "--dev", "/dev", "--proc", "/proc", "--size", str(16 * 2**20)]
    command += ["--tmpfs", "/box", "--symlink", "box", "/tmp", "--remount-ro", "/", "--chdir", "/box", "--"]
    return [*command, *script, "/sandbox/isolate.py", "inside", "0"]


def _others(kind: str) -> int:
    """Return how many processes the limit per user would count besides the sandbox's own.

    Since Linux 5.14 the limit counts per user namespace; before that, and without walls, it counts all of a user.
    """
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if (kind != "none" and release >= (5, 14)) or os.geteuid() == 0:
        return 0
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count
