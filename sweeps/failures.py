"""How a run can fail, how to tell which way it was, and how often each kind is tried again."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from reasonrl.errors import ReasonRLError, classify, is_disk_full

CLASSES = ("oom", "killed", "non_finite", "hung", "user_code", "infrastructure")

# Tries after the first that get no further than the one before. A run that moved on starts counting anew.
# A bug and a non-finite loss would come back the same way, since runs are repeated bit for bit.
DETERMINISTIC = frozenset({"user_code", "non_finite"})

_TRACEBACK_CHARS = 8000


def describe_exception(error: BaseException) -> dict[str, Any]:
    """What the coordinator needs to know of an exception: class, one-line message, traceback, full disk or not.

    Errors this project raises on purpose explain themselves and carry no traceback.
    """
    own = isinstance(error, ReasonRLError)
    text = "".join(traceback.format_exception(error))
    name = "" if own else f"{type(error).__name__}: "
    return {
        "error_class": classify(error),
        "message": f"{name}{error}" if str(error) else type(error).__name__,
        "traceback": None if own else text[-_TRACEBACK_CHARS:],
        "disk_full": is_disk_full(error),
    }


def describe_exit(exit_message: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a worker that went away without a word."""
    if exit_message.get("oom"):
        return {"error_class": "oom", "message": "the kernel killed the worker because memory ran out"}
    if exit_message.get("lost"):
        return {"error_class": "infrastructure", "message": f"the worker was lost: {exit_message['lost']}"}
    number = exit_message.get("signal")
    if number:
        return {"error_class": "killed", "message": f"the worker was killed by signal {number}"}
    return {
        "error_class": "infrastructure",
        "message": f"the worker exited with code {exit_message.get('code')}",
    }


def may_retry(failures: Sequence[tuple[str, int]], max_retries: int) -> bool:
    """Whether a run with these failures, (class, step reached) oldest first, is worth another try.

    Out of memory: once (with half the micro-batch). Bugs and non-finite losses: never. The rest: up to
    `max_retries` in a row that got no further.
    """
    if not failures:
        return True
    kind, step = failures[-1]
    if kind in DETERMINISTIC:
        return False
    if kind == "oom":
        return sum(other == "oom" for other, _ in failures) <= 1
    stuck = 0
    for _, reached in reversed(failures):
        if reached < step:
            break
        stuck += 1
    return stuck <= max_retries


def halve_micro_batch(config: Mapping[str, Any]) -> int | None:
    """Half of the run's `optim.micro_batch_size` (rows; null counts as the whole minibatch), or None at 1."""
    optim, data, sampling = config.get("optim", {}), config.get("data", {}), config.get("sampling", {})
    current = optim.get("micro_batch_size")
    if not current:
        rows = int(data.get("prompts_per_step", 1)) * int(sampling.get("group_size", 1))
        current = max(1, rows // int(optim.get("minibatches", 1)))
    return None if current <= 1 else int(current) // 2
