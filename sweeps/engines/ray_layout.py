"""Dividing a Ray cluster into slots; needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reasonrl.errors import EngineError
from sweeps.engines.base import Layout, Slot


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: its name, and the CPUs and GPUs it has, and those nobody uses now."""

    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def lay_out_cluster(settings: Mapping[str, Any], nodes: Sequence[Node]) -> Layout:
    """Divide the free GPUs (or CPUs, where the cluster has no GPU) of `nodes` into slots as `settings` asks.

    A slot never spans two nodes. EngineError names what no node is large enough for, and what is busy now.
    """
    if settings.get("devices"):
        raise EngineError(f"engine.devices={settings['devices']}: Ray assigns devices. Leave it out with engine=ray.")
    per_trial, per_gpu = int(settings.get("per_trial_gpus") or 1), int(settings.get("trials_per_gpu") or 1)
    wanted, threads = settings.get("slots"), settings.get("threads")
    on_gpus = any(node.gpus for node in nodes)
    if wanted and not threads and not on_gpus:
        threads = _threads_for(wanted, nodes)
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus))
    sizes = ", ".join(f"{node.name}: {node.gpus:g} GPUs, {node.cpus:g} CPUs" for node in nodes[:8])
    if per_trial > max(1, largest.gpus):
        most = max(1, int(largest.gpus))
        raise EngineError(f"engine.per_trial_gpus={per_trial}: no node is so large ({sizes}). Choose at most {most}.")
    widest = max(node.cpus for node in nodes)
    if threads and threads > widest:
        raise EngineError(f"engine.threads={threads}: no node is so large ({sizes}). Choose at most {widest:g}.")
    places = [(node, capacity(node, per_trial, per_gpu, on_gpus, threads, free=True)) for node in nodes]
    whole = sum(capacity(node, per_trial, per_gpu, on_gpus, threads, free=False) for node in nodes)
    if wanted and wanted > whole:
        raise EngineError(
            f"engine.slots={wanted}: the cluster has room for {whole} ({sizes}). Choose at most {whole}, or share GPUs"
            " with engine.trials_per_gpu."
        )
    free = sum(count for _, count in places)
    if not free:
        raise EngineError(f"The Ray cluster has no free slot now ({sizes}): other jobs use it. Try again later.")
    notes = (
        [f"{free} of {wanted or whole} slots are free now; other jobs use the rest."] if free < (wanted or 0) else []
    )
    slots: list[Slot] = []
    for node, count in places:
        count = min(count, (wanted or free) - len(slots))
        own = int(threads or max(1, (node.free_cpus if on_gpus else node.cpus) // max(1, count)))
        for index in range(count):
            first = (index % max(1, count // per_gpu or 1)) * per_trial
            devices = tuple(f"{node.name}:{first + gpu}" for gpu in range(per_trial)) if on_gpus else ()
            slots.append(Slot(len(slots), devices, own, 1.0 / per_gpu if on_gpus else 1.0))
    return Layout(slots, notes)


def _threads_for(wanted: int, nodes: Sequence[Node]) -> int:
    """The most CPUs each of `wanted` slots can have; at least 1."""
    most = int(sum(node.cpus for node in nodes) // wanted)
    fitting = (count for count in range(most, 1, -1) if sum(node.cpus // count for node in nodes) >= wanted)
    return next(fitting, 1)


def capacity(node: Node, per_trial: int, per_gpu: int, on_gpus: bool, threads: int | None, free: bool) -> int:
    """How many slots fit on a node: into what is free now, or into all of it."""
    cpus, gpus = (node.free_cpus, node.free_gpus) if free else (node.cpus, node.gpus)
    if on_gpus:
        places = int(gpus) // per_trial * per_gpu
        return min(places, int(cpus // threads)) if threads else min(places, int(cpus))
    return int(cpus // threads) if threads else min(2, int(cpus))
