"""The side of a verifier process: answer comparisons under limits of its own.

It reads one JSON pair [gold, answer] per line and answers one line each. Processor seconds per comparison are limited
by a timer whose signal ends the process, memory by the kernel, and the process dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable

MEMORY_BYTES = 3 * 2**30
PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End with the parent, even in the middle of a computation."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)


def serve(compare: Callable[[str, str], str], warm_up: Callable[[], None]) -> None:
    """Answer comparisons until standard input closes; arguments: LIMIT_S [PARENT].

    A comparison over its limit ends the process; one that raises is "undecided", out of memory is "timeout".
    """
    limit_s, parent = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if parent:
        die_with(parent)
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # what libraries print is no answer
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warm_up()
    print("ready", file=reply)
    for line in sys.stdin:
        gold, said = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # nobody handles SIGPROF, so the kernel ends the process
        try:
            answer = compare(gold, said)
        except MemoryError:
            answer = "timeout"
        except Exception:  # SymPy and foreign scorers raise nearly anything; none of it says "wrong"
            answer = "undecided"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=reply)
