"""Key-value caches: prefill each prompt once, share it between the rows of its group, drop finished rows."""

from __future__ import annotations

from typing import Any

from reasonrl.lazy import torch
from reasonrl.models.parts import inner_model, new_cache
from reasonrl.models.policy import Policy


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask (P, L) of prompts that end at the same column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def right_pad(rows: list[list[int]], pad_id: int, device: torch.device) -> torch.Tensor:
    """Return ids (rows, L) of rows that begin at the same column; what follows a row never reaches back into it."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=device)


def prefill(policy: Policy, prompts: list[list[int]]) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Run P left-padded prompts; return the last hidden state (P, hidden), the cache, and the mask (P, L)."""
    ids, mask = left_pad(prompts, policy.pad_id, policy.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(inner_model(policy.model))
    hidden = policy.hidden(ids, None if bool(mask.all()) else mask, positions, cache)
    return hidden[:, -1], cache, mask


def select_rows(cache: Any, rows: torch.Tensor) -> None:
    """Keep (or repeat) the cache rows named by `rows`, in that order; differentiable."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)


def reserve(cache: Any, num_tokens: int) -> None:
    """Replace plain growing layers by buffers with room for `num_tokens` more, so that decoding copies nothing.

    Layers of other kinds (sliding window, linear attention) stay as transformers made them.
    """
    from transformers.cache_utils import DynamicLayer

    class BufferedLayer(DynamicLayer):
        """A growing layer that writes into memory taken in advance."""

        length: int
        keys: Any
        values: Any
        dtype: Any
        device: Any

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            end = self.length + key_states.shape[-2]
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
            self.length = end
            return self.keys[:, :, :end], self.values[:, :, :end]

        def get_seq_length(self) -> int:
            return self.length

    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            continue
        buffered = BufferedLayer()
        keys: Any = layer.keys
        values: Any = layer.values
        rows, heads, length, width = keys.shape
        buffered.keys = keys.new_empty((rows, heads, length + num_tokens, width))
        buffered.values = values.new_empty((rows, heads, length + num_tokens, values.shape[-1]))
        buffered.keys[:, :, :length], buffered.values[:, :, :length] = keys, values
        buffered.length, buffered.is_initialized = length, True
        buffered.device, buffered.dtype = keys.device, keys.dtype
        layers[index] = buffered
