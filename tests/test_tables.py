"""Tables: the printed cells, the raw numbers beside them, and what a table says when it has nothing to show."""

from __future__ import annotations

import io
import re

import numpy as np
import pandas as pd
import pytest
from make_results import make_results

from analysis import load
from analysis.compare import compare, compare_problems
from analysis.tables import make_tables
from analysis.typeset import Table, latex


def tables_of(folder):
    results = load(folder)
    rng = np.random.default_rng(0)
    made = make_tables(results, compare(results, rng), compare_problems(results, rng))
    return results, {table.name: table for table in made}


def raw(table):
    return pd.read_csv(io.StringIO(table.to_csv()))


def test_the_csv_holds_the_numbers_behind_the_cells(tmp_path):
    results, tables = tables_of(make_results(tmp_path / "demo"))
    frame = raw(tables["arms"]).set_index("arm")
    mean = results.runs.groupby("arm")["final_accuracy"].mean()
    assert frame["accuracy"].to_dict() == pytest.approx(mean.to_dict())
    assert frame.loc["symmetric", ["runs", "finished", "accuracy_n", "baseline"]].tolist() == [3, 3, 3, True]
    cell = tables["arms"].shown.set_index("Arm").loc["clip-higher", "Accuracy"]
    assert cell.startswith(f"{mean['clip_higher']:.2f} (")
    points = tables["arms"].shown["Accuracy by seed"].iloc[0].split(", ")
    wanted = results.runs.loc[results.runs["arm"] == "symmetric", "final_accuracy"]
    assert points == [f"{value:.2f}" for value in wanted]


def test_a_sweep_without_stops_shows_one_reading_and_one_with_stops_both(tmp_path):
    _, whole = tables_of(make_results(tmp_path / "whole"))
    _, stopped = tables_of(make_results(tmp_path / "stopped", faults={("symmetric", 0): "stopped"}))
    assert "Reading" not in whole["differences"].shown and len(whole["differences"].shown) == 3
    assert set(stopped["differences"].shown["Reading"]) == {"stopped run = its last score", "finished runs only"}
    heads = [head for head in stopped["arms"].shown if head.startswith("Accuracy,")]
    assert len(heads) == 2 and not [head for head in whole["arms"].shown if head.startswith("Accuracy,")]
    row = stopped["arms"].shown.iloc[0]
    assert row["Stopped or failed"] == "1 of 3 (6 to 79 %)" and row["Finished"] == "2 of 3"


def test_bold_stands_only_where_the_difference_is_distinguishable(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", arms=["symmetric", "clip_higher", "wide"], steps=60))
    table = tables["differences"]
    bold = [(index, "Difference") in table.bold for index in range(len(table.shown))]
    assert bold == list(table.shown["Verdict"].isin(["higher", "lower"]))
    assert any(bold) and not all(bold)
    for line, is_bold in zip(table.to_markdown().splitlines()[4:], bold, strict=False):
        assert ("**" in line) == is_bold
    rows = [line for line in table.to_latex().splitlines() if line.endswith(r"\tabularnewline")][1:]
    assert [r"\textbf" in row for row in rows] == bold


def test_better_accuracy_is_bold_in_the_table_of_arms_only_for_the_arm(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", arms=["overlong_off", "overlong_filter"], problems=400))
    assert tables["arms"].bold == {(1, "Accuracy")}


def test_captions_state_seeds_steps_model_task_and_stops(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", faults={("symmetric", 0): "stopped"}))
    for name in ("arms", "differences"):
        caption = tables[name].caption
        for words in (
            "Seeds 0, 1, 2; 20 rollout steps; model tiny; task arithmetic; 40 held-out problems x 4 samples.",
            "Stopped: symmetric seed 0 at step 10 of 20 (A05).",
            "t interval",
        ):
            assert words in caption
    assert "cannot fall below 0.25" in tables["differences"].caption


def test_one_seed_has_no_interval_in_any_cell(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", seeds=[0]))
    assert tables["arms"].shown["Accuracy"].str.endswith("(1 seed)").all()
    shown = tables["differences"].shown
    assert set(shown["95 % t"]) == set(shown["95 % bootstrap"]) == {"n/a"} and set(shown["Verdict"]) == {"one seed"}
    assert raw(tables["differences"])[["t_low", "t_high", "bootstrap_low", "t_p"]].isna().all(axis=None)
    assert not tables["differences"].bold


def test_a_mean_over_a_ruined_seed_stands_beside_every_point(tmp_path):
    folder = make_results(tmp_path / "demo", arms=["symmetric"], faults={("symmetric", 1): "failed"})
    _, tables = tables_of(folder)
    row = tables["arms"].shown.iloc[0]
    assert row["Accuracy by seed"].count(",") == 2 and row["Stopped or failed"].startswith("1 of 3")


def test_the_table_of_stops_names_reason_and_steps_saved(tmp_path):
    faults = {("symmetric", 0): "stopped", ("clip_higher", 1): "failed", ("clip_higher", 2): "lost"}
    _, tables = tables_of(make_results(tmp_path / "demo", faults=faults))
    frame = raw(tables["stops"]).set_index("outcome")
    assert frame.loc["stopped", ["steps_done", "steps_saved", "reason_code"]].tolist() == [10, 10, "A05"]
    assert list(tables["stops"].shown["Try"]) == ["data=dynamic_sampling", "n/a", "n/a"]
    assert "10 of 120 planned rollout steps were saved" in tables["stops"].caption


def test_an_empty_table_says_what_is_missing_in_every_format(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", arms=["symmetric"]))
    for name, words in (("differences", "only one arm"), ("problems", "only one arm"), ("stops", "No run was stopped")):
        table = tables[name]
        assert words in table.missing
        assert table.to_csv() == f"# {table.missing}\n" and table.missing in table.to_markdown()
        assert table.to_latex().startswith("%")


def test_a_missing_metric_gives_a_cell_that_says_so(tmp_path):
    faults = {("clip_higher", seed): "no_entropy" for seed in range(3)}
    _, tables = tables_of(make_results(tmp_path / "demo", faults=faults))
    shown = tables["arms"].shown.set_index("Arm")
    assert shown.loc["clip-higher", "Entropy (nats/token)"] == "n/a"
    assert shown.loc["symmetric", "Entropy (nats/token)"] != "n/a"
    differences = tables["differences"].shown.set_index("Measure")
    assert differences.loc["entropy (nats/token)", ["Difference", "Verdict"]].tolist() == ["n/a", "not recorded"]


def test_problem_table_gives_a_test_per_seed(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", arms=["summed", "gdpo"]))
    row = tables["problems"].shown.iloc[0]
    assert row["Problems"] == "40" and row["McNemar per seed"].count("p ") == 3
    frame = raw(tables["problems"])
    assert frame["problems_low"].iloc[0] <= frame["difference"].iloc[0] <= frame["problems_high"].iloc[0]


def test_learning_speed_is_paired_and_a_run_that_never_gets_there_makes_a_bound(tmp_path):
    results, tables = tables_of(make_results(tmp_path / "fast", arms=["plain", "dynamic_sampling"], problems=400))
    frame = raw(tables["learning"]).set_index("arm")
    plain = results.evals[(results.evals["arm"] == "plain") & (results.evals["step"] > 0)]
    assert frame["target"].iloc[0] == pytest.approx(plain.groupby("step")["eval/accuracy"].mean().max())
    assert frame.loc["dynamic_sampling", "reached"] == 3 and frame.loc["plain", "reached"] < 3
    assert tables["learning"].shown["Steps over baseline's"].iloc[1].startswith("at most 0.")
    assert frame.loc["dynamic_sampling", "area"] > frame.loc["plain", "area"]


def test_a_stopped_runs_curve_goes_on_at_its_last_score(tmp_path):
    folder = make_results(tmp_path / "demo", arms=["symmetric"], seeds=[0], faults={("symmetric", 0): "stopped"})
    results, tables = tables_of(folder)
    accuracy = results.evals["eval/accuracy"].tolist()  # at steps 0, 5, 10 of 20
    area = (5 * (accuracy[0] + accuracy[1]) / 2 + 5 * (accuracy[1] + accuracy[2]) / 2 + 10 * accuracy[2]) / 20
    assert raw(tables["learning"])["area"].iloc[0] == pytest.approx(area)


def test_latex_escapes_what_latex_would_read_as_commands():
    assert latex("50 % of a_b & c#1 {x} ~ ^ \\") == (
        r"50 \% of a\_b \& c\#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )
    assert latex("-0.5 to -0.1, clip-higher, 1e-5") == "$-$0.5 to $-$0.1, clip-higher, 1e-5"


def test_markdown_cells_cannot_break_the_table():
    table = Table("t", "T", "c", pd.DataFrame({"a": [1]}), pd.DataFrame({"Arm": ["a|b\nc"]}))
    assert "| a\\|b c |" in table.to_markdown()


def test_latex_uses_booktabs_and_balances_its_environments(tmp_path):
    _, tables = tables_of(make_results(tmp_path / "demo", faults={("symmetric", 0): "stopped"}))
    for table in tables.values():
        text = table.to_latex()
        assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
        assert text.count(r"\begin{") == text.count(r"\end{") == 2
        body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        body = [line for line in body if not line.startswith(r"\addlinespace")]
        columns = len(re.findall(r"l|r|p\{\d+pt\}", text.split("{@{}")[1].split("@{}}")[0]))
        assert columns == len(table.shown.columns) and len(body) == len(table.shown)
        assert all(line.replace(r"\&", "").count("&") == columns - 1 for line in body)


def test_a_wide_latex_table_is_wrapped_to_the_page_and_a_narrow_one_is_left_alone():
    long = {"Arm": ["clip-higher minus symmetric"] * 2, "Accuracy": ["0.65 (0.56 to 0.73)"] * 2}
    text = Table("t", "T", "c", pd.DataFrame({"a": [1]}), pd.DataFrame(long)).to_latex()
    assert r"\begin{table}[t]" in text and r"\begin{tabular}{@{}lr@{}}" in text
    wide = long | {"Evidence": ["97 % of all groups are wrong in every one of the last ten steps " * 2] * 2}
    wide |= {f"Measure {place}": ["0.65 (0.56 to 0.73)"] * 2 for place in range(3)}
    text = Table("t", "T", "c", pd.DataFrame({"a": [1]}), pd.DataFrame(wide)).to_latex()
    points = [int(width) for width in re.findall(r"p\{(\d+)pt\}", text)]
    assert r"\begin{table*}[t]" in text and len(points) == 6 and sum(points) + 6 * len(points) <= 400
    assert "0.65 (0.56~to~0.73)" in text, "an interval is not broken over two lines"
