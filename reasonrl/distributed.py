"""One run on several processes, each with a whole copy of the model (data parallel; `sharding` splits the training).

Every process holds the same weights and the same rollout batch; it samples a share of the prompts and runs a share
of the rows, and gradients are summed. Loss weights are made from the whole minibatch, so denominators are global
by construction. The first process alone writes and decides. Started by `accelerate launch` or `torchrun`, or by
anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. With one process every function is a no-op.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from reasonrl.lazy import torch

T = TypeVar("T")
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BUCKET = 1 << 25  # gradient elements summed in one call: few calls for a small model, little memory for a large one


def launched_rank() -> int:
    """Return the rank a launcher gave this process (0 without one); needs no torch."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in LAUNCHED) else 0


def launched_size() -> int:
    """Return the number of processes a launcher started (1 without one); needs no torch."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHED) else 1


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the group a launcher has prepared, for as long as the run lasts; a group that exists is used as it is.

    CUDA tensors travel by NCCL, all else by Gloo, and each process of a machine takes the GPU of its local rank.
    """
    if launched_size() == 1 or torch.distributed.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def size() -> int:
    """Return the number of processes of this run."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if joined else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return torch.distributed.get_rank() if size() > 1 else 0


def is_main() -> bool:
    """Return whether this process writes and decides."""
    return rank() == 0


def share(count: int) -> slice:
    """Return the part of `count` items that is this process's; parts are contiguous, in rank order, and even."""
    return slice(count * rank() // size(), count * (rank() + 1) // size())


def gather(own: Sequence[T]) -> list[T]:
    """Return the items of all processes in rank order, the same list everywhere."""
    if size() == 1:
        return list(own)
    parts: list[Any] = [None] * size()
    torch.distributed.all_gather_object(parts, list(own))
    return [item for part in parts for item in part]


def from_main(compute: Callable[[], T]) -> T:
    """Compute on the first process only and return its result everywhere."""
    if size() == 1:
        return compute()
    box: list[Any] = [compute() if is_main() else None]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def shard_like(shard: Any, value: torch.Tensor) -> torch.Tensor:
    """Return `value`, which every process holds whole, sharded as `shard` is; as it is where `shard` is whole."""
    if not hasattr(shard, "placements") or value.shape != shard.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(shard.device)
    return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None).clone()


def whole(value: Any) -> torch.Tensor:
    """Return a sharded tensor gathered from all processes; any other as it is."""
    return value.full_tensor() if hasattr(value, "placements") else value


def whole_on_main(value: Any) -> torch.Tensor:
    """Return a sharded tensor gathered into the first process's CPU memory, empty elsewhere; any other as it is."""
    if not hasattr(value, "placements"):
        return value
    gathered = whole(value.detach())
    return gathered.cpu() if is_main() else gathered.new_empty(0)


def sum_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Add up the gradients of all processes; one without rows counts as zero."""
    if size() == 1:
        return
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = grad
        bucket.append(grad)
        if sum(grad.numel() for grad in bucket) >= BUCKET:
            _sum_bucket(bucket)
            bucket = []
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(grads: list[torch.Tensor]) -> None:
    flat = torch.cat([grad.flatten().float() for grad in grads])
    torch.distributed.all_reduce(flat)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
