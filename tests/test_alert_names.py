"""Every name of the table of other trainers' logs, and the traps in it."""

from __future__ import annotations

import pytest

from reasonrl.alerts.names import translate, translate_row, unknown
from reasonrl.alerts.vocabulary import is_score
from reasonrl.metrics import METRICS


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # TRL, Unsloth, ms-swift
        ("reward", "reward/total"),
        ("reward_std", "reward/std"),
        ("rewards/accuracy_reward/mean", "reward/accuracy_reward"),
        ("rewards / match_format_exactly / mean", "reward/match_format_exactly"),
        ("rewards / check_answer", "reward/check_answer"),
        ("completions/mean_length", "length/mean"),
        ("completions / mean_length", "length/mean"),
        ("completions / clipped_ratio", "length/truncated"),
        ("completion_length", "length/mean"),
        ("frac_reward_zero_std", "groups/flat"),
        ("clip_ratio/region_mean", "clip/fraction"),
        ("clip_ratio", "clip/fraction"),
        ("entropy", "entropy/mean"),
        ("kl", "kl/ref"),
        ("Training Loss", "loss/total"),
        ("learning_rate", "optim/lr"),
        ("eval_reward", "eval/reward"),
        ("eval_rewards/correctness_reward/mean", "eval/correctness_reward"),
        ("train/rewards/accuracy_reward/mean", "reward/accuracy_reward"),
        # home-made
        ("policyEntropy", "entropy/mean"),
        ("meanReward", "reward/total"),
        ("gradNorm", "optim/grad_norm"),
        ("OlympiadBench", "eval/olympiadbench"),
        # verl
        ("critic/score/mean", "reward/total"),
        ("actor/entropy", "entropy/mean"),
        ("actor/entropy_loss", "entropy/mean"),
        ("actor/kl_loss", "kl/ref"),
        ("critic/kl", "kl/ref"),
        ("actor/pg_clipfrac", "clip/fraction"),
        ("response_length/mean", "length/mean"),
        ("response_length/clip_ratio", "length/truncated"),
        ("actor/grad_norm", "optim/grad_norm"),
        ("val-core/openai/gsm8k/acc/mean@1", "eval/openai/gsm8k"),
        ("val/test_score/openai/gsm8k", "eval/openai/gsm8k"),
        # OpenRLHF, tinker-cookbook, slime
        ("rollout/reward_mean", "reward/total"),
        ("ppo_clip_ratio", "clip/fraction"),
        ("response_length", "length/mean"),
        ("actor_grad_norm", "optim/grad_norm"),
        ("env/all/reward/total", "reward/total"),
        ("reward/mean", "reward/total"),
        ("env/all/format", "reward/format"),
        ("optim/entropy", "entropy/mean"),
        ("kl_sample_train_v1", "shift/kl_old"),
        ("by_group/frac_all_bad", "groups/all_wrong"),
        ("test/env/all/reward/total", "eval/reward"),
        ("rollout/raw_reward", "reward/total"),
        ("train/entropy_loss", "entropy/mean"),
        ("train/kl_loss", "kl/ref"),
        ("train/pg_clipfrac", "clip/fraction"),
        ("rollout/response_len", "length/mean"),
        ("eval/aime24", "eval/aime24"),
        # ours
        ("shift/ratio_q99", "shift/ratio_q99"),
        ("reward/total", "reward/total"),
        ("eval/accuracy", "eval/accuracy"),
    ],
)
def test_name_is_translated(theirs, ours):
    assert translate(theirs)[0] == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("reward/overall", "reward/total"),
        ("reward/avg_raw_reward", "reward/total"),
        ("Average Reward", "reward/total"),
        ("objective/scores", "reward/total"),
        ("within_group_std", "reward/std"),
        ("policy/policy_entropy", "entropy/mean"),
        ("mean_token_entropy", "entropy/mean"),
        ("actor/ref_kl", "kl/ref"),
        ("kl_div", "kl/ref"),
        ("policy/policy_kl", "kl/ref"),
        ("ppo/policy/approxkl", "shift/kl_old"),
        ("policy/ppo_clip_ratio", "clip/fraction"),
        ("actor/pg_clipfrac_higher", "clip/high"),
        ("generate/avg_num_tokens", "length/mean"),
        ("resp_len", "length/mean"),
        ("seq_len/mean", "length/mean"),
        ("is_truncated/mean", "length/truncated"),
        ("response_clip_ratio", "length/truncated"),
        ("zero_variance_frac", "groups/flat"),
        ("pct_zero_std", "groups/flat"),
        ("policy/raw_grad_norm", "optim/grad_norm"),
        ("train/pass@1", "reward/accuracy"),
        ("gsm8k_test", "eval/gsm8k"),
        ("MATH-500", "eval/math-500"),
        ("bench/aime24", "eval/aime24"),
        ("holdout/acc", "eval/acc"),
        ("env/all/correct", "reward/accuracy"),
    ],
)
def test_a_spelling_no_table_lists_is_read_by_its_words(theirs, ours):
    assert translate(theirs)[0] == ours


@pytest.mark.parametrize(
    "name",
    [
        "entropy_coef", "kl_target", "mismatch_kl/mean", "rollout_train_kl", "clip_eps", "prompt_len", "max_tokens",
        "tokens", "layer_3/grad_norm", "std", "value_loss", "grad_norm_clip",
    ],
)  # fmt: skip
def test_a_name_with_one_word_more_is_not_taken_for_the_metric(name):
    found = translate(name)
    assert found is None or found[0] == ""


def test_a_spelling_of_the_table_wins_over_one_read_by_its_words():
    row = {"mean_token_entropy": 0.4, "entropy": 0.5}
    assert translate_row(row) == translate_row(dict(reversed(row.items()))) == {"entropy/mean": 0.5}


@pytest.mark.parametrize("name", ["eval/stop_rate", "val/sequence_lengths", "val/solve_none", "eval_advantages"])
def test_numbers_of_an_evaluation_that_are_no_scores(name):
    assert not is_score(translate(name)[0])


def test_every_metric_of_ours_is_itself():
    other = {name: found[0] for name in METRICS if (found := translate(name))[0] not in (name, "")}
    assert other == {"loss/policy": "loss/total"}


def test_kl_to_the_sampling_policy_is_not_kl_to_the_reference():
    for name in ("actor/ppo_kl", "train/ppo_kl", "ppo_kl"):
        assert translate(name)[0] == "shift/kl_old"


def test_batch_spread_of_a_part_is_not_the_spread_of_groups():
    assert translate("rewards/accuracy_reward/std")[0] == ""
    assert translate_row({"rewards/x/std": 5.1, "reward_std": 0.0}) == {"rewards/x/std": 5.1, "reward/std": 0.0}


def test_best_of_several_tries_is_no_score():
    assert translate("val-core/aime/acc/best@32/mean")[0] == ""


def test_of_two_spellings_the_first_of_the_table_wins_whatever_the_order():
    row = {"critic/rewards/mean": 0.4, "critic/score/mean": 0.5}
    assert translate_row(row) == translate_row(dict(reversed(row.items()))) == {"reward/total": 0.5}


def test_unknown_names_are_listed_and_kept_but_steps_are_not_unknown():
    assert unknown(["step", "reward", "entropy_mb0", "epoch", "train/global_step", "Rollout Step"]) == ["entropy_mb0"]
    assert translate_row({"entropy_mb0": 0.2}) == {"entropy_mb0": 0.2}


def test_the_two_clip_sides_make_the_fraction():
    assert translate_row({"clip_ratio/low_mean": 0.1, "clip_ratio/high_mean": 0.2})["clip/fraction"] == pytest.approx(
        0.3
    )
