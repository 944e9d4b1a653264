"""The sandbox's clock and scales: the kernel's limits for the program, and a thread that ends it past ours.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
import time

TICK_S = 0.02
BUSY_FACTOR = 20.0
SLACK_BYTES = 64 * 2**20  # what the two interpreters need by themselves


def limit_program(limits: dict) -> None:
    """Set the kernel's limits for the program and everything it starts."""
    memory = limits["memory_mb"] * 2**20
    seconds = int(limits["cpu_s"]) + 1
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
    ):
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


class Judge:
    """Says the verdict exactly once, then ends this process and with it everything inside."""

    def __init__(self, limits: dict, walls: bool) -> None:
        self.limits = limits
        self.walls = walls
        self.started = time.monotonic()
        self.lock = threading.Lock()
        threading.Thread(target=self.watch, daemon=True).start()

    def say(self, status: str, detail: str = "", passed: int = 0) -> None:
        """Report and end; the first to come here decides."""
        self.lock.acquire()
        text = json.dumps({"status": status, "detail": detail[:500], "passed": passed}) + "\n"
        os.write(1, text.encode("utf-8", "replace"))
        if not self.walls:
            kill_descendants()
        os._exit(0)

    def watch(self) -> None:
        """Stop the program when it passes a limit of time, memory or number of processes.

        Time in which the program waits counts against `wall_s`, time in which it runs against `cpu_s`; time in which
        it could run and the machine is busy with others counts as neither, up to BUSY_FACTOR times `wall_s`.
        """
        idle, last = 0.0, self.started
        while True:
            time.sleep(TICK_S)
            used, now = used_by_program(self.walls), time.monotonic()
            idle += 0.0 if used.running else min(now - last, 5 * TICK_S)  # a late tick means that we waited ourselves
            last = now
            if idle > self.limits["wall_s"] or now - self.started > BUSY_FACTOR * self.limits["wall_s"]:
                self.say("timeout", f"waited for {self.limits['wall_s']:g} s")
            if used.cpu_s > self.limits["cpu_s"]:
                self.say("timeout", f"used {self.limits['cpu_s']:g} s of processor time")
            if used.memory > self.limits["memory_mb"] * 2**20 + SLACK_BYTES:
                self.say("memory", f"used more than {self.limits['memory_mb']} MB")
            if used.processes > self.limits["processes"]:
                self.say("processes", f"started more than {self.limits['processes']} processes")


class Used:
    """Processor seconds (ended children included), resident bytes, number of processes, and whether one can run."""

    def __init__(self) -> None:
        self.cpu_s, self.memory, self.processes, self.running = 0.0, 0, 0, False


def used_by_program(walls: bool) -> Used:
    """Return what the program and all it started use now."""
    ticks, pages = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    mine = os.getpid()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = Used()
    used.cpu_s = children.ru_utime + children.ru_stime
    for pid in _all_pids() if walls else descendants(mine):
        if pid == mine:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
            used.cpu_s += sum(int(value) for value in fields[11:15]) / ticks
            used.memory += int(fields[21]) * pages
            used.processes += 1
            used.running = used.running or fields[0] == b"R"
    return used


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, as far as /proc shows them."""
    parents: dict[int, int] = {}
    for pid in _all_pids():
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            parents[pid] = int(file.read().rsplit(b")", 1)[1].split()[1])
    found, grew = {root}, True
    while grew:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found, grew = found | new, bool(new)
    return sorted(found - {root})


def kill_descendants() -> None:
    """Without walls: end whatever the program started, until nothing new turns up."""
    for _ in range(20):
        pids = descendants(os.getpid())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
