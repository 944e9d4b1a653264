"""Log-probs of given completions: the shared-prompt path against one plain forward per row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reasonrl.logprobs import completion_logprobs, full_forward_logprobs
from reasonrl.randomness import uniforms
from reasonrl.rollout import SamplingConfig
from reasonrl.rollout.generate import generate
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.types import Completions

GROUP = 5
OWNER = torch.arange(3).repeat_interleave(GROUP)


def sampled(policy, **settings):
    """Prompts of two lengths, and their completions."""
    config = SamplingConfig(max_new_tokens=10, group_size=GROUP, **settings)
    task = load_task(TaskConfig(operands=[4, 6]))
    prompts = [policy.encode(task.train_problem(i)) for i in range(3)]
    assert len({len(prompt) for prompt in prompts}) > 1
    noise = torch.from_numpy(uniforms(3 * GROUP, 10, "logprobs"))
    return prompts, generate(policy, prompts, GROUP, config, noise)


def slow(policy, prompts, done, row):
    ids = done.ids_BT[row, : int(done.lengths_B[row])].tolist()
    return full_forward_logprobs(policy, prompts[int(OWNER[row])], ids, float(done.temperature_BT[row, 0]))


def gradient_of(policy, loss):
    policy.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.trainable()])


PATHS = {
    "packed": {"pack_tokens": 1000},
    "shared": {"pack_tokens": 0},
    "whole": {"pack_tokens": 0, "shares_prompts": False},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_path_equals_the_slow_full_forward_in_value_and_gradient(policy, path, temperature):
    policy = replace(policy, **PATHS[path])
    prompts, done = sampled(policy, temperature=temperature)
    rows = torch.tensor([0, 3, 7, 8, 14])  # two rows of one prompt, and rows of the others
    weight = torch.linspace(-1, 2, 5)
    fast, _ = completion_logprobs(policy, prompts, OWNER[rows], done, rows)
    for i, row in enumerate(rows.tolist()):
        reference = slow(policy, prompts, done, row)
        assert fast[i, : len(reference)].tolist() == pytest.approx(reference.tolist(), abs=2e-5)
        assert not fast[i, len(reference) :].any()
    quick = gradient_of(policy, (fast.sum(-1) * weight).sum())
    careful = gradient_of(
        policy, sum(w * slow(policy, prompts, done, row).sum() for w, row in zip(weight, rows.tolist(), strict=True))
    )
    assert (quick - careful).norm() < 1e-5 * careful.norm()


def test_first_ratio_after_generation_is_one(policy):
    prompts, done = sampled(policy, temperature=1.2)
    with torch.no_grad():
        again, _ = completion_logprobs(policy, prompts, OWNER, done, torch.arange(15))
    assert (again - done.logprobs_BT).abs().max() < 2e-5


def test_entropy_of_the_same_pass_equals_the_samplers(policy):
    prompts, done = sampled(policy)
    with torch.no_grad():
        _, entropy = completion_logprobs(policy, prompts, OWNER, done, torch.arange(15), with_entropy=True)
    assert (entropy - done.entropy_BT).abs().max() < 2e-5


def test_gradient_checkpointing_takes_the_path_without_a_cache(policy):
    policy.pack_tokens = 0
    prompts, done = sampled(policy)
    rows = torch.arange(15)
    plain = gradient_of(policy, completion_logprobs(policy, prompts, OWNER, done, rows)[0].sum())
    policy.shares_prompts = False
    whole = gradient_of(policy, completion_logprobs(policy, prompts, OWNER, done, rows)[0].sum())
    assert (plain - whole).norm() < 1e-5 * plain.norm()


def test_prompt_is_run_once_for_all_rows_of_its_group(policy):
    prompts, done = sampled(policy)
    shapes = []
    inner = policy.body

    def spy(**kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return inner(**kwargs)

    with torch.no_grad():
        completion_logprobs(replace(policy, body=spy, pack_tokens=1000), prompts, OWNER, done, torch.arange(15))
        completion_logprobs(replace(policy, body=spy, pack_tokens=0), prompts, OWNER, done, torch.arange(15))
    whole = sum(map(len, prompts)) + int((done.lengths_B - 1).sum())
    assert shapes == [(1, whole), (3, max(map(len, prompts))), (15, int(done.lengths_B.max()) - 1)]


def test_logits_are_made_at_valid_completion_tokens_only(policy):
    prompts, done = sampled(policy)
    rows = []
    head = policy.head

    def spy(hidden):
        rows.append(hidden.shape[0])
        return head(hidden)

    with torch.no_grad():
        completion_logprobs(replace(policy, head=spy), prompts, OWNER, done, torch.arange(15))
    assert rows == [int(done.mask_BT.sum())]


def test_rows_of_length_one_and_zero_work(policy):
    prompts, _ = sampled(policy)
    eos = policy.eos_ids[0]
    zeros = torch.zeros(3, 1)
    done = Completions(torch.full((3, 1), eos), torch.tensor([[1], [0], [1]]), zeros, zeros, zeros + 1, ["stop"] * 3)
    for fields in PATHS.values():
        found, _ = completion_logprobs(replace(policy, **fields), prompts, torch.arange(3), done, torch.arange(3))
        expected = [full_forward_logprobs(policy, prompts[row], [eos]).item() for row in (0, 2)]
        assert found.squeeze(-1).tolist() == pytest.approx([expected[0], 0.0, expected[1]], abs=2e-5)
    nothing = replace(done, mask_BT=torch.zeros(3, 1, dtype=torch.long))
    assert not completion_logprobs(policy, prompts, torch.arange(3), nothing, torch.arange(3))[0].any()
