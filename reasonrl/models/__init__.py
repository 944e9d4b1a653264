"""Models: a Hugging Face causal LM with its tokenizer, wrapped as a `Policy` that trainer and sampler share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reasonrl.errors import ConfigError, Mistake


@dataclass
class LoraConfig:
    """Low-rank adapters through peft; `r` 0 trains all weights."""

    r: int = 0
    alpha: int = 32
    dropout: float = 0.0
    targets: str = "all-linear"
    dora: bool = False


@dataclass
class ModelConfig:
    """The policy to train."""

    kind: str = "tiny"  # tiny (built in) or hf
    path: str | None = None  # hf: folder or hub name
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    attention: str = "auto"  # auto = what transformers chooses for the model; sdpa, eager, flash_attention_2
    trust_remote_code: bool = False
    safetensors_only: bool = True
    gradient_checkpointing: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    # the built-in base model: how its supervised start was made (reasonrl/models/tiny.py)
    careful: float = 0.75  # share of worked-out rows in the supervised data
    mode_share: float = 0.04  # how often the base picks the worked-out trace over a guess
    noise: float = 0.12  # probability of a wrong running sum
    noise_from: int = 1  # first operand at which running sums can be wrong
    bracket_share: float = 1.0  # worked-out traces that carry the closing bracket
    guess_bracket: bool = False  # guesses carry a closing bracket
    base_operands: list[int] | None = None  # digits per prompt in the supervised data; null = the task's
    base_steps: int = 500
    base_seed: int = 0


def path_mistake(config: ModelConfig, path: str | None) -> Mistake | None:
    """What is wrong with a path that cannot be a model, None for a model folder or what may be a hub name."""
    if not path:
        return Mistake("model.path", path, "is not set", "Give a model folder or hub name, e.g. model.path=./m.")
    folder = Path(path).expanduser()
    if not folder.exists() and not path.startswith((".", "/", "~")):
        return None
    if not folder.is_dir():
        return Mistake("model.path", path, "is not a folder", "Give the folder that holds config.json.")
    if (folder / (config.gguf_file or "config.json")).is_file():
        return None
    ggufs = ", ".join(sorted(file.name for file in folder.glob("*.gguf")))
    if config.gguf_file:
        there = f"is not in {path} (GGUF files there: {ggufs or 'none'})"
        return Mistake("model.gguf_file", config.gguf_file, there, "Name one of them.")
    cure = f"It holds GGUF files ({ggufs}): add model.gguf_file=NAME." if ggufs else "Give the one that holds it."
    return Mistake("model.path", path, "is not a model folder: it has no config.json", cure)


def load_policy(config: ModelConfig, operands: list[int]):
    """Return the Policy of `config`; raises ConfigError or ModelError. `operands` only matters to `tiny`."""
    if config.kind == "tiny":
        from reasonrl.models.policy import load_hf
        from reasonrl.models.tiny import base_model_dir

        return load_hf(config, str(base_model_dir(config, operands)))
    if config.kind == "hf":
        from reasonrl.models.policy import load_hf

        return load_hf(config, config.path or "")
    raise ConfigError([Mistake("model.kind", config.kind, "choose tiny or hf")])
