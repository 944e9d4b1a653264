"""Prompts and completions of several rows as one row of tokens: no padding, every weight read once.

A completion's tokens see their prompt and themselves, not the other completions, so that each distinct prompt stands
there once. Attention costs the square of the whole, which is little against the matrix products only while the row
is not much longer than the model is wide; beyond `Policy.pack_tokens` rows are run side by side instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from reasonrl.lazy import torch
from reasonrl.models.parts import packed_mask
from reasonrl.models.policy import Policy


def packed_tokens(prompts: Sequence[Sequence[int]], owners: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of the packed row: every prompt once, and all but the last token of every completion."""
    return sum(len(prompts[owner]) for owner in set(owners)) + sum(max(length - 1, 0) for length in lengths)


def hidden_packed(
    policy: Policy, prompts: list[list[int]], owner_B: torch.Tensor, ids_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Hidden states (N, hidden) that predict the N valid completion tokens, row after row.

    Row i has prompt `prompts[owner_B[i]]`; a token is predicted where the one before it stands.
    """
    ids: list[int] = []
    positions: list[int] = []
    segment: list[int] = []  # which prompt or completion a token belongs to
    root: list[int] = []  # the segment of its prompt
    ends: dict[int, int] = {}  # owner -> where its prompt's last token stands
    owners = owner_B.tolist()
    for number, owner in enumerate(dict.fromkeys(owners)):
        prompt = prompts[owner]
        ids += prompt
        positions += range(len(prompt))
        segment += [number] * len(prompt)
        root += [number] * len(prompt)
        ends[owner] = len(ids) - 1
    wanted: list[int] = []
    for row, (owner, valid) in enumerate(zip(owners, mask_BT.sum(-1).tolist(), strict=True)):
        if not valid:
            continue
        wanted += [ends[owner], *range(len(ids), len(ids) + valid - 1)]
        ids += ids_BT[row, : valid - 1].tolist()
        positions += range(len(prompts[owner]), len(prompts[owner]) + valid - 1)
        segment += [len(ends) + row] * (valid - 1)
        root += [segment[ends[owner]]] * (valid - 1)

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=policy.device)

    mask = packed_mask(on_device(segment), on_device(root), next(policy.model.parameters()).dtype)
    hidden = policy.hidden(on_device(ids).unsqueeze(0), mask, on_device(positions).unsqueeze(0), None)
    return hidden[0, on_device(wanted)]
