"""DeepSpeed under `trainer=trl`, as `trl.options.deepspeed` configures it: a JSON file's name or its content.

DeepSpeed's engine holds the optimizer's state, and from stage 3 on the weights, in parts. Evaluation and checkpoints
get them whole, so that a checkpoint is that of any run: it goes on with another number of processes, and without
DeepSpeed. What a run here sets itself (batches, clipping, optimizer, schedule) is filled in, and refused in the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reasonrl import distributed
from reasonrl.errors import Mistake
from reasonrl.lazy import torch
from reasonrl.zero import OURS

KEY = "trl.options.deepspeed"
FILLED = ("gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
MOMENTS = ("exp_avg", "exp_avg_sq")


def mistakes(value: Any) -> Iterator[Mistake]:
    """Yield what is wrong with the configuration; needs neither torch nor DeepSpeed."""
    try:
        content = _content(value)
    except (OSError, ValueError) as error:
        allowed = f"cannot be read as DeepSpeed's configuration ({error})"
        yield Mistake(KEY, value, allowed, "Give a JSON file, or a mapping such as {zero_optimization: {stage: 2}}.")
        return
    if importlib.util.find_spec("deepspeed") is None:
        yield Mistake(KEY, ..., "needs DeepSpeed, which is not installed", "pip install deepspeed.")
    for name in sorted(OURS.keys() & content.keys()):
        if content[name] != "auto":
            cure = "Leave it out of DeepSpeed's configuration."
            yield Mistake(f"{KEY}.{name}", json.dumps(content[name]), f"is set by {OURS[name]} here", cure)


def settings(value: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration with what the run sets filled in by TRL's arguments."""
    precision = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}  # as model.dtype says
    return {"zero_allow_untested_optimizer": True, **precision, **_content(value), **dict.fromkeys(FILLED, "auto")}


def _content(value: Any) -> dict[str, Any]:
    content = json.loads(Path(value).expanduser().read_text()) if isinstance(value, str) else value
    if not isinstance(content, dict):
        raise ValueError("it is no mapping")
    return content


@contextlib.contextmanager
def own_environment(asked: bool) -> Iterator[None]:
    """Undo what TRL's arguments tell accelerate through the environment: the process may train other runs.

    Where DeepSpeed is asked for without a launcher, it is told that this process is alone: it would look for MPI.
    """
    before = dict(os.environ)
    if asked and distributed.launched_size() == 1:
        os.environ.update(dict(zip(distributed.LAUNCHED, ("0", "1", "127.0.0.1", "0"), strict=True)), LOCAL_RANK="0")
    try:
        yield
    finally:
        for name in {*os.environ, *before}:
            if name.startswith("ACCELERATE_") or name in (*distributed.LAUNCHED, "LOCAL_RANK"):
                os.environ.pop(name, None)
                os.environ.update({name: before[name]} if name in before else {})


class Parts:
    """The optimizer of a run whose state DeepSpeed holds; takes the place of `reasonrl.optim.Optimizer`."""

    def __init__(self, parameters: list[Any], engine: Any) -> None:
        self.parameters = parameters
        self.engine = engine

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return fp32 weights and moments by name, in the first process; all processes call it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        count = float(self.engine.optimizer.optimizer.state[self._parts()[0]]["step"])
        named: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.dtype != torch.float32:
                named[f"{index}.master"] = _on_main(safe_get_full_fp32_param(parameter))
            for name in MOMENTS:
                named[f"{index}.{name}"] = _on_main(safe_get_full_optimizer_state(parameter, name))
            named[f"{index}.step"] = torch.tensor(count)
        return named

    def load_tensors(self, named: dict[str, torch.Tensor]) -> None:
        """Deal out the tensors of a checkpoint, whatever made it."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for index, parameter in enumerate(self.parameters):
            safe_set_full_fp32_param(parameter, named[f"{index}.master"].to(parameter.device))
        if "0.step" not in named:
            return
        self._make_moments(float(named["0.step"]))
        for index, parameter in enumerate(self.parameters):
            for name in MOMENTS:
                safe_set_full_optimizer_state(parameter, named[f"{index}.{name}"].to(parameter.device), name)

    def _make_moments(self, steps: float) -> None:
        """Make Adam's state, as DeepSpeed does in the first update."""
        zero = self.engine.optimizer
        zero.optimizer.state.clear()  # of the weights as they were before they were cut
        for part in self._parts():
            count = torch.tensor(steps, dtype=torch.float32, device=part.device)
            zero.optimizer.state[part] = {"step": count, **{name: torch.zeros_like(part) for name in MOMENTS}}
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # stages 1 and 2
            zero._lazy_init_hp_params_optimizer_state()

    def _parts(self) -> list[Any]:
        """The flat tensors of this process that Adam updates."""
        zero = self.engine.optimizer
        stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        return list(zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups)


def _on_main(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().clone() if distributed.is_main() else value.new_empty(0)


def join() -> None:
    """Let DeepSpeed take over the group of processes; it counts one process until then."""
    import deepspeed

    deepspeed.init_distributed(verbose=False)


def held(run: Any) -> dict[str, torch.Tensor]:
    """Return a copy of fp32 weights and moments as the run has them before DeepSpeed takes them."""
    masters = {f"{index}.master": weight for index, weight in enumerate(run.policy.trainable())}
    return {name: value.detach().clone() for name, value in {**masters, **run.optimizer.tensors()}.items()}


def take_over(run: Any, engine: Any, before: dict[str, torch.Tensor]) -> None:
    """Give the run the optimizer that DeepSpeed made for it, in the state its own one was in before."""
    run.optimizer = Parts(run.policy.trainable(), engine)
    run.optimizer.load_tensors(before)


@contextlib.contextmanager
def whole_weights(trainer: Any) -> Iterator[None]:
    """Have the weights whole in every process for a while; DeepSpeed keeps them in parts from stage 3 on."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is None or plugin.zero_stage < 3:
        yield
        return
    import deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    with deepspeed.zero.GatheredParameters(trainer.model_wrapped.parameters()):
        remove_hooks(trainer.model_wrapped)  # they would give the weights back after a module's forward
        yield
        add_hooks(trainer.model_wrapped)
