"""Figures: right numbers, the same bytes twice, honest about what is missing, no marks outside their paper."""

from __future__ import annotations

import io
import math
import re
import threading

import numpy as np
import pandas as pd
import pytest
from make_results import FAULTS, make_results
from make_search import make_search
from matplotlib import pyplot
from PIL import Image

from analysis import load
from analysis.examples import compare_two_arms as example
from analysis.figures import FIGURES
from analysis.figures.common import mean_over_seeds, spread
from analysis.figures.ladder import rungs
from analysis.figures.objective import objective
from analysis.figures.trials import axes_of, importances, trial_table
from analysis.style import FORMATS, PALETTE, WIDTHS, arm_styles, render, save
from reasonrl.errors import AnalysisError

NAIVE = {"overlong.kind": "none", "loss.high": 0.2, "loss.aggregation": "sequence_mean", "data.kind": "plain"}
FILTER, CLIP = {"overlong.kind": "filter"}, {"loss.high": 0.28}
TOKEN, DYNAMIC = {"loss.aggregation": "token_mean"}, {"data.kind": "dynamic_sampling"}
LADDER = {
    "naive": NAIVE,
    "plus_filter": NAIVE | FILTER,
    "plus_clip": NAIVE | FILTER | CLIP,
    "plus_token": NAIVE | FILTER | CLIP | TOKEN,
    "dapo": NAIVE | FILTER | CLIP | TOKEN | DYNAMIC,
    "without_clip": NAIVE | FILTER | TOKEN | DYNAMIC,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "clip_demo"
    return load(make_results(folder, arms=("symmetric", "clip_higher", "wide"), faults={("symmetric", 1): "stopped"}))


@pytest.fixture(scope="module")
def drawn(results):
    return FIGURES["accuracy_entropy"].draw(results)


def texts(figure):
    found = [text.get_text().replace("\n", " ") for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return "\n".join(found)


# --- numbers -----------------------------------------------------------------------------------------------------


def test_band_is_the_t_interval_of_the_mean_over_seeds():
    points = pd.DataFrame({"arm": "a", "step": 1, "y": [0.2, 0.4, 0.6]})
    row = mean_over_seeds(points, "step", "y").iloc[0]
    # sd 0.2, t(0.975, 2) = 4.302653: half width 4.302653 * 0.2 / sqrt(3) = 0.496828
    assert row["mean"] == pytest.approx(0.4)
    assert row["high"] - row["mean"] == pytest.approx(0.496828, abs=1e-6)
    assert row["n"] == 3


def test_one_seed_and_equal_seeds_have_no_interval():
    points = pd.DataFrame({"arm": ["a", "b", "b"], "step": 1, "y": [0.2, 0.5, 0.5]})
    table = mean_over_seeds(points, "step", "y")
    assert table["low"].isna().all() and table["high"].isna().all()


def test_values_that_are_not_finite_do_not_count_in_the_mean():
    points = pd.DataFrame({"arm": "a", "step": 1, "y": [0.2, 0.4, math.nan, math.inf]})
    row = mean_over_seeds(points, "step", "y").iloc[0]
    assert (row["mean"], row["n"]) == (pytest.approx(0.3), 2)


def test_plotted_means_are_those_of_the_recorded_runs(results, drawn):
    _, numbers = drawn
    evals = results.evals[(results.evals["arm"] == "clip_higher") & (results.evals["step"] == 10)]
    row = numbers.query("kind == 'mean' and arm == 'clip_higher' and metric == 'eval/accuracy' and step == 10")
    assert row["value"].item() == pytest.approx(evals["eval/accuracy"].mean())
    assert row["gradient_step"].item() == 160
    assert row["low"].item() < row["value"].item() < row["high"].item()


def test_stopped_run_is_marked_at_its_last_step_with_its_code(drawn):
    figure, numbers = drawn
    stops = numbers[numbers["kind"] == "stop"]
    assert list(stops["code"]) == ["A05", "A05"] and set(stops["step"]) == {10}
    assert "A05" in texts(figure)


def test_the_code_of_a_stop_stands_inside_the_panel_and_off_the_line_of_its_arm(tmp_path):
    faults = {("symmetric", 1): "stopped", ("wide", 2): "failed"}
    made = load(make_results(tmp_path / "r", arms=("symmetric", "clip_higher", "wide"), faults=faults))
    figure, _ = FIGURES["accuracy_entropy"].draw(made)
    for ax in figure.axes[:2]:
        words = [text for text in ax.texts if text.get_text() in ("A05", "non-finite")]
        assert len(words) == 2
        for text in words:
            box = text.get_window_extent()
            assert ax.get_window_extent().padded(1).count_contains([box.min, box.max]) == 2
            for line in (
                line for line in ax.lines if str(line.get_gid()).startswith("arm:") and line.get_alpha() is None
            ):
                path = ax.transData.transform(line.get_xydata())
                across = np.linspace(path[0, 0], path[-1, 0], 500)
                assert box.count_contains(np.stack([across, np.interp(across, *path.T)], axis=1)) == 0


def test_a_logarithmic_height_of_one_decade_is_named_in_plain_numbers(results):
    figure, _ = FIGURES["clip_fraction"].draw(results)
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert {"0.001", "0.002"} <= set(ticks) and not any("times" in text for text in ticks)


def test_after_a_stop_the_mean_of_the_survivors_is_drawn_apart(drawn):
    figure, _ = drawn
    lines = [line for line in figure.axes[1].lines if line.get_gid() == "arm:symmetric"]
    assert [line.get_alpha() for line in lines] == [None, 0.55]
    assert max(lines[0].get_xdata()) == 10 == min(lines[1].get_xdata())


def test_both_step_units_are_on_the_axes(drawn):
    figure, _ = drawn
    said = texts(figure)
    assert "Rollout step" in said and "Gradient step (16 per rollout step)" in said


def test_runs_that_differ_in_updates_per_step_get_no_second_axis(tmp_path):
    arms = {"few": {"optim.inner_epochs": 1}, "many": {"optim.inner_epochs": 4}}
    figure, numbers = FIGURES["accuracy_entropy"].draw(load(make_results(tmp_path / "r", arms=arms)))
    assert "Gradient step (" not in texts(figure)
    assert "gradient steps per rollout step differ" in texts(figure)
    late = numbers[(numbers["kind"] == "mean") & (numbers["step"] == 20)]
    assert set(late["gradient_step"]) == {80, 320}


def test_forks_of_stopped_runs_are_no_data_of_their_arm(results):
    forked = load(results.path)
    child = forked.runs.index[forked.runs["arm"] == "wide"][0]
    key = forked.runs.at[child, "key"]
    forked.runs.loc[child, "parent"] = forked.runs.at[0, "key"]
    _, numbers = FIGURES["accuracy_entropy"].draw(forked)
    seeds = numbers[(numbers["kind"] == "seed") & (numbers["arm"] == "wide")]["seed"].unique()
    assert key not in seeds and len(seeds) == 2


def test_clip_objective_takes_the_minimum_for_both_signs():
    ratio = np.array([0.7, 1.3, 1.5])
    assert objective(ratio, 1.0, 0.2, 0.28) == pytest.approx([0.7, 1.28, 1.28])
    assert objective(ratio, -1.0, 0.2, 0.2) == pytest.approx([-0.8, -1.3, -1.5])


def test_reach_of_rare_and_common_token_follows_the_upper_bound(results):
    _, numbers = FIGURES["clip_objective"].draw(results)
    reach = numbers[numbers["kind"] == "reach"].set_index(["setting", "old"])["value"]
    assert reach["0.2/0.2", 0.01] == pytest.approx(0.012) and reach["0.2/0.2", 0.6] == pytest.approx(0.72)
    assert reach["0.2/0.28", 0.01] == pytest.approx(0.0128) and reach["0.1/0.3", 0.6] == pytest.approx(0.78)


def test_dynamic_sampling_compares_the_way_to_the_target_in_steps_and_in_tokens(tmp_path):
    made = load(make_results(tmp_path / "r", arms=("plain", "dynamic_sampling"), seeds=range(4)))
    figure, numbers = FIGURES["dynamic_sampling"].draw(made, target=0.5)
    ratio = numbers[numbers["kind"] == "ratio"].reset_index(drop=True)
    assert list(ratio["code"]) == ["steps to target", "tokens to target"]
    # Two rounds per step: the same step costs twice the tokens, so the ratio in tokens is about twice that in steps.
    assert ratio["value"][1] == pytest.approx(2 * ratio["value"][0], rel=0.15)
    assert "Tokens to 0.500" in texts(figure)


def test_target_that_no_run_reaches_gives_no_interval_and_no_ratio_to_read(tmp_path):
    made = load(make_results(tmp_path / "r", arms=("plain", "dynamic_sampling")))
    figure, numbers = FIGURES["dynamic_sampling"].draw(made, target=0.999)
    ratio = numbers[numbers["kind"] == "ratio"]
    assert ratio["low"].isna().all() and ratio["high"].isna().all()
    assert set(numbers[numbers["kind"] == "target"]["code"]) == {"not reached"}
    assert "dynamic-sampling: unclear (6 of 6 runs not there in time)" in texts(figure) and "×" not in texts(figure)


def test_zeros_on_a_logarithmic_axis_are_counted_not_dropped_silently(tmp_path):
    made = load(make_results(tmp_path / "r", arms=("grpo", "gspo")))
    made.rows.loc[made.rows["step"] == 3, "clip/fraction"] = 0.0
    figure, _ = FIGURES["clip_fraction"].draw(made)
    assert "6 values of 0 not shown" in texts(figure)


def test_ladder_finds_its_rungs_in_the_configuration_and_not_in_names(tmp_path):
    made = load(make_results(tmp_path / "r", arms=dict(zip("abcdef", LADDER.values(), strict=True))))
    up, down, whole = rungs(made)
    assert [arm for arm, _ in up] == ["a", "b", "c", "d", "e"] and whole == "e"
    assert dict(down) == {"f": "− clip-higher", "d": "− dynamic sampling"}
    _, numbers = FIGURES["dapo_ladder"].draw(made)
    assert list(numbers[numbers["kind"] == "published"]["value"]) == [30, 36, 38, 41, 42, 50]


def test_dashboard_shows_the_stopped_run_with_its_alert_windows(results):
    figure, numbers = FIGURES["dashboard"].draw(results)
    assert "symmetric seed 1: stopped at step 10 by A05" in texts(figure)
    alerts = numbers[numbers["kind"] == "alert"].set_index("code")
    assert (alerts.at["A05", "window_start"], alerts.at["A05", "window_end"]) == (1, 10)
    assert "Rollout step (= 16 gradient steps)" in texts(figure)


def test_dashboard_of_an_unknown_run_names_those_there_are(results):
    with pytest.raises(AnalysisError, match="no such run.*symmetric-s0"):
        FIGURES["dashboard"].draw(results, run="nonsense")


def test_stop_map_counts_the_steps_that_stops_saved(results):
    figure, numbers = FIGURES["stop_map"].draw(results)
    runs = numbers[numbers["kind"] == "run"]
    assert len(runs) == 9 and runs["saved"].sum() == 10
    assert "A05 flat groups, 10 steps saved" in texts(figure)


def test_entropy_prediction_reports_the_rank_correlation(results):
    _, numbers = FIGURES["entropy_prediction"].draw(results)
    steps = numbers[(numbers["kind"] == "step") & (numbers["arm"] == "wide")]
    expected = steps["predicted"].rank().corr(steps["measured"].rank())
    rho = numbers[(numbers["kind"] == "correlation") & (numbers["arm"] == "wide")]
    assert rho["value"].item() == pytest.approx(expected) and rho["n"].item() == 60


# --- searches ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    return load(make_search(tmp_path_factory.mktemp("search") / "lr"))


def test_importance_leaves_out_stopped_configurations_and_says_how_many(searched):
    table = trial_table(searched)
    stopped = int((table["state"] == "stopped").sum())
    assert stopped >= 2
    found = importances(table, axes_of(searched), higher=True)
    assert found.left_out == stopped and found.used == len(table) - stopped
    figure, _ = FIGURES["search"].draw(searched)
    assert f"{found.used} used, {stopped} stopped or open" in texts(figure)


def test_importance_finds_the_one_key_that_matters(searched):
    found = importances(trial_table(searched), axes_of(searched), higher=True)
    assert found.value["optim.lr"] > found.chance["optim.lr"]
    assert all(found.value[key] < found.chance[key] for key in ("loss.high", "advantage.kind"))


def test_too_few_configurations_get_no_importance(tmp_path):
    made = load(make_search(tmp_path / "few", configurations=5, seeds=1))
    assert importances(trial_table(made), axes_of(made), higher=True) is None
    figure, _ = FIGURES["search"].draw(made)
    assert "are needed" in texts(figure)


def test_best_value_at_the_edge_of_its_range_is_marked(tmp_path):
    made = load(make_search(tmp_path / "edge", configurations=10, seeds=1, peak=1e-7))
    figure, numbers = FIGURES["search"].draw(made)
    edges = numbers[numbers["kind"] == "edge"].set_index("key")
    assert edges.at["optim.lr", "edge"] == "lower" and edges.at["optim.lr", "code"] == "A18"
    assert "best at the edge" in texts(figure)


def test_key_that_another_one_switches_off_is_missing_and_not_its_default(searched, tmp_path):
    made = load(make_search(tmp_path / "s", configurations=4, seeds=1))
    made.plan["runs"][0]["params"] = {"optim.lr": 1e-5, "advantage.kind": "grpo"}
    row = trial_table(made).iloc[0]
    assert row["loss.high"] is None and row["optim.lr"] == 1e-5


# --- missing and damaged input -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mixed", "no_entropy", "one_seed", "no_runs"])
def damaged(request, tmp_path_factory):
    """Folders in which every run has the same fault, or ("mixed") each seed another one."""
    folder, arms, fault = tmp_path_factory.mktemp("damaged") / "r", ("symmetric", "clip_higher"), request.param
    if fault == "no_runs":
        folder.mkdir()
    elif fault == "one_seed":
        make_results(folder, arms=arms, seeds=[0])
    elif fault == "mixed":
        seeds = range(len(FAULTS))
        make_results(folder, arms=arms, seeds=seeds, faults={(arm, i): FAULTS[i] for arm in arms for i in seeds})
    else:
        make_results(folder, arms=arms, seeds=[0, 1], faults={(arm, seed): fault for arm in arms for seed in (0, 1)})
    return load(folder)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_survives_damaged_results(name, damaged):
    figure, numbers = FIGURES[name].draw(damaged, "single")
    figure.draw_without_rendering()
    if "low" in numbers and damaged.runs["seed"].nunique() < 2:
        assert numbers["low"].isna().all()


def test_missing_metric_is_named_in_its_panel(tmp_path):
    faults = {(arm, seed): "no_entropy" for arm in ("symmetric", "clip_higher") for seed in range(3)}
    figure, numbers = FIGURES["accuracy_entropy"].draw(load(make_results(tmp_path / "r", faults=faults)))
    assert "entropy/mean was not recorded." in texts(figure)
    assert set(numbers["metric"]) == {"eval/accuracy"}


def test_panel_says_how_many_values_were_not_finite_and_that_seeds_differ(tmp_path):
    made = make_results(tmp_path / "r", faults={("symmetric", 0): "nan"}, skip=[("clip_higher", 2)])
    figure, _ = FIGURES["accuracy_entropy"].draw(load(made))
    said = texts(figure)
    assert "2 values missing or not finite" in said and "1 value missing or not finite" in said
    assert "seeds: symmetric 3, clip-higher 2" in said


def test_one_seed_is_said_on_the_panel(tmp_path):
    figure, _ = FIGURES["accuracy_entropy"].draw(load(make_results(tmp_path / "r", seeds=[0])))
    assert "one seed: no interval" in texts(figure)
    assert not [band for ax in figure.axes for band in ax.collections]


# --- look --------------------------------------------------------------------------------------------------------


def test_the_same_runs_give_the_same_bytes(results, drawn):
    again, numbers = FIGURES["accuracy_entropy"].draw(load(results.path))
    assert all(render(again, format) == render(drawn[0], format) for format in FORMATS)
    assert numbers.equals(drawn[1])


def test_files_hold_no_date_and_no_program_name(drawn, tmp_path):
    figure, _ = drawn
    for path in save(figure, tmp_path / "f"):
        assert not re.search(rb"CreationDate|dc:date|matplotlib\.org|Software", path.read_bytes())


@pytest.mark.parametrize("size", WIDTHS)
def test_figure_has_the_width_of_its_column(results, size):
    figure, _ = FIGURES["accuracy_entropy"].draw(results, size)
    assert Image.open(io.BytesIO(render(figure, "png"))).width == round(WIDTHS[size] * 200)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_at_the_edge_of_a_narrow_figure(results, searched, tmp_path, name):
    made = searched if name == "search" else results
    if name == "dapo_ladder":
        made = load(make_results(tmp_path / "r", arms=LADDER))
    figure, _ = FIGURES[name].draw(made, "single")
    pixels = np.asarray(Image.open(io.BytesIO(render(figure, "png"))).convert("L"))
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert edge.min() == 255  # a word that is cut leaves its stump in the outermost pixels


def test_text_stays_text_in_svg_and_pdf(drawn):
    figure, _ = drawn
    assert b"Held-out accuracy" in render(figure, "svg")
    assert b"/FontFile2" in render(figure, "pdf")  # embedded TrueType, not outlines (Type 3)


def test_arms_differ_in_dash_and_marker_and_not_only_in_colour():
    styles = list(arm_styles([f"arm{i}" for i in range(20)]).values())
    assert len({(str(style.dash), style.marker) for style in styles[:8]}) == 8
    assert len({(style.colour, str(style.dash), style.marker) for style in styles}) == 20


def test_first_three_colours_differ_in_grey():
    def grey(colour):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    levels = sorted(grey(style.colour) for style in PALETTE[:3])
    assert min(np.diff(levels)) > 40


def test_labels_are_spread_apart_and_keep_their_order():
    placed = spread([0.50, 0.51, 0.52, 0.9], gap=0.1)
    assert np.all(np.diff(placed) >= 0.1 - 1e-9) and placed[3] == pytest.approx(0.9)
    assert max(spread([0.99, 1.0, 1.0], gap=0.1)) == pytest.approx(1.0)


def test_drawing_leaves_pyplot_and_settings_alone(results):
    before = dict(pyplot.rcParams)
    FIGURES["stop_map"].draw(results)
    assert dict(pyplot.rcParams) == before and not pyplot.get_fignums()


def test_figures_drawn_in_threads_equal_those_drawn_alone(results):
    alone = render(FIGURES["stop_map"].draw(results)[0], "png")
    out = {}

    def draw(index):
        out[index] = render(FIGURES["stop_map"].draw(results)[0], "png")

    threads = [threading.Thread(target=draw, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(out.values()) == {alone}


def test_example_script_draws_and_compares(results, tmp_path, capsys):
    example.main(str(results.path), str(tmp_path / "out"))
    printed = capsys.readouterr().out
    assert re.search(r"clip_higher minus symmetric: [+-]0\.\d{3} \(95 % .*, 3 seeds\)", printed)
    assert (tmp_path / "out" / "length_and_flat_groups.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "accuracy_entropy.csv").exists()


def test_of_many_arms_the_best_are_named_and_the_others_stay_in_sight(searched):
    figure, numbers = FIGURES["accuracy_entropy"].draw(searched)
    scores = searched.runs.groupby("arm")["final_accuracy"].mean().nlargest(5)
    assert set(numbers["arm"]) == set(scores.index)
    assert "grey: 19 further arms" in texts(figure)
