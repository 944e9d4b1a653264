"""A causal LM in two parts: a body that gives hidden states and a head that turns them into logits.

Logits are then made only where they are needed. How a model goes from one to the other is found by trying, on a few
tokens: a plain matrix product, the model's own forward around given hidden states (soft caps, logit scales), or, where
neither reproduces the model, the whole model with its logits in place of hidden states.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from reasonrl.lazy import torch

PROBE_TOKENS = 4


def inner_model(model: Any) -> Any:
    """Return the transformers model, inside a peft wrapper or not."""
    return model.get_base_model() if hasattr(model, "disable_adapter") else model


@dataclass
class Parts:
    """How a model is run: head(body(x)) are its logits; `cache` names the body's cache argument, None without one."""

    body: Any
    head: Any
    cache: str | None
    takes_positions: bool  # ALiBi and recurrent models do not
    packs: bool  # several rows can be run as one, under a mask


def take_apart(model: Any) -> Parts:
    """Find the parts of a model by running it on a few tokens."""
    inner = inner_model(model)
    with torch.no_grad():
        body, head, hidden = _split(inner)
        parameters = inspect.signature((inner if isinstance(body, WholeModel) else body).forward).parameters
        takes_positions = "position_ids" in parameters
        cache = _cache_argument(inner, body, hidden, list(parameters))
        return Parts(body, head, cache, takes_positions, takes_positions and _packs(inner, body))


def _split(inner: Any) -> tuple[Any, Any, torch.Tensor]:
    """Return body, head, and the hidden states of the probe."""
    body, linear = inner.base_model, inner.get_output_embeddings()
    if body is not inner:
        output, only_step = _watch(inner, body, linear)
        if only_step:
            return body, linear, output[0]
        wrapped = ForwardAround(inner, type(output))
        if wrapped.equals(inner(input_ids=_probe(inner), use_cache=False).logits, output[0]):
            return body, wrapped, output[0]
    whole = WholeModel(inner)
    return whole, _unchanged, whole(input_ids=_probe(inner), use_cache=False)[0]


def _watch(inner: Any, body: Any, linear: Any) -> tuple[Any, bool]:
    """Return the body's output on the probe, and whether `linear` alone makes the logits of it.

    A soft cap of 30 does not show on small logits, so the layer's output is replaced by numbers far from zero, which
    must come out as they went in.
    """
    outputs: list[Any] = []
    inputs: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output)

    def replace(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        inputs.append(args[0])
        given.append(torch.linspace(-60, 60, output.numel(), device=output.device).view_as(output).to(output.dtype))
        return given[-1]

    handles = [body.register_forward_hook(keep)]
    if linear is not None:
        handles.append(linear.register_forward_hook(replace))
    try:
        logits = inner(input_ids=_probe(inner), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    # some models call a part of their body only
    output = outputs[0] if outputs else body(input_ids=_probe(inner), use_cache=False)
    return output, bool(inputs) and _same(inputs[0], output[0]) and _same(given[0], logits)


def _probe(inner: Any) -> torch.Tensor:
    return torch.arange(PROBE_TOKENS, device=next(inner.parameters()).device).unsqueeze(0) + 1


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first.float(), second.float(), rtol=1e-3, atol=1e-3)


def _unchanged(logits: torch.Tensor) -> torch.Tensor:
    return logits


class ForwardAround:
    """The model's own way from hidden states to logits: its forward, with the body's output given."""

    def __init__(self, inner: Any, output_type: Any) -> None:
        self.inner = inner
        self.output_type = output_type

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V) of hidden states (..., hidden)."""
        name = self.inner.base_model_prefix
        body = getattr(self.inner, name)
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        setattr(self.inner, name, _given_output(self.output_type(last_hidden_state=flat)))
        try:
            ids = torch.ones(flat.shape[:2], dtype=torch.long, device=hidden.device)
            logits = self.inner(input_ids=ids, use_cache=False).logits
        finally:
            setattr(self.inner, name, body)
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    def equals(self, logits: torch.Tensor, hidden: torch.Tensor) -> bool:
        """Return whether this gives the model's logits."""
        try:
            return _same(self(hidden), logits)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False


def _given_output(output: Any) -> Any:
    class Given(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return output

    return Given()


class WholeModel:
    """A model whose logits stand in for hidden states."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **kwargs: Any) -> tuple[torch.Tensor]:
        """Return the logits where a body would return hidden states."""
        return (self.model(**kwargs).logits,)


def _cache_argument(inner: Any, body: Any, hidden: torch.Tensor, parameters: list[str]) -> str | None:
    """Return the name under which `body` takes a key-value cache, or None.

    None also for models whose cache is more than keys and values per token (recurrent, convolutional, indexed
    layers): a prompt's state cannot be padded and shared as we do it, so they run without a cache. Proved by running
    the probe in two pieces; `hidden` is what one piece gave.
    """
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    cache = new_cache(inner)
    if name is None or not all(_holds_keys(layer) for layer in cache.layers):
        return None
    ids = _probe(inner)
    body(input_ids=ids[:, :-1], use_cache=True, **{name: cache})
    pieces = body(input_ids=ids[:, -1:], use_cache=True, **{name: cache})[0][:, -1].float()
    same = (pieces - hidden[:, -1]).norm() < 0.05 * hidden[:, -1].float().norm()
    full = [_holds_keys(layer) and layer.get_seq_length() == PROBE_TOKENS for layer in cache.layers]
    return name if same and full and all(full) else None


def packed_mask(segment_N: torch.Tensor, root_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask (1, 1, N, N): a token sees what stands before it in its own segment and in its prompt's."""
    seen = (segment_N.unsqueeze(1) == segment_N) | (root_N.unsqueeze(1) == segment_N)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill(~seen.tril(), torch.finfo(dtype).min)[None, None]


def _packs(inner: Any, body: Any) -> bool:
    """Return whether the model obeys a mask between tokens: only in that case can rows be packed into one.

    Proved on the probe: its last token, hidden from the one before it, must come out as if that were not there; and
    must not without the mask, or the proof would say nothing.
    """
    config = inner.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
        return False
    if config._attn_implementation not in ("sdpa", "eager"):
        return False
    ids = _probe(inner)
    last = PROBE_TOKENS - 1
    positions = torch.arange(PROBE_TOKENS, device=ids.device).unsqueeze(0)
    branched = positions.clamp(max=last - 1)
    segment = torch.tensor([0] * (last - 1) + [1, 2], device=ids.device)
    mask = packed_mask(segment, torch.zeros_like(segment), next(inner.parameters()).dtype)
    try:
        packed = body(input_ids=ids, attention_mask=mask, position_ids=branched, use_cache=False)[0][0, -1].float()
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    without = torch.cat([ids[:, : last - 1], ids[:, -1:]], 1)
    alone = body(input_ids=without, position_ids=positions[:, :last], use_cache=False)[0][0, -1].float()
    mixed = body(input_ids=ids, position_ids=branched, use_cache=False)[0][0, -1].float()
    return bool((packed - alone).norm() * 10 < (mixed - alone).norm())


def new_cache(inner: Any) -> Any:
    """Return an empty cache with the layer types of a transformers model."""
    from transformers import DynamicCache

    return DynamicCache(config=inner.config)


def _holds_keys(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def checkpoint_layers(model: Any) -> list[Any]:
    """Prepare the layers to recompute their activations in backward, and return them.

    transformers recomputes only where `training` is set, which also switches dropout on and the ratio of the first
    minibatch away from 1. So the layers' own dropout becomes 0, and the caller sets `training` on them alone.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in layers:
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return layers
