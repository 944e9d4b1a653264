"""Log-probs and entropies of given completions under a policy, with each prompt run once."""

from __future__ import annotations

from reasonrl.entropy import logprob_and_entropy
from reasonrl.lazy import torch
from reasonrl.models.policy import Policy
from reasonrl.packing import hidden_packed, packed_tokens
from reasonrl.rollout.cache import prefill, right_pad, select_rows
from reasonrl.types import Completions


def completion_logprobs(
    policy: Policy,
    prompts: list[list[int]],
    owner_B: torch.Tensor,
    completions: Completions,
    rows_B: torch.Tensor,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs (B, T) and, if asked for, entropies (B, T) of the completions named by `rows_B`.

    Row i has prompt `prompts[owner_B[i]]`. Each distinct prompt is run once and shared by its rows (their gradients
    add up): in one packed row where that is short enough, else through its keys and values. Logits are made only
    at valid completion positions, and positions behind the mask are 0. Logits are divided by the temperature that
    sampled the token and get its filter, so the ratio to the sampler's log-prob is 1 before the first update.
    """
    lengths = completions.lengths_B[rows_B]
    width = max(int(lengths.max()), 1)  # rows without any token give zeros
    device = policy.device
    ids = completions.ids_BT[rows_B, :width].to(device)
    mask = completions.mask_BT[rows_B, :width].bool().to(device)
    if packed_tokens(prompts, owner_B.tolist(), lengths.tolist()) <= policy.pack_tokens:
        hidden_N = hidden_packed(policy, prompts, owner_B, ids, mask)
    else:
        hidden_N = (_hidden_shared if policy.shares_prompts else _hidden_whole)(policy, prompts, owner_B, ids)[mask]
    logits_NV = policy.head(hidden_N)
    temperature = completions.temperature_BT[rows_B, :width].to(device)[mask]
    if completions.kept is not None:
        logits_NV = logits_NV.masked_fill(~_kept(completions, rows_B, logits_NV), -torch.inf)
    chosen, entropy = logprob_and_entropy(logits_NV, ids[mask], temperature, with_entropy)
    return _scatter(chosen, mask), None if entropy is None else _scatter(entropy, mask)


def _kept(completions: Completions, rows_B: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
    """The tokens (N, V) that the sampler's filter left in, at the valid positions of some rows, row after row."""
    assert completions.kept is not None
    counts, ids = zip(*(completions.kept[row] for row in rows_B.tolist()), strict=True)
    sizes = torch.cat(counts)
    place = torch.arange(len(sizes)).repeat_interleave(sizes)
    keep = torch.zeros_like(logits_NV, dtype=torch.bool)
    keep[place.to(keep.device), torch.cat(ids).long().to(keep.device)] = True
    return keep


def _hidden_shared(
    policy: Policy, prompts: list[list[int]], owner_B: torch.Tensor, ids_BT: torch.Tensor
) -> torch.Tensor:
    """Hidden states (B, T, hidden) that predict each completion token, every distinct prompt run once."""
    used, owner = owner_B.unique(return_inverse=True)
    owner = owner.to(policy.device)
    last, cache, prompt_mask = prefill(policy, [prompts[i] for i in used.tolist()])
    first = last[owner].unsqueeze(1)
    rows, width = ids_BT.shape
    if width == 1:
        return first
    select_rows(cache, owner)
    attention = None
    if not bool(prompt_mask.all()):
        attention = torch.cat([prompt_mask[owner], prompt_mask.new_ones((rows, width - 1))], -1)
    positions = prompt_mask.sum(-1)[owner].unsqueeze(-1) + torch.arange(width - 1, device=policy.device)
    return torch.cat([first, policy.hidden(ids_BT[:, :-1], attention, positions, cache)], 1)


def _hidden_whole(
    policy: Policy, prompts: list[list[int]], owner_B: torch.Tensor, ids_BT: torch.Tensor
) -> torch.Tensor:
    """The same from whole rows without a cache, for models that cannot keep one while training."""
    rows = [prompts[i] + ids for i, ids in zip(owner_B.tolist(), ids_BT[:, :-1].tolist(), strict=True)]
    whole = right_pad(rows, policy.pad_id, policy.device)
    positions = torch.arange(whole.shape[1], device=policy.device).expand_as(whole)
    hidden = policy.hidden(whole, None, positions, None)
    last = torch.tensor([len(prompts[i]) - 1 for i in owner_B.tolist()], device=policy.device)
    wanted = last.unsqueeze(-1) + torch.arange(ids_BT.shape[1], device=policy.device)
    return hidden[torch.arange(len(rows), device=policy.device).unsqueeze(-1), wanted]


def _scatter(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)


def full_forward_logprobs(policy: Policy, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The slow obvious reference: one row, no cache, no sharing; log-probs (T,) of `ids` after `prompt`."""
    whole = torch.tensor([prompt + ids], device=policy.device)
    positions = torch.arange(whole.shape[1], device=policy.device).unsqueeze(0)
    logits = policy.head(policy.hidden(whole, None, positions, None))[0, len(prompt) - 1 : -1]
    return logprob_and_entropy(logits, torch.tensor(ids, device=policy.device), temperature, False)[0]
