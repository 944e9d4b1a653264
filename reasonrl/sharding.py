"""FSDP: what training needs of one run, split over its processes by torch's `fully_shard`.

Asked for by `distributed_type: FSDP` (or DEEPSPEED, see `zero`) in accelerate's configuration, which its launcher hands
over in the environment.

Two models share the work. The policy that samples is whole in every process, which may run it as often as its own
completions ask for without waiting for anybody. The updates run its sharded twin, whose every pass is made by all
processes together: one block at a time is gathered, and backward leaves the gradients summed and sharded. A process
that has fewer micro-batches than another makes passes of weight zero. During the updates the whole policy gives its
memory back; behind them it is gathered from the twin's shards.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrl import distributed, zero
from reasonrl.errors import ConfigError, Mistake, ModelError
from reasonrl.lazy import torch

if TYPE_CHECKING:
    from reasonrl.models.policy import Policy

USE = "ACCELERATE_USE_"
OTHERS = {"MEGATRON_LM": "Megatron-LM", "PARALLELISM_CONFIG": "parallelism_config"}
RESHARDS = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}  # FSDP 1's word for it
# variable: (key in accelerate's file, values that are not honoured or None for any, what it would do, cure)
REFUSED: dict[str, tuple[str, tuple[str, ...] | None, str, str]] = {
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", ("true",), "keeps weights on the CPU, which no run here does",
                            "Set it to false; model.lora.r and model.gradient_checkpointing save memory."),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", ("true",), "is a setting of the run here",
                                      "Set it to false, and model.gradient_checkpointing=true."),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", None, "would leave weights out; all are sharded here",
                             "Leave it out."),
    "FSDP_AUTO_WRAP_POLICY": ("fsdp_auto_wrap_policy", ("size_based_wrap",), "cuts by size; whole blocks are cut here",
                              "Use TRANSFORMER_BASED_WRAP."),
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", ("fp16", "fp8"), "needs loss scaling, which no run here does",
                                   "Use bf16 or no."),
}  # fmt: skip


def asked(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether accelerate's configuration asks for a split: FSDP, or a ZeRO stage of DeepSpeed."""
    return _on(environment.get(f"{USE}FSDP")) or zero.stage(environment) > 0


def mistakes(environment: Mapping[str, str] = os.environ) -> Iterator[Mistake]:
    """Yield what accelerate's configuration asks for and no run here does."""
    for variable, name in OTHERS.items():
        if _on(environment.get(USE + variable)):
            cure = "Use distributed_type: FSDP to split weights, gradients and optimizer state, or MULTI_GPU."
            yield Mistake("accelerate", name, "splits the work in a way that no run here does", cure)
    yield from zero.mistakes(environment)
    split = _on(environment.get(f"{USE}FSDP"))
    for variable, (key, values, allowed, cure) in REFUSED.items():
        value = environment.get(variable)
        heeded = split or not variable.startswith("FSDP_")
        if heeded and value and (values is None or value.lower() in values):
            yield Mistake(f"accelerate {key}", value, allowed, cure)
    if not split:
        return
    if (version := environment.get("FSDP_VERSION", "1")) not in ("1", "2"):
        yield Mistake("accelerate fsdp_version", version, "must be 1 or 2")
    reshard = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    if _is_second(environment) and reshard.lower() not in ("true", "false"):
        yield Mistake("accelerate fsdp_reshard_after_forward", reshard, "must be true or false")
    strategy = environment.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    if not _is_second(environment) and strategy not in RESHARDS:
        cure = "Use FULL_SHARD or SHARD_GRAD_OP, or distributed_type: MULTI_GPU for whole copies."
        yield Mistake("accelerate fsdp_sharding_strategy", strategy, "is no way in which a run here is split", cure)


def doubt(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what is done in another way than accelerate's configuration says, or None."""
    if zero.asked(environment):
        return zero.doubt(environment)
    if not asked(environment) or _is_second(environment):
        return None
    return (
        "fsdp_version=1 in accelerate's configuration: the run is split by FSDP 2 (torch's fully_shard), "
        f"fsdp_reshard_after_forward={str(reshards(environment)).lower()}. Set fsdp_version: 2."
    )


def reshards(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a block's gathered weights are given back between forward and backward."""
    if zero.asked(environment):
        return zero.stage(environment) == 3
    if _is_second(environment):
        return environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    return RESHARDS.get(environment.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper(), True)


def environment_of(file: Path) -> dict[str, str]:
    """Return what `accelerate launch --config_file file` puts into the environment and this module reads.

    Raises OSError or yaml.YAMLError, and ValueError when the file is not accelerate's.
    """
    import yaml

    content = yaml.safe_load(file.read_text())
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ValueError("names no distributed_type")
    found = {f"{USE}{str(content['distributed_type']).upper()}": "true"}
    if content.get("parallelism_config"):
        found[f"{USE}PARALLELISM_CONFIG"] = "true"
    found["ACCELERATE_MIXED_PRECISION"] = str(content.get("mixed_precision") or "no")
    sections = {name: content.get(f"{name}_config") or {} for name in ("fsdp", "deepspeed")}
    for name, section in sections.items():
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
            raise ValueError(f"{name}_config is no mapping of names")
    for key, value in sections["fsdp"].items():
        name = key.removeprefix("fsdp_").upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")
        if value is not None:
            found[f"FSDP_{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    for key, value in sections["deepspeed"].items():
        if key not in zero.VARIABLES and key not in zero.LAUNCHERS:
            raise ValueError(f"deepspeed_config has no key {key}")
        if key in zero.VARIABLES and value is not None:
            found[zero.VARIABLES[key]] = str(value)
    return found


def _on(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true")


def _is_second(environment: Mapping[str, str]) -> bool:
    return environment.get("FSDP_VERSION", "1") == "2"


def load_everywhere() -> None:
    """Let every process read the weights: accelerate's default has transformers read them on the first one only."""
    if asked():
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


@dataclass
class Sharded:
    """A policy that is whole to sample and has a sharded twin to train.

    `pairs` are the weights of both (whole, shard), `reshards` whether blocks are gathered once more in backward.
    """

    whole: Policy
    twin: Policy
    pairs: list[tuple[Any, Any]]
    reshards: bool

    @contextlib.contextmanager
    def training(self) -> Iterator[Policy]:
        """Yield the twin; the whole policy has no weights meanwhile, and the new ones afterwards."""
        for whole, _ in self.pairs:
            whole.data = whole.data.new_empty(0)
        yield self.twin
        with torch.no_grad():
            for whole, shard in self.pairs:
                whole.data = shard.full_tensor()

    def take(self) -> None:
        """Give the twin the weights that the whole policy has now."""
        with torch.no_grad():
            for whole, shard in self.pairs:
                shard.copy_(distributed.shard_like(shard, whole.data))


def shard(policy: Policy) -> Sharded | None:
    """Return the policy with its sharded twin where accelerate asks for FSDP and there are processes to share.

    Raises ConfigError for a precision or a block that the model does not have, ModelError if torch cannot shard it.
    """
    if not asked() or distributed.size() == 1:
        return None
    weights = list(policy.model.parameters())
    half = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" or zero.is_half(os.environ)
    if half and all(weight.dtype != torch.bfloat16 for weight in weights):
        allowed = f"computes in bfloat16, but the weights of {policy.name} are {str(weights[0].dtype)[6:]}"
        cure = "Use mixed_precision: no, or model.dtype=bfloat16."
        raise ConfigError([Mistake("accelerate mixed_precision", "bf16", allowed, cure)])
    kinds = sorted({str(weight.dtype)[6:] for weight in weights if weight.requires_grad})
    if len(kinds) > 1:
        reason = f"it trains weights in {' and '.join(kinds)}. Set model.dtype=float32"
        raise ModelError(f"model.path={policy.name} cannot be sharded by FSDP: {reason}.")
    memo: dict[int, Any] = {id(weight): weight for weight in weights}  # the twin starts from the same tensors
    parts = (policy.model, policy.body, policy.head, policy.checkpointed)
    model, body, head, checkpointed = copy.deepcopy(parts, memo)
    fields = {**vars(policy), "model": model, "body": body, "head": head, "checkpointed": checkpointed}
    # a prompt shared by its rows would be a pass of its own, which not every process makes
    twin = type(policy)(**{**fields, "shares_prompts": False, "root": _root(model)})
    _split(twin, reshards())
    return Sharded(policy, twin, list(zip(weights, model.parameters(), strict=True)), reshards())


def _split(twin: Policy, reshard: bool) -> None:
    """Cut the twin into blocks that are gathered one at a time, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(twin.device.type, (distributed.size(),))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    try:
        for block in _blocks(twin.model):
            fully_shard(block, reshard_after_forward=reshard, **options)
        fully_shard(twin.root, **options)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ModelError(f"model.path={twin.name} cannot be sharded by FSDP: {error}") from error
    for module in twin.root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # loss weights hold the whole minibatch's denominator
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13: an expert that no token chose
                module.set_reduce_scatter_unused_params(True, recurse=False)


def _blocks(model: Any) -> list[Any]:
    """Return the model's blocks: those that accelerate names, else those that transformers does not split."""
    from reasonrl.models.parts import inner_model

    named = [name.strip() for name in os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",") if name.strip()]
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "NO_WRAP":
        return []
    wanted = set(named or getattr(inner_model(model), "_no_split_modules", None) or ())
    missing = set(named) - {type(module).__name__ for module in model.modules()}
    if missing:
        allowed = f"are no modules of this model; its own blocks are {inner_model(model)._no_split_modules}"
        key = "accelerate fsdp_transformer_layer_cls_to_wrap"
        raise ConfigError([Mistake(key, ", ".join(sorted(missing)), allowed, "Leave it out to take those.")])
    found: list[Any] = []
    inside: set[Any] = set()  # of a block found before
    for module in model.modules():
        if type(module).__name__ in wanted and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _root(model: Any) -> Any:
    class Root(torch.nn.Module):
        """Runs a function of the model with the weights outside of its blocks at hand."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, function: Any) -> Any:
            return function()

    return Root()
