"""Draw completions with a key-value cache: one prefill per prompt, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Sequence

from reasonrl.lazy import torch
from reasonrl.models.policy import Policy
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.cache import prefill, reserve, right_pad, select_rows
from reasonrl.types import Completions

COMPACT_SHARE = 0.125  # the batch is compacted once this share of its rows has finished


def draw(probs_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution at the given uniforms: token ids (N,); zero-probability tokens never."""
    cumulative = probs_NV.cumsum(-1)
    target = (uniforms_N * cumulative[:, -1]).unsqueeze(-1)
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # rounding can put the target on the total: the last token with probability takes it
    last = probs_NV.shape[-1] - 1 - (probs_NV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(ids, last)


def keep_filter(logits_NV: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Return the tokens that top-k and top-p (nucleus) leave in, as bool (N, V); the best one always stays."""
    order = logits_NV.argsort(-1, descending=True)
    sorted_probs = logits_NV.gather(-1, order).softmax(-1)
    keep = sorted_probs.cumsum(-1) - sorted_probs < top_p
    if top_k:
        keep[:, top_k:] = False
    return torch.zeros_like(keep).scatter(-1, order, keep)


def temperatures(config: SamplingConfig, entropy_N: torch.Tensor) -> torch.Tensor:
    """Return each row's temperature: T_high where the untempered entropy is above the threshold, else T."""
    base = torch.full_like(entropy_N, config.temperature)
    if config.temperature_high is None or config.entropy_threshold is None:
        return base
    return torch.where(entropy_N > config.entropy_threshold, config.temperature_high, base)


def generate(
    policy: Policy, prompts: Sequence[list[int]], group_size: int, config: SamplingConfig, uniforms_BT: torch.Tensor
) -> Completions:
    """Sample `group_size` completions per prompt; row p * G + g belongs to prompt p.

    uniforms_BT (B, max_new_tokens) fixes every draw. Returned tensors are on the CPU and end at the longest
    completion; ids behind the first EOS are the pad id with mask 0.
    """
    if policy.cache_argument is None:
        return _generate_without_cache(policy, prompts, group_size, config, uniforms_BT)
    limit = config.max_new_tokens
    num_rows = len(prompts) * group_size
    device = policy.device
    with torch.inference_mode():
        hidden, cache, prompt_mask = prefill(policy, list(prompts))
        rows = torch.arange(num_rows, device=device)
        owner = rows // group_size
        select_rows(cache, owner)
        reserve(cache, limit)
        hidden, width = hidden[owner], prompt_mask.shape[1]
        padded = not bool(prompt_mask.all())
        mask = torch.cat([prompt_mask[owner], prompt_mask.new_ones((num_rows, limit))], -1)
        position = prompt_mask.sum(-1)[owner]
        done = torch.zeros(num_rows, dtype=torch.bool, device=device)
        uniforms = uniforms_BT.to(device)
        eos = torch.tensor(policy.eos_ids, device=device)
        out = _Buffers(num_rows, limit, policy.pad_id, device)
        for t in range(limit):
            ids = out.choose(t, rows, ~done, policy.head(hidden).float(), uniforms[rows, t], config)
            done = done | torch.isin(ids, eos)
            out.stopped[rows[done]] = True
            if t + 1 == limit or bool(done.all()):
                break
            if done.float().mean() >= COMPACT_SHARE:
                left = (~done).nonzero().squeeze(-1)
                select_rows(cache, left)
                rows, mask, position, ids, done = rows[left], mask[left], position[left], ids[left], done[left]
            attention = mask[:, : width + t + 1] if padded else None
            hidden = policy.hidden(ids.unsqueeze(-1), attention, position.unsqueeze(-1) + t, cache)[:, -1]
    return out.completions()


def _generate_without_cache(
    policy: Policy, prompts: Sequence[list[int]], group_size: int, config: SamplingConfig, uniforms_BT: torch.Tensor
) -> Completions:
    """The same tokens from whole rows, run again for every token: for models whose cache cannot be shared."""
    device = policy.device
    texts = [list(prompt) for prompt in prompts for _ in range(group_size)]
    active = list(range(len(texts)))
    with torch.inference_mode():
        out = _Buffers(len(texts), config.max_new_tokens, policy.pad_id, device)
        for t in range(config.max_new_tokens):
            ids = right_pad([texts[row] for row in active], policy.pad_id, device)
            positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
            last = torch.tensor([len(texts[row]) - 1 for row in active], device=device)
            rows = torch.tensor(active, device=device)
            hidden = policy.hidden(ids, None, positions, None)[torch.arange(len(active), device=device), last]
            live = torch.ones(len(active), dtype=torch.bool, device=device)
            chosen = out.choose(t, rows, live, policy.head(hidden).float(), uniforms_BT.to(device)[rows, t], config)
            for row, token in zip(active, chosen.tolist(), strict=True):
                texts[row].append(token)
            active = [row for row in active if texts[row][-1] not in policy.eos_ids]
            out.stopped[[row for row in rows.tolist() if row not in active]] = True
            if not active:
                break
    return out.completions()


class _Buffers:
    """Where the sampler writes; a row that has left the batch keeps what it has."""

    def __init__(self, num_rows: int, limit: int, pad_id: int, device: torch.device) -> None:
        self.ids = torch.full((num_rows, limit), pad_id, device=device)
        self.mask = torch.zeros((num_rows, limit), dtype=torch.long, device=device)
        self.logprobs = torch.zeros((num_rows, limit), device=device)
        self.entropy = torch.zeros((num_rows, limit), device=device)
        self.temperature = torch.ones((num_rows, limit), device=device)
        self.stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # rows, counts, ids of each position

    def choose(
        self,
        t: int,
        rows: torch.Tensor,
        live: torch.Tensor,
        logits_NV: torch.Tensor,
        uniforms_N: torch.Tensor,
        config: SamplingConfig,
    ) -> torch.Tensor:
        """Draw token t of the active rows, note it for those that are `live`, and return the ids (N,)."""
        logp = torch.log_softmax(logits_NV, -1)
        entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
        temperature = temperatures(config, entropy)
        filtered = config.top_p < 1.0 or config.top_k > 0
        if filtered or config.temperature != 1.0 or config.temperature_high is not None:
            scaled = logits_NV / temperature.unsqueeze(-1)
            if filtered:
                keep = keep_filter(scaled, config.top_p, config.top_k)
                scaled = scaled.masked_fill(~keep, -torch.inf)
                left_in = keep[live]
                self.kept.append((rows[live].cpu(), left_in.sum(-1).cpu(), left_in.nonzero()[:, 1].int().cpu()))
            logp = torch.log_softmax(scaled, -1)
        ids = draw(logp.exp(), uniforms_N)
        here = rows[live]
        self.ids[here, t] = ids[live]
        self.mask[here, t] = 1
        self.logprobs[here, t] = logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)[live]
        self.entropy[here, t] = entropy[live]
        self.temperature[here, t] = temperature[live]
        return ids

    def completions(self) -> Completions:
        """Return everything on the CPU, cut at the longest row."""
        used = max(int(self.mask.sum(-1).max()), 1)
        tensors = (self.ids, self.mask, self.logprobs, self.entropy, self.temperature)
        # cloned: tensors made in inference mode may not be saved for backward
        ids, mask, logprobs, entropy, temperature = (tensor[:, :used].cpu().clone() for tensor in tensors)
        finish = ["stop" if stopped else "length" for stopped in self.stopped.tolist()]
        return Completions(ids, mask, logprobs, entropy, temperature, finish, self._kept_by_row(len(finish)))

    def _kept_by_row(self, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        if not self.kept:
            return None
        counts: list[list[int]] = [[] for _ in range(num_rows)]
        ids: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]
        for rows, sizes, left_in in self.kept:
            for row, size, part in zip(rows.tolist(), sizes.tolist(), left_in.split(sizes.tolist()), strict=True):
                counts[row].append(size)
                ids[row].append(part)
        return [(torch.tensor(sizes), torch.cat(parts)) for sizes, parts in zip(counts, ids, strict=True)]
