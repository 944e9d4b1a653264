"""The sampler: fast paths against the slow obvious one, and what a completion is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from reasonrl.logprobs import completion_logprobs
from reasonrl.randomness import uniforms
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout import generate as module
from reasonrl.rollout.batch import join, sample_groups
from reasonrl.rollout.generate import draw, generate, keep_filter
from reasonrl.tasks import TaskConfig, load_task

LIMIT, GROUP = 14, 6
PLAIN = SamplingConfig(max_new_tokens=LIMIT, group_size=GROUP)


def problems(count=4):
    task = load_task(TaskConfig(operands=[4, 6]))
    return [task.train_problem(i) for i in range(count)]


def sample(policy, config=PLAIN, count=4, key="draws"):
    prompts = [policy.encode(problem) for problem in problems(count)]
    noise = torch.from_numpy(uniforms(count * config.group_size, config.max_new_tokens, key))
    return prompts, generate(policy, prompts, config.group_size, config, noise)


def slow_sample(policy, prompts, group_size, limit, noise):
    """One row at a time, the whole text again for every token, no cache; (ids, log-probs, finish) per row."""
    rows = []
    for row in range(len(prompts) * group_size):
        prompt = list(prompts[row // group_size])
        ids, logprobs, finish = [], [], "length"
        for t in range(limit):
            with torch.no_grad():
                logp = policy.model(torch.tensor([prompt + ids])).logits[0, -1].log_softmax(-1)
            token = int(draw(logp.exp().unsqueeze(0), noise[row, t : t + 1]))
            ids.append(token)
            logprobs.append(float(logp[token]))
            if token in policy.eos_ids:
                finish = "stop"
                break
        rows.append((ids, logprobs, finish))
    return rows


def with_fixed_logits(policy, logits):
    """The same policy, but every next-token distribution is the given one."""
    return replace(policy, head=lambda hidden: hidden[..., :1] * 0 + torch.tensor(logits))


def only(policy, **tokens):
    """Logits over the tiny vocabulary with the given probabilities, all else impossible."""
    names = {"eos": "$", "a": "a", "b": "b", "c": "c"}
    logits = [-math.inf] * len(policy.tokenizer)
    for name, probability in tokens.items():
        logits[policy.tokenizer.convert_tokens_to_ids(names[name])] = math.log(probability)
    return logits


def rows_of(out):
    return [ids[:n] for ids, n in zip(out.ids_BT.tolist(), out.lengths_B.tolist(), strict=True)]


def test_cached_decode_equals_full_decode_token_for_token(policy):
    prompts, out = sample(policy)
    assert len({len(prompt) for prompt in prompts}) > 1  # left padding takes part
    noise = torch.from_numpy(uniforms(4 * GROUP, LIMIT, "draws"))
    slow = slow_sample(policy, prompts, GROUP, LIMIT, noise)
    assert rows_of(out) == [ids for ids, _, _ in slow]
    assert out.finish == [finish for _, _, finish in slow]
    assert {"stop", "length"} == set(out.finish)
    for row, (ids, logprobs, _) in enumerate(slow):
        assert out.logprobs_BT[row, : len(ids)].tolist() == pytest.approx(logprobs, abs=2e-5)


@pytest.mark.parametrize("share", [0.0, 2.0])  # leave at once, or never leave
def test_dropping_finished_rows_changes_nothing(policy, monkeypatch, share):
    _, usual = sample(policy)
    monkeypatch.setattr(module, "COMPACT_SHARE", share)
    _, other = sample(policy)
    assert torch.equal(usual.ids_BT, other.ids_BT)
    assert torch.equal(usual.mask_BT, other.mask_BT)
    assert torch.allclose(usual.logprobs_BT, other.logprobs_BT, atol=2e-5)
    assert usual.finish == other.finish


def test_a_model_that_cannot_keep_a_cache_gives_the_same_tokens(policy):
    _, usual = sample(policy)
    _, whole = sample(replace(policy, cache_argument=None))
    assert torch.equal(usual.ids_BT, whole.ids_BT)
    assert torch.equal(usual.mask_BT, whole.mask_BT)
    assert torch.allclose(usual.logprobs_BT, whole.logprobs_BT, atol=2e-5)
    assert usual.finish == whole.finish


def test_a_row_does_not_depend_on_its_company(policy):
    prompts, out = sample(policy)
    noise = torch.from_numpy(uniforms(4 * GROUP, LIMIT, "draws"))
    alone = [generate(policy, [prompts[p]], GROUP, PLAIN, noise[p * GROUP : (p + 1) * GROUP]) for p in range(4)]
    assert rows_of(out) == [row for part in alone for row in rows_of(part)]


def test_a_longer_limit_only_continues_cut_rows(policy):
    _, short = sample(policy, replace(PLAIN, max_new_tokens=6))
    _, long = sample(policy)
    for ids, more, finish in zip(rows_of(short), rows_of(long), short.finish, strict=True):
        assert more[: len(ids)] == ids
        assert finish == "length" or more == ids


def test_completions_end_at_the_first_eos_by_position_also_when_pad_is_eos(policy):
    prompts, usual = sample(policy)
    eos = policy.eos_ids[0]
    same = replace(policy, pad_id=eos)
    noise = torch.from_numpy(uniforms(4 * GROUP, LIMIT, "draws"))
    out = generate(same, prompts, GROUP, PLAIN, noise)
    assert rows_of(out) == rows_of(usual)
    assert torch.equal(out.mask_BT, usual.mask_BT)
    for ids, length, finish in zip(out.ids_BT.tolist(), out.lengths_B.tolist(), out.finish, strict=True):
        assert (ids[length - 1] == eos) == (finish == "stop")  # the EOS itself is kept and trained
        assert eos not in ids[: length - 1]
        assert set(ids[length:]) <= {eos}
    assert len(set(out.lengths_B.tolist())) > 3


def test_log_probs_and_entropy_behind_the_end_are_zero(policy):
    _, out = sample(policy)
    behind = out.mask_BT == 0
    assert behind.any()
    assert not out.logprobs_BT[behind].any()
    assert not out.entropy_BT[behind].any()


def test_an_empty_completion_is_one_eos_and_no_text(policy):
    _, out = sample(with_fixed_logits(policy, only(policy, eos=1.0)))
    assert rows_of(out) == [[policy.eos_ids[0]]] * (4 * GROUP)
    assert out.finish == ["stop"] * (4 * GROUP)
    assert not out.logprobs_BT.any()  # probability 1


def test_a_policy_that_never_ends_is_cut_at_the_limit(policy):
    _, out = sample(with_fixed_logits(policy, only(policy, a=0.5, b=0.5)))
    assert out.lengths_B.tolist() == [LIMIT] * (4 * GROUP)
    assert set(out.finish) == {"length"}


def test_eos_on_the_last_allowed_token_is_a_stop_not_a_cut(policy):
    out = sample(with_fixed_logits(policy, only(policy, eos=1.0)), replace(PLAIN, max_new_tokens=1))[1]
    assert set(out.finish) == {"stop"}


def test_temperature_flattens_the_distribution_and_enters_the_log_probs(policy):
    # probabilities .9 and .1 at T = 2: weights 3 and 1, so .75 and .25; the entropy stays that of T = 1
    fixed = with_fixed_logits(policy, only(policy, a=0.9, b=0.1))
    _, out = sample(fixed, replace(PLAIN, temperature=2.0))
    likely = out.ids_BT == policy.tokenizer.convert_tokens_to_ids("a")
    assert out.logprobs_BT[likely].exp().tolist() == pytest.approx([0.75] * int(likely.sum()), abs=1e-5)
    assert out.logprobs_BT[~likely].exp().tolist() == pytest.approx([0.25] * int((~likely).sum()), abs=1e-5)
    assert likely.float().mean().item() == pytest.approx(0.75, abs=0.08)  # 336 draws: sigma .024
    assert out.entropy_BT.mean().item() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1), abs=1e-5)
    assert (out.temperature_BT == 2.0).all()


def test_draws_invert_the_cumulative_distribution():
    probs = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).repeat(6, 1)
    at = torch.tensor([0.0, 0.49, 0.5, 0.79, 0.81, 0.9999999])
    assert draw(probs, at).tolist() == [0, 0, 2, 2, 3, 3]


def test_tokens_without_probability_are_never_drawn():
    probs = torch.tensor([[0.0, 1.0, 0.0]]).repeat(3, 1)
    assert draw(probs, torch.tensor([0.0, 0.5, 0.99999994])).tolist() == [1, 1, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_top_k_cuts_it():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert keep_filter(logits, 0.7, 0).tolist() == [[False, True, False, True]]
    assert keep_filter(logits, 0.8, 0).tolist() == [[False, True, True, True]]
    assert keep_filter(logits, 0.8, 1).tolist() == [[False, True, False, False]]
    assert keep_filter(logits, 1e-6, 0).tolist() == [[False, True, False, False]]  # the best one always stays
    assert keep_filter(logits, 1.0, 0).all()


def replayed(policy, prompts, out):
    owner = torch.arange(len(prompts)).repeat_interleave(GROUP)
    with torch.no_grad():
        return completion_logprobs(policy, prompts, owner, out, torch.arange(len(owner)))[0]


def test_filtered_sampling_is_replayed_exactly_in_the_log_probs(policy):
    config = replace(PLAIN, top_p=0.6, top_k=5, temperature=1.3, replay_filter=True)
    prompts, out = sample(policy, config)
    for row, (counts, ids) in enumerate(out.kept):
        mine = out.ids_BT[row][out.mask_BT[row].bool()].tolist()
        assert len(counts) == len(mine) and counts.max() <= 5
        assert all(token in left for token, left in zip(mine, ids.split(counts.tolist()), strict=True))
    assert torch.allclose(replayed(policy, prompts, out), out.logprobs_BT, atol=2e-5)
    some = torch.tensor([3, 0, 5])
    with torch.no_grad():
        part, _ = completion_logprobs(policy, prompts, some // GROUP, out, some)
    assert torch.allclose(part, out.logprobs_BT[some, : part.shape[1]], atol=2e-5)
    # without the filter the same tokens are less likely: training on those numbers would be off-policy
    assert (replayed(policy, prompts, replace(out, kept=None)) < out.logprobs_BT - 0.05)[out.mask_BT.bool()].any()


def test_two_temperatures_follow_the_untempered_entropy_and_reach_every_log_prob(policy):
    _, usual = sample(policy)
    threshold = usual.entropy_BT[usual.mask_BT.bool()].median().item()
    config = replace(PLAIN, temperature=0.8, temperature_high=1.4, entropy_threshold=threshold)
    prompts, out = sample(policy, config)
    valid = out.mask_BT.bool()
    hot = out.entropy_BT[valid] > threshold
    assert 0.1 < hot.float().mean() < 0.9
    assert torch.equal(out.temperature_BT[valid], torch.where(hot, 1.4, 0.8))
    assert torch.allclose(replayed(policy, prompts, out), out.logprobs_BT, atol=2e-5)


def test_groups_are_scored_and_joined_without_changing_a_token(policy):
    task = load_task(TaskConfig(operands=[4, 6]))
    groups = sample_groups(policy, task, problems(), PLAIN, (0, 1, 0))
    rollouts = join(groups, policy.pad_id)
    assert rollouts.correct_PG.shape == (4, GROUP)
    assert rows_of(rollouts.completions) == [row for group in groups for row in rows_of(group.completions)]
    for text, ids in zip(rollouts.texts, rows_of(rollouts.completions), strict=True):
        assert text == policy.decode(ids)
        assert "$" not in text
    assert rollouts.completions.finish == [end for group in groups for end in group.completions.finish]


def test_two_arms_with_one_seed_share_their_draws(policy):
    task = load_task(TaskConfig(operands=[4, 6]))
    one = sample_groups(policy, task, problems(), PLAIN, (0, 1, 0))
    two = sample_groups(policy, task, problems(2), PLAIN, (0, 1, 0))
    assert [rows_of(group.completions) for group in one[:2]] == [rows_of(group.completions) for group in two]
    other = sample_groups(policy, task, problems(2), PLAIN, (1, 1, 0))
    assert [rows_of(group.completions) for group in other] != [rows_of(group.completions) for group in two]
