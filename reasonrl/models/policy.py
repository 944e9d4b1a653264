"""Load a Hugging Face causal LM and wrap it for sampling and training."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from reasonrl.errors import ConfigError, ModelError
from reasonrl.lazy import torch
from reasonrl.models import ModelConfig, path_mistake
from reasonrl.models.parts import checkpoint_layers, inner_model, take_apart
from reasonrl.types import Problem

PACK_WIDTHS = 2  # times the hidden size: attention then costs at most a third of the matrix products
PACK_MOST = 8192  # tokens; the mask between them takes 128 MB in bfloat16


@dataclass
class Policy:
    """A causal LM with its tokenizer; `body` gives hidden states, `head` turns them into logits.

    Where a model does more between the two than a matrix product (logit scaling, soft caps), `body` is the
    whole model, its "hidden states" are the logits, and `head` changes nothing.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    eos_ids: tuple[int, ...]
    pad_id: int
    body: Any
    head: Any
    cache_argument: str | None  # None: the model runs without a cache (recurrent and other unusual layers)
    window: int
    name: str
    system: str | None = None
    chat: bool = False
    takes_positions: bool = True
    shares_prompts: bool = True  # a cache can be kept while training (not with gradient checkpointing)
    pack_tokens: int = 0  # rows are packed into one up to so many tokens (reasonrl/packing.py)
    checkpointed: tuple[Any, ...] = ()  # layers that recompute their activations in backward
    root: Any = None  # sharded: the module in whose forward the parts may run, on all processes together

    def encode(self, problem: Problem) -> list[int]:
        """Return the prompt's token ids, through the chat template where the policy uses one."""
        if not self.chat:
            return self.tokenizer(problem.prompt)["input_ids"]
        messages = [{"role": "user", "content": problem.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def configure_prompts(self, system: str | None, chat: bool | None) -> None:
        """Take the task's system prompt and whether to use the chat template (null = where there is one)."""
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        if chat and not has_template:
            raise ModelError(
                f"task.chat=true, but the tokenizer of {self.name} has no chat template. Use task.chat=false."
            )
        self.chat = has_template if chat is None else chat
        if system and not self.chat:
            raise ModelError("task.system needs a chat template; put the text into task.prompt instead.")
        self.system = system

    def decode(self, ids: list[int]) -> str:
        """Return the completion's text without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Run the body on (rows, tokens) ids with a cache that grows; return (rows, tokens, hidden)."""
        kwargs: dict[str, Any] = {"attention_mask": mask, "use_cache": cache is not None}
        if self.cache_argument is not None:
            kwargs[self.cache_argument] = cache
        if self.takes_positions:
            kwargs["position_ids"] = positions
        for layer in self.checkpointed:  # transformers drops the cache of layers in training mode
            layer.training = cache is None and torch.is_grad_enabled()
        return self.body(input_ids=ids, **kwargs)[0]

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call `function`, which runs parts of the policy for one backward, with the weights at hand."""
        return function() if self.root is None else self.root(function)

    def trainable(self) -> list[torch.nn.Parameter]:
        """Return the parameters that training changes."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[Policy]:
        """Yield the frozen starting policy of an adapter model, by switching its adapter off."""
        with self.model.disable_adapter():
            yield self


@dataclass
class Reference:
    """The frozen starting policy: a copy of the weights, or the same weights with the adapter off."""

    policy: Policy
    uses_adapter: bool

    @contextlib.contextmanager
    def active(self) -> Iterator[Policy]:
        """Yield the reference as a Policy."""
        if self.uses_adapter:
            with self.policy.as_reference() as policy:
                yield policy
        else:
            yield self.policy


def make_reference(policy: Policy) -> Reference:
    """Freeze a reference of `policy` as it is now; costs a second copy of the weights without adapters."""
    if hasattr(policy.model, "disable_adapter"):
        return Reference(policy, True)
    memo: dict[int, Any] = {}
    model = copy.deepcopy(policy.model, memo).requires_grad_(False)
    parts = take_apart(model)
    fields = {**vars(policy), "model": model, "body": parts.body, "head": parts.head, "checkpointed": ()}
    return Reference(Policy(**fields), False)


def choose_device(name: str, key: str = "model.device") -> torch.device:
    """Return the device of `name` (config key `key`); auto takes the first visible CUDA device, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"{key}={name} is not a device; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"{key}={name}, but no CUDA device is visible. Use {key}=auto.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the weights' dtype; auto takes bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if native else torch.float32


def load_hf(config: ModelConfig, path: str) -> Policy:
    """Load model and tokenizer from `path`; ConfigError if there is none there, else ModelError."""
    if mistake := path_mistake(config, path):
        raise ConfigError([mistake])
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    device = choose_device(config.device)
    dtype = torch.float32 if config.kind == "tiny" and config.dtype == "auto" else choose_dtype(config.dtype, device)
    common: dict[str, Any] = {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    if config.gguf_file:
        common["gguf_file"] = config.gguf_file
    elif config.safetensors_only:
        common["use_safetensors"] = True
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **{k: v for k, v in common.items() if k != "use_safetensors"})
        if config.attention != "auto":
            common["attn_implementation"] = config.attention
        # a GGUF file is read under a progress bar of its own, which no setting of transformers turns off
        with contextlib.redirect_stderr(io.StringIO()) if config.gguf_file else contextlib.nullcontext():
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **common)
    except Exception as error:  # transformers raises many kinds; each ends here as one readable message
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model.path={path} could not be loaded: {type(error).__name__}: {first[:300]}") from error
    if config.gguf_file:
        model = _without_quantization(model, dtype)
    model.to(device)
    model.config.use_cache = True
    if config.lora.r > 0:
        model = _with_adapter(model, config)
    model.eval()  # dropout off: the ratio of the first minibatch must be 1
    policy = wrap(model, tokenizer, device, path)
    if config.gradient_checkpointing:
        policy.checkpointed = tuple(checkpoint_layers(model))
        policy.shares_prompts = False
    return policy


def wrap(model: Any, tokenizer: Any, device: torch.device, name: str) -> Policy:
    """Wrap a loaded model and tokenizer; a missing pad token becomes EOS (masks are by position, so this is safe)."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = eos if eos is not None else model.config.eos_token_id
    ids = {eos} if isinstance(eos, int) else set(eos or [])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(f"model.path={name} names no end-of-sequence token; set eos_token in its tokenizer.")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ids)
    parts = take_apart(model)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        device=device,
        eos_ids=tuple(sorted(ids)),
        pad_id=pad,
        body=parts.body,
        head=parts.head,
        cache_argument=parts.cache,
        window=getattr(inner_model(model).config, "max_position_embeddings", 1 << 20),
        name=name,
        chat=tokenizer.chat_template is not None,
        takes_positions=parts.takes_positions,
        shares_prompts=parts.cache is not None,
        pack_tokens=min(PACK_MOST, PACK_WIDTHS * inner_model(model).config.hidden_size) if parts.packs else 0,
    )


def _without_quantization(model: Any, dtype: torch.dtype) -> Any:
    """Rebuild a GGUF model from its config and weights: as loaded it refuses `save_pretrained` as quantized."""
    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    generation = model.generation_config
    rebuilt = type(model)._from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)
    rebuilt.load_state_dict(model.state_dict())
    rebuilt.generation_config = generation
    return rebuilt


def _with_adapter(model: Any, config: ModelConfig) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError("model.lora.r > 0 needs peft: pip install 'reasonrl[lora]'.") from error
    from transformers.pytorch_utils import Conv1D

    lora = config.lora
    targets = lora.targets if lora.targets == "all-linear" else lora.targets.split(",")
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_dora=lora.dora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft still asks transformers by names that are about to go
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, settings)
