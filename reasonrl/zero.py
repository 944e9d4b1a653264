"""DeepSpeed's ZeRO stages in accelerate's configuration, read as the same split made by torch's FSDP 2 (`sharding`).

Stages 1 and 2 keep a run's gathered weights from forward to backward, stage 3 gives them back in between. What a
configuration asks for beyond the split is refused by its name. Only accelerate's launcher needs DeepSpeed itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrl.errors import Mistake

USE = "ACCELERATE_USE_DEEPSPEED"
PREFIX = "ACCELERATE_DEEPSPEED_"
STAGES = {0: "whole copies", 1: "optimizer state", 2: "optimizer state and gradients", 3: "weights too"}
# accelerate's key -> the variable its launcher makes of it
VARIABLES = {
    "zero_stage": f"{PREFIX}ZERO_STAGE",
    "offload_optimizer_device": f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": f"{PREFIX}OFFLOAD_PARAM_DEVICE",
    "deepspeed_config_file": f"{PREFIX}CONFIG_FILE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
}
# further keys of accelerate's deepspeed_config, which say how processes are started and weights are loaded
LAUNCHERS = {
    "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
}  # fmt: skip
OURS = {  # keys of DeepSpeed's own file that are settings of a run here
    "optimizer": "optim.*",
    "scheduler": "optim.schedule",
    "gradient_clipping": "optim.max_grad_norm",
    "gradient_accumulation_steps": "optim.micro_batch_size",
    "train_micro_batch_size_per_gpu": "optim.micro_batch_size",
    "train_batch_size": "data.prompts_per_step and sampling.group_size",
    "activation_checkpointing": "model.gradient_checkpointing",
}
# keys that change neither what is computed nor where it is kept
IDLE = {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "communication_data_type"}


def asked(environment: Mapping[str, str]) -> bool:
    """Return whether accelerate's configuration asks for DeepSpeed."""
    return environment.get(USE, "").lower() in ("1", "true")


def stage(environment: Mapping[str, str]) -> int:
    """Return the ZeRO stage asked for, 0 when DeepSpeed is not; -1 when what stands there is no stage."""
    if not asked(environment):
        return 0
    try:
        file = _file(environment)
    except (OSError, ValueError):
        return -1
    found = _stage_given(file, environment)
    return int(found) if str(found) in map(str, STAGES) else -1


def _stage_given(file: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    return file.get("zero_optimization", {}).get("stage", 0) if file else environment.get(f"{PREFIX}ZERO_STAGE", 2)


def is_half(environment: Mapping[str, str]) -> bool:
    """Return whether DeepSpeed's own file asks for bfloat16."""
    return asked(environment) and _is_on(_file(environment).get("bf16"))


def mistakes(environment: Mapping[str, str]) -> Iterator[Mistake]:
    """Yield what the configuration asks for beyond ZeRO's split and no run here does."""
    if not asked(environment):
        return
    named = environment.get(VARIABLES["deepspeed_config_file"])
    try:
        file = _file(environment)
    except (OSError, ValueError) as error:
        yield Mistake("accelerate deepspeed_config_file", named, f"cannot be read as DeepSpeed's JSON ({error})")
        return
    if stage(environment) < 0:
        yield Mistake("accelerate zero_stage", _stage_given(file, environment), "must be 0, 1, 2 or 3")
    for part in ("optimizer", "param"):
        device = environment.get(f"{PREFIX}OFFLOAD_{part.upper()}_DEVICE", "none")
        inside = file.get("zero_optimization", {}).get(f"offload_{part}") or {}
        device = str(inside.get("device") or device)
        if device != "none":
            allowed = "keeps state outside of the GPUs, which no run here does"
            cure = "Set it to none; model.lora.r and model.gradient_checkpointing save memory."
            yield Mistake(f"accelerate offload_{part}_device", device, allowed, cure)
    for key, value in file.items():
        yield from _of_file(key, value)


def doubt(environment: Mapping[str, str]) -> str | None:
    """Return what is done in another way than the configuration says, or None."""
    if stage(environment) <= 0:
        return None
    given = [key for key in ("gradient_clipping", "gradient_accumulation_steps") if environment.get(VARIABLES[key])]
    text = (
        f"distributed_type DEEPSPEED, zero_stage {stage(environment)} in accelerate's configuration: the run is split "
        f"in that way ({STAGES[stage(environment)]}) by FSDP 2 (torch's fully_shard), not by DeepSpeed's engine."
    )
    return f"{text} Its {' and '.join(given)} are not used: optim.* says them." if given else text


def _file(environment: Mapping[str, str]) -> dict[str, Any]:
    """DeepSpeed's own file, {} without one; raises OSError or ValueError."""
    name = environment.get(VARIABLES["deepspeed_config_file"])
    if not name or name == "none":
        return {}
    content = json.loads(Path(name).expanduser().read_text())
    if not isinstance(content, dict) or not isinstance(zero := content.get("zero_optimization", {}), dict):
        raise ValueError("it and its zero_optimization must be mappings")
    if not all(isinstance(zero.get(f"offload_{part}") or {}, dict) for part in ("optimizer", "param")):
        raise ValueError("offload_optimizer and offload_param must be mappings")
    return content


def _of_file(key: str, value: Any) -> Iterator[Mistake]:
    if key == "zero_optimization" or key in IDLE or value == "auto":
        return
    name = f"accelerate deepspeed_config_file: {key}"
    shown = json.dumps(value)
    if key in ("bf16", "fp16") and not isinstance(value, dict):
        yield Mistake(name, shown, 'must be a mapping such as {"enabled": true}')
    elif key == "bf16":
        return
    elif key == "fp16":
        if _is_on(value):
            yield Mistake(name, shown, "needs loss scaling, which no run here does", "Use bf16.")
    elif key in OURS:
        yield Mistake(name, shown, f"is set by {OURS[key]} here", 'Leave it out, or write "auto".')
    else:
        yield Mistake(name, shown, "is nothing that a run here does", "Leave it out.")


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True
