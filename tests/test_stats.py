"""Statistics of few seeds: numbers worked by hand, and what must be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from make_results import make_results
from scipy import stats as scipy_stats

from analysis import load, stats
from analysis.compare import FINISHED, LAST_SCORE, compare, compare_problems
from analysis.stats import Reached
from analysis.verdict import enough_digits, number, verdict


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_t_interval_of_three_values_by_hand():
    # mean 2, sd 1, t(2, 97.5 %) = 4.3027: 2 +- 4.3027 / sqrt 3 = 2 +- 2.4842
    got = stats.mean_interval([1.0, 2.0, 3.0])
    assert got.value == 2.0 and got.n == 3
    assert (got.interval.low, got.interval.high) == pytest.approx((-0.48414, 4.48414), abs=1e-4)


def test_one_value_or_equal_values_have_no_interval():
    assert stats.mean_interval([0.7]) == stats.Estimate(0.7, 1)
    assert stats.mean_interval([0.7, 0.7, 0.7]).interval is None
    assert stats.mean_interval([0.1 + 0.2, 0.3]).interval is None, "a rounding error is no spread"
    assert math.isnan(stats.mean_interval([math.nan]).value) and stats.mean_interval([]).n == 0


def test_paired_difference_agrees_with_scipy(rng):
    a, b = [0.69, 0.73, 0.76, 0.09], [0.79, 0.75, 0.77, 0.78]
    got = stats.paired_difference(b, a, rng)
    ref = scipy_stats.ttest_rel(b, a)
    assert got.t_p == pytest.approx(ref.pvalue)
    low, high = ref.confidence_interval(0.95)
    assert (got.t.low, got.t.high) == pytest.approx((low, high))
    assert got.n == 4 and got.mean == pytest.approx(np.mean(np.subtract(b, a)))


def test_pairing_takes_out_what_the_seeds_share(rng):
    luck = np.array([0.0, 0.3, -0.2, 0.1, 0.25])
    paired = stats.paired_difference(0.5 + luck + [0.05, 0.06, 0.05, 0.04, 0.05], 0.5 + luck, rng)
    assert paired.t.excludes(0.0) and paired.t.high - paired.t.low < 0.02


def test_a_pair_with_a_missing_value_is_dropped_and_counted(rng):
    got = stats.paired_difference([1.0, math.nan, 3.0, math.inf], [0.5, 1.0, 2.0, 1.0], rng)
    assert (got.n, got.dropped, got.differences) == (2, 2, (0.5, 1.0))


def test_one_pair_gives_a_difference_and_nothing_else(rng):
    got = stats.paired_difference([0.8], [0.7], rng)
    assert got.mean == pytest.approx(0.1) and got.t is None and got.bootstrap is None
    assert math.isnan(got.t_p) and math.isnan(got.sign_flip_p)


def test_equal_differences_have_no_interval_however_many(rng):
    got = stats.paired_difference([0.6, 0.7, 0.8], [0.5, 0.6, 0.7], rng)
    assert got.t is None and got.bootstrap is None and got.mean == pytest.approx(0.1)


def test_unequal_lists_are_refused(rng):
    with pytest.raises(ValueError, match="equally long"):
        stats.paired_difference([1.0, 2.0], [1.0], rng)


def test_the_generator_decides_the_bootstrap_and_nothing_else_does():
    a, b = np.random.default_rng(9).normal(size=(2, 12))
    first, again, other = (stats.paired_difference(a, b, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.bootstrap == again.bootstrap != other.bootstrap
    assert first.t == other.t


def test_bootstrap_of_a_large_sample_agrees_with_the_normal_interval(rng):
    x = np.random.default_rng(3).normal(5.0, 2.0, size=400)
    got = stats.bootstrap_mean(x, rng)
    half = 1.96 * x.std(ddof=1) / 20
    assert (got.low, got.high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.03)


def test_sign_flip_with_three_seeds_cannot_fall_below_a_quarter():
    # of the 8 patterns only +++ and --- reach |0.6|: 2/8
    assert stats.sign_flip_test([0.1, 0.2, 0.3]) == 0.25
    # |sum| 0.2 of 0.2, 0.1, -0.1: patterns with |sum| >= 0.2 are all but +-(0.2, -0.1, -0.1): 6/8
    assert stats.sign_flip_test([0.2, 0.1, -0.1]) == 0.75
    assert stats.sign_flip_test([0.1] * 6) == 2 / 64
    assert stats.sign_flip_test([0.0, 0.0]) == 1.0


def test_sign_flip_of_many_seeds_is_sampled_and_close_to_exact(rng):
    x = np.random.default_rng(5).normal(0.4, 1.0, size=16)
    exact = stats.sign_flip_test(x)
    more = np.concatenate([x, np.zeros(4)])  # zeros change no pattern's sum
    assert stats.sign_flip_test(more, rng) == pytest.approx(exact, abs=0.01)
    with pytest.raises(ValueError, match="give a Generator"):
        stats.sign_flip_test(more)


def test_holm_by_hand():
    # sorted .01 .03 .04: 3*.01, 2*.03, 1*.04 -> .03, .06, max(.06, .04)
    assert stats.holm({"a": 0.04, "b": 0.01, "c": 0.03}) == {"a": 0.06, "b": 0.03, "c": 0.06}


def test_holm_does_not_count_what_was_not_tested():
    got = stats.holm({"a": 0.03, "b": math.nan})
    assert got["a"] == 0.03 and math.isnan(got["b"])
    assert stats.holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(("k", "n"), [(0, 3), (1, 4), (3, 3), (20, 100)])
def test_wilson_agrees_with_scipy(k, n):
    got = stats.wilson(k, n)
    ref = scipy_stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert (got.interval.low, got.interval.high) == pytest.approx((ref.low, ref.high), abs=1e-12)


def test_no_runs_have_no_failure_rate():
    got = stats.wilson(0, 0)
    assert math.isnan(got.value) and got.interval is None
    with pytest.raises(ValueError, match="no rate"):
        stats.wilson(4, 3)


def test_seeds_needed_is_the_smallest_number_that_does_it():
    got = stats.seeds_needed(0.05, 0.02, n=5)

    def half(n):
        return scipy_stats.t.ppf(0.975, n - 1) * 0.05 / math.sqrt(n)

    assert half(got.seeds) <= 0.02 < half(got.seeds - 1)
    assert got.cautious > got.seeds
    assert stats.seeds_needed(0.05, 10.0, n=5).seeds == 2
    assert stats.seeds_needed(0.05, 0.02, n=1) is None and stats.seeds_needed(0.0, 0.02, n=3) is None


def test_iqm_leaves_out_a_quarter_at_each_end():
    assert stats.iqm([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 100.0]]) == 3.5
    assert stats.iqm([0.005, 0.0, 0.89]) == pytest.approx(0.89500 / 3)  # three are too few to trim
    assert math.isnan(stats.iqm([math.nan]))


def test_probability_of_improvement_counts_ties_half():
    assert stats.probability_of_improvement([1.0, 2.0], [1.0, 0.0]) == 0.875  # of 4 pairs 3 wins, 1 tie
    two_tasks = stats.probability_of_improvement([[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0]])
    assert two_tasks == 0.5
    with pytest.raises(ValueError, match="cannot be compared"):
        stats.probability_of_improvement([[1.0, 2.0]], [[1.0]])


def test_stratified_bootstrap_keeps_tasks_apart(rng):
    tasks = np.array([[0.0, 10.0], [0.1, 10.1], [0.2, 10.2]])
    got = stats.stratified_bootstrap("iqm", [tasks], rng, resamples=300)
    assert got.interval.low >= 5.0 and got.interval.high <= 5.2, "mixing tasks would reach 0 and 10"
    same = [stats.stratified_bootstrap("iqm", [tasks], np.random.default_rng(s), resamples=50) for s in (1, 1, 2)]
    assert same[0] == same[1] != same[2]
    better = stats.stratified_bootstrap("improvement", [tasks + 1, tasks], rng, resamples=200)
    assert better.value == 1.0 and better.interval.low == 1.0
    assert stats.stratified_bootstrap("iqm", [tasks[:1]], rng).interval is None


def test_problem_bootstrap_is_narrower_when_both_arms_fail_the_same_problems(rng):
    base = np.random.default_rng(1).integers(0, 5, size=200)
    alike = stats.problem_difference(np.minimum(base + 1, 4), base, 4, rng)
    shuffled = stats.problem_difference(np.random.default_rng(2).permutation(np.minimum(base + 1, 4)), base, 4, rng)
    assert alike.mean == pytest.approx(shuffled.mean)
    widths = [got.problems.high - got.problems.low for got in (alike, shuffled)]
    assert widths[0] < widths[1] / 2
    assert alike.both is None and alike.num_seeds == 1


def test_problem_bootstrap_agrees_with_the_normal_interval(rng):
    gap = np.random.default_rng(4).integers(-1, 3, size=(3, 500))
    got = stats.problem_difference(gap, np.zeros_like(gap), 4, rng)
    per_problem = gap.mean(axis=0) / 4
    half = 1.96 * per_problem.std(ddof=1) / math.sqrt(500)
    assert (got.problems.low, got.problems.high) == pytest.approx((got.mean - half, got.mean + half), abs=0.004)
    assert got.both.high - got.both.low >= got.problems.high - got.problems.low
    with pytest.raises(ValueError, match="not the same problems"):
        stats.problem_difference([[1, 2]], [[1, 2, 3]], 4, rng)


def test_mcnemar_looks_only_at_problems_one_arm_solves():
    a = np.array([1] * 9 + [0] * 1 + [1] * 50 + [0] * 40, bool)
    b = np.array([0] * 9 + [1] * 1 + [1] * 50 + [0] * 40, bool)
    got = stats.mcnemar(a, b)
    assert (got.only_a, got.only_b) == (9, 1)
    assert got.p == pytest.approx(scipy_stats.binomtest(1, 10).pvalue)
    assert stats.mcnemar(a, a).p == 1.0


def test_area_under_curve_is_the_mean_height():
    assert stats.area_under_curve([0, 10], [0.0, 1.0], 0, 10) == 0.5
    assert stats.area_under_curve([0, 5, 10], [0.2, math.nan, 0.4], 0, 10) == pytest.approx(0.3)
    assert stats.area_under_curve([0, 10, 20], [0.0, 1.0, 1.0], 5, 15) == pytest.approx(0.875)


def test_a_stopped_curve_has_no_area_unless_its_last_score_is_carried_on():
    assert math.isnan(stats.area_under_curve([0, 10], [0.4, 0.4], 0, 20))
    assert stats.area_under_curve([0, 10], [0.0, 0.4], 0, 20, carry=True) == pytest.approx(0.3)
    assert math.isnan(stats.area_under_curve([5, 20], [0.4, 0.4], 0, 20, carry=True))


def test_steps_to_target_waits_for_the_wanted_number_of_readings():
    steps, values = [0, 5, 10, 15, 20], [0.1, 0.72, 0.6, 0.71, 0.8]
    assert stats.steps_to_target(steps, values, 0.7) == Reached(5.0, True)
    assert stats.steps_to_target(steps, values, 0.7, hold=2) == Reached(15.0, True)
    assert stats.steps_to_target(steps, values, 0.9) == Reached(20.0, False)
    assert stats.steps_to_target([], [], 0.9) == Reached(0.0, False)


def test_kaplan_meier_by_hand():
    # at risk 4 at step 10 (1 hit): 3/4; one leaves at 15; at risk 2 at 20 (1 hit): 3/8
    runs = [Reached(10, True), Reached(15, False), Reached(20, True), Reached(30, False)]
    times, share = stats.kaplan_meier(runs)
    assert list(times) == [10, 20] and list(share) == pytest.approx([0.75, 0.375])
    assert stats.median_steps(runs) == 20
    assert stats.restricted_mean(runs, 30) == pytest.approx(10 + 0.75 * 10 + 0.375 * 10)
    assert stats.median_steps([Reached(30, False)] * 3) == math.inf


def test_ratio_of_steps_is_paired_and_exact_without_censoring():
    a = [Reached(10, True), Reached(20, True), Reached(25, True)]
    b = [Reached(20, True), Reached(40, True), Reached(45, True)]
    got = stats.steps_ratio(a, b)
    assert got.ratio == pytest.approx((0.5 * 0.5 * 25 / 45) ** (1 / 3)) and got.bound == ""
    assert got.interval.low < got.ratio < got.interval.high < 1


def test_a_run_that_never_got_there_makes_the_ratio_a_bound_without_interval():
    a, b = [Reached(10, True), Reached(20, True)], [Reached(30, True), Reached(50, False)]
    got = stats.steps_ratio(a, b)
    assert got.interval is None and got.bound == "at most" and (got.censored_a, got.censored_b) == (0, 1)
    assert got.ratio == pytest.approx(15 / 40)  # b: all until 30, half of them until 50
    assert stats.steps_ratio(b, a).bound == "at least"
    assert math.isnan(stats.steps_ratio([], []).ratio)


def test_the_verdict_has_the_promised_form(tmp_path, rng):
    results = load(make_results(tmp_path / "demo", steps=100))
    (sentence,) = verdict(results, compare(results, rng))
    assert "keeps 0.05 nats more entropy" in sentence and "(95 % 0.0" in sentence and "3 seeds)" in sentence
    assert sentence.startswith("clip-higher ")


def test_what_is_not_distinguishable_is_called_so(tmp_path, rng):
    twins = {"symmetric": {}, "other": {"loss.high": 0.21}}
    results = load(make_results(tmp_path / "demo", arms=twins))
    assert verdict(results, compare(results, rng)) == [
        "other against symmetric: accuracy identical in all 3 seeds; entropy and length not "
        "distinguishable with 3 seeds."
    ]


def test_one_seed_gets_no_interval_and_no_verdict(tmp_path, rng):
    results = load(make_results(tmp_path / "demo", seeds=[4]))
    comparisons = compare(results, rng)
    assert all(each.paired.t is None and not each.distinguishable for each in comparisons)
    (sentence,) = verdict(results, comparisons)
    assert "one seed (4)" in sentence and sentence.endswith("One seed gives no interval and no verdict.")
    assert "%" not in sentence


def test_both_readings_of_a_stopped_run(tmp_path, rng):
    results = load(make_results(tmp_path / "demo", faults={("symmetric", 1): "stopped"}))
    accuracy = {c.reading: c for c in compare(results, rng) if c.measure.column == "final_accuracy"}
    assert accuracy[LAST_SCORE].seeds == (0, 1, 2) and accuracy[FINISHED].seeds == (0, 2)
    stopped = results.runs[results.runs["outcome"] == "stopped"].iloc[0]
    assert accuracy[LAST_SCORE].baseline_values[1] == stopped["final_accuracy"]
    assert any("1 of 3 symmetric (A05)" in text for text in verdict(results, compare(results, rng)))


def test_lost_and_unfinished_runs_speak_neither_for_nor_against_their_arm(tmp_path, rng):
    faults = {("symmetric", 0): "lost", ("clip_higher", 1): "unfinished"}
    results = load(make_results(tmp_path / "demo", faults=faults))
    comparisons = compare(results, rng)
    assert {c.seeds for c in comparisons} == {(2,)}
    assert any("2 of 6 runs have no result" in text for text in verdict(results, comparisons))


def test_arms_without_a_common_seed_are_not_compared(tmp_path, rng):
    skip = [("symmetric", 1), ("clip_higher", 0)]
    results = load(make_results(tmp_path / "demo", seeds=[0, 1], skip=skip))
    assert verdict(results, compare(results, rng)) == [
        "clip-higher and symmetric share no seed with a result: they cannot be compared."
    ]


def test_a_missing_metric_leaves_the_other_answers_standing(tmp_path, rng):
    faults = {("clip_higher", seed): "no_entropy" for seed in range(3)}
    results = load(make_results(tmp_path / "demo", faults=faults))
    (sentence,) = verdict(results, compare(results, rng))
    assert "entropy not recorded in both arms" in sentence and "accuracy" in sentence


def test_holm_can_take_a_small_difference_back(tmp_path, rng):
    arms = {"base": {}, **{f"arm{i}": {"loss.high": 0.2 + i / 100} for i in range(1, 6)}}
    results = load(make_results(tmp_path / "demo", arms=arms))
    for each in compare(results, rng):
        if each.distinguishable:
            assert each.holm_p < 0.05
        if math.isfinite(each.paired.t_p):
            assert each.holm_p >= each.paired.t_p


def test_arms_are_compared_problem_by_problem_on_the_same_held_out_set(tmp_path, rng):
    results = load(make_results(tmp_path / "demo", arms=["summed", "gdpo"], problems=200))
    (got,) = compare_problems(results, rng)
    assert got.seeds == (0, 1, 2) and got.difference.num_problems == 200
    accuracy = results.runs.groupby("arm")["final_accuracy"].mean()
    assert got.difference.mean == pytest.approx(accuracy["gdpo"] - accuracy["summed"])
    assert got.difference.problems.excludes(0.0) and len(got.tests) == 3


def test_different_held_out_sets_are_refused(tmp_path, rng):
    arms = {"symmetric": {}, "fewer": {"eval.problems": 20}}
    results = load(make_results(tmp_path / "demo", arms=arms))
    (got,) = compare_problems(results, rng)
    assert got.difference is None and got.skipped == "the held-out sets differ"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.0512, 2, "0.05"), (-0.001, 2, "0.00"), (-0.5, 1, "-0.5"), (math.nan, 2, "n/a"), (math.inf, 2, "n/a")],
)
def test_numbers_as_printed(value, digits, text):
    assert number(value, digits) == text


def test_digits_are_added_where_a_number_would_read_as_zero():
    assert enough_digits([0.05, 0.003], 2) == 3 and enough_digits([0.05, 0.0], 2) == 2
