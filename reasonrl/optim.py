"""The optimizer: AdamW on fp32 master weights, learning-rate schedule, gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from reasonrl import distributed
from reasonrl.lazy import torch


@dataclass
class OptimConfig:
    """How weights are updated, and how often per rollout."""

    lr: float = 4e-5
    warmup_steps: int = 1  # rollout steps over which the rate rises to lr
    schedule: str = "constant"  # constant, linear, cosine (down to 0 at the last step)
    minibatches: int = 4  # parts of the rollout batch, by prompt
    inner_epochs: int = 4  # passes over the rollout batch
    micro_batch_size: int | None = None  # rows per forward and backward; null = the whole minibatch
    max_grad_norm: float = 1.0  # 0 = no clipping
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    weight_decay: float = 0.0

    @property
    def updates_per_rollout(self) -> int:
        """Gradient steps per rollout step."""
        return self.minibatches * self.inner_epochs


PART = 1 << 25  # elements updated at a time
SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of rollout step `step` (1-based) of `num_steps`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr


class Optimizer:
    """AdamW that keeps fp32 master copies of weights held in a lower precision.

    Without them an update smaller than half a bf16 ulp (lr 1e-6 on a weight of 0.01) changes nothing.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], config: OptimConfig) -> None:
        self.parameters = parameters
        self.max_grad_norm = config.max_grad_norm
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in parameters]
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def accumulate(self) -> None:
        """Move what backward passes left in low precision onto the masters, where several passes add up in fp32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    def step(self, lr: float) -> float:
        """Clip and apply the gradients with learning rate `lr`; return the norm before clipping.

        A non-finite norm leaves weights and moments untouched. Parameters without a gradient count as zero. Some
        weights are updated at a time, so that a low-precision gradient never stands in fp32 as a whole.
        """
        pairs = list(zip(self.parameters, self.masters, strict=True))
        if any(master is not parameter and master.grad is not None for parameter, master in pairs):
            self.accumulate()
        gradients = [parameter.grad if master.grad is None else master.grad for parameter, master in pairs]
        self.zero_grad()
        norm = _total_norm([gradient for gradient in gradients if gradient is not None])
        if math.isfinite(float(norm)):
            for group in self.adam.param_groups:
                group["lr"] = lr
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm else None
            for part in _parts(self.masters):
                for index in part:
                    self.masters[index].grad = _scaled(gradients[index], self.masters[index], scale)
                    gradients[index] = None
                self.adam.step()
                self._copy_back(part)
        return float(norm)

    def _copy_back(self, part: range) -> None:
        with torch.no_grad():
            for index in part:
                parameter, master = self.parameters[index], self.masters[index]
                master.grad = None
                if master is not parameter:
                    parameter.copy_(master)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return masters and moments by name, for a checkpoint; sharded ones come together in the first process."""
        named: dict[str, torch.Tensor] = {}
        for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if master is not parameter:
                named[f"{index}.master"] = distributed.whole_on_main(master)
            for key, value in self.adam.state.get(master, {}).items():
                named[f"{index}.{key}"] = distributed.whole_on_main(value)
        return named

    def load_tensors(self, named: dict[str, torch.Tensor]) -> None:
        """Continue from a checkpoint's tensors."""
        for key, value in named.items():
            index, name = key.split(".", 1)
            master = self.masters[int(index)]
            if name == "master":
                with torch.no_grad():
                    master.copy_(distributed.shard_like(master, value))
            else:
                # torch keeps `step` on the CPU unless fused on a GPU, where it follows the parameter
                on_cpu = name == "step" and master.device.type == "cpu"
                value = value.clone().to("cpu" if on_cpu else master.device)
                self.adam.state[master][name] = distributed.shard_like(master, value)


def _parts(masters: list[torch.Tensor]) -> Iterator[range]:
    """Yield the numbers of neighbours that have PART elements together."""
    start = elements = 0
    for index, master in enumerate(masters):
        elements += master.numel()
        if elements >= PART or index == len(masters) - 1:
            yield range(start, index + 1)
            start, elements = index + 1, 0


def _scaled(gradient: torch.Tensor | None, master: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a clipped gradient in fp32."""
    if gradient is None:
        return torch.zeros_like(master)
    gradient = gradient.to(torch.float32)
    return gradient if scale is None else gradient.mul_(scale)


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, computed in fp32 and summed over shards."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return distributed.whole(torch.nn.utils.get_total_norm(gradients))
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))
