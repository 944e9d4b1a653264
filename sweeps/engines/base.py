"""What every engine offers: slots to run in, and five verbs to use them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reasonrl.errors import EngineError

Message = dict[str, Any]

# Read by BLAS, OpenMP and CUDA when torch is first imported, hence set before a worker starts.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Threads that spin while they wait for each other starve on a shared machine: on two cores used by eight processes, 15
# steps of the built-in base model took over 250 s so, and 57 s with threads that sleep.
PATIENCE = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Slot:
    """One place in which one run at a time executes.

    `devices` are GPU indices or UUIDs (empty: CPU), `threads` the CPU threads of the worker, `share` the part of
    each GPU's memory it may take (1/k with k runs on a GPU).
    """

    index: int
    devices: tuple[str, ...] = ()
    threads: int = 1
    share: float = 1.0

    @property
    def label(self) -> str:
        """A short name for logs and tables, such as `gpu 0,1` or `cpu 1`."""
        return f"gpu {','.join(self.devices)}" if self.devices else f"cpu {self.index}"

    def environment(self) -> dict[str, str]:
        """The variables a worker of this slot needs before it imports torch."""
        env = {name: str(self.threads) for name in THREAD_VARIABLES}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        env["TOKENIZERS_PARALLELISM"] = "false"
        return env | {name: os.environ.get(name, value) for name, value in PATIENCE.items()}


class Engine(Protocol):
    """Five verbs shared by all engines; `close` ends every worker."""

    def slots(self) -> Sequence[Slot]:
        """All slots, in order; their number does not change."""
        ...

    def start(self, slot: Slot) -> None:
        """Start the slot's worker (again); returns before the worker is ready."""
        ...

    def send(self, slot: Slot, message: Message) -> None:
        """Hand one message to the slot's worker; EngineError when it is gone."""
        ...

    def poll(self, timeout: float) -> list[tuple[Slot, Message]]:
        """Messages that arrived, waiting up to `timeout` seconds for the first.

        A worker that is gone gives one last message {"type": "exit", "code": .., "signal": .., "oom": bool}.
        """
        ...

    def kill(self, slot: Slot) -> None:
        """End the slot's worker and every process it started, at once."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


@dataclass
class Layout:
    """The slots of a machine and what was left unused when they were laid out."""

    slots: list[Slot]
    notes: list[str] = field(default_factory=list)


def usable_cores() -> int:
    """CPU cores this process may use (its affinity, and the cgroup's quota where one is set)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def lay_out(settings: Mapping[str, Any], visible: Sequence[str], cores: int | None = None) -> Layout:
    """Divide `visible` devices (or CPU cores when there are none) into slots as `settings` asks.

    One slot per GPU by default; `trials_per_gpu` slots share a GPU, `per_trial_gpus` GPUs form one slot; without
    a GPU two CPU slots with cores / slots threads each. EngineError says what does not fit and how to cure it.
    """
    cores = cores or usable_cores()
    wanted, notes = settings.get("slots"), []
    per_trial, per_gpu = int(settings.get("per_trial_gpus") or 1), int(settings.get("trials_per_gpu") or 1)
    places: list[tuple[str, ...]] = []
    if visible:
        whole = len(visible) // per_trial
        if not whole:
            raise EngineError(
                f"engine.per_trial_gpus={per_trial}: only {len(visible)} GPUs are visible ({', '.join(visible)})."
                f" Choose at most {len(visible)}."
            )
        groups = [tuple(visible[i * per_trial : (i + 1) * per_trial]) for i in range(whole)]
        unused = visible[whole * per_trial :]
        if unused:
            notes.append(f"GPUs not used: {', '.join(unused)} (engine.per_trial_gpus={per_trial}).")
        # GPU 0,1,..,0,1,..: with fewer runs than places every GPU gets one before any gets two.
        places = groups * per_gpu
        if wanted and wanted > len(places):
            raise EngineError(
                f"engine.slots={wanted}: {len(visible)} GPUs give {len(places)} slots."
                f" Set engine.trials_per_gpu={-(-wanted // max(1, whole))} to share them."
            )
        places = places[: wanted or len(places)]
    else:
        if per_trial > 1:
            raise EngineError(f"engine.per_trial_gpus={per_trial}: no GPU is visible. Set engine.per_trial_gpus=1.")
        places = [()] * (wanted or min(2, cores))
    threads = int(settings.get("threads") or max(1, cores // len(places)))
    share = 1.0 / per_gpu if visible else 1.0
    slots = [Slot(index, devices, threads, share) for index, devices in enumerate(places)]
    return Layout(slots, notes)


def choose_devices(asked: Iterable[str] | None, environment: Mapping[str, str], detected: Sequence[str]) -> list[str]:
    """The device names to use: `asked` for, or those of CUDA_VISIBLE_DEVICES, or the `detected` ones.

    Names are indices or UUIDs. Devices named `fake:N` are taken as declared, without looking for hardware. An
    existing CUDA_VISIBLE_DEVICES is a fence: asking for a device outside of it is an EngineError.
    """
    fence = environment.get("CUDA_VISIBLE_DEVICES")
    allowed = [name.strip() for name in fence.split(",") if name.strip()] if fence is not None else list(detected)
    if asked is None:
        return allowed
    names = [str(name).strip() for name in asked]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EngineError(f"engine.devices names {', '.join(twice)} twice. Use engine.trials_per_gpu to share a GPU.")
    if all(name.startswith("fake:") for name in names):
        return names
    unknown = [name for name in names if name not in allowed and not _uuid_of(name, allowed)]
    if unknown:
        source = f"CUDA_VISIBLE_DEVICES={fence}" if fence is not None else f"{len(detected)} GPUs found"
        choices = ", ".join(allowed) or "none"
        raise EngineError(f"engine.devices={unknown}: not among the devices allowed here ({source}: {choices}).")
    return names


def _uuid_of(name: str, allowed: Sequence[str]) -> bool:
    """CUDA takes a UUID by any unambiguous beginning."""
    return name.startswith(("GPU-", "MIG-")) and sum(other.startswith(name) for other in allowed) == 1
