"""Logs in other clothes and units: tables of every kind, lines of text, compressed files, percent, counts, signs."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from analysis.logs import find_logs, read_log
from reasonrl.alerts.names import translate_row
from reasonrl.errors import AnalysisError

ROWS = [(s, 0.3 + 0.002 * s, 0.5 - 0.002 * s) for s in range(1, 31)]


def lines(form: str) -> str:
    return "\n".join(form.format(s=s, r=r, e=e, p=100 * r) for s, r, e in ROWS)


TABLES = {
    "markdown": "| step | reward | entropy |\n|---|---|---|\n" + lines("| {s} | {r:.4f} | {e:.4f} |"),
    "tabs and long names": "Global Step\tAverage Reward\tPolicy Entropy\n" + lines("{s}\t{r:.4f}\t{e:.4f}"),
    "blanks": "step reward entropy\n" + lines("{s}   {r:.4f} {e:.4f}"),
    "decimal commas": "step;reward;entropy\n" + lines("{s};{r:.4f};{e:.4f}").replace(".", ","),
    "comments above": "# lr 1e-6\n# seed 3\nstep,reward,entropy\n" + lines("{s},{r:.4f},{e:.4f}"),
    "text above": "Loading, please wait\nstep,reward,entropy\n" + lines("{s},{r:.4f},{e:.4f}"),
    "row numbers before": ",step,reward,entropy\n" + lines("0,{s},{r:.4f},{e:.4f}"),
    "one number a row": "step,metric,value\n" + lines("{s},reward,{r:.4f}\n{s},entropy,{e:.4f}"),
    "exported chart": '"Step","my run - train/reward","my run - train/entropy","my run - train/reward__MAX"\n'
    + lines('"{s}","{r:.4f}","{e:.4f}","{r:.4f}"'),
    "lines of pairs": lines("2025-01-02 12:30:01 INFO [iter {s}] reward={r:.4f}, entropy={e:.4f}"),
    "lines of words": lines("step {s}/30 | reward {r:.4f} | entropy {e:.4f} | kl -"),
    "lines of colons": lines("Step {s}: mean_reward: {r:.4f}, entropy: {e:.4f}"),
    "progress bar": lines("Train [1/1]: {s}/30 [00:10<00:10, 1.0s/it, reward={r:.4f}, entropy_loss={e:.4f}]"),
    "percent signs": "step,reward,entropy\n" + lines("{s},{p:.2f}%,{e:.4f}"),
}


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_the_same_numbers_are_read_from_any_table(text, tmp_path):
    (tmp_path / "log.txt").write_text(text)
    rows = [(step, translate_row(row)) for step, row in read_log(tmp_path / "log.txt").rows]
    assert [step for step, _ in rows] == [s for s, _, _ in ROWS]
    assert [row["reward/total"] for _, row in rows] == pytest.approx([r for _, r, _ in ROWS])
    assert [row["entropy/mean"] for _, row in rows] == pytest.approx([e for _, _, e in ROWS])


def test_prose_with_steps_in_it_is_no_log(tmp_path):
    (tmp_path / "words.txt").write_text("hello world\nat step 3 we waited 4 minutes\nat step 5 nothing\n")
    with pytest.raises(AnalysisError, match="no rows of numbers"):
        read_log(tmp_path / "words.txt")


def test_compressed_log_is_read_and_a_cut_one_says_so(tmp_path):
    whole = gzip.compress(("step,reward,entropy\n" + lines("{s},{r:.4f},{e:.4f}")).encode())
    (tmp_path / "log.csv.gz").write_bytes(whole)
    (found,) = find_logs(tmp_path)
    log = read_log(found)
    assert len(log.rows) == 30 and log.path == found and log.notes == []
    found.write_bytes(whole[:-60])
    assert "the compressed file is cut off" in read_log(found).notes
    found.write_bytes(b"\x1f\x8brubbish")
    with pytest.raises(AnalysisError, match=r"log\.csv\.gz cannot be unpacked"):
        read_log(found)


def table(tmp_path, columns):
    count = len(next(iter(columns.values())))
    rows = [{"step": i + 1} | {name: values[i] for name, values in columns.items()} for i in range(count)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    log = read_log(path)
    return [translate_row(row) for _, row in log.rows], " ".join(log.notes)


def test_shares_and_accuracies_in_percent_are_divided_by_100(tmp_path):
    rows, notes = table(tmp_path, {"truncated_ratio": [2.5, 60.0], "val_acc": [71.3, 78.2], "reward": [3.0, 4.0]})
    assert [row["length/truncated"] for row in rows] == [0.025, 0.6]
    assert [row["eval/acc"] for row in rows] == [0.713, 0.782]
    assert [row["reward/total"] for row in rows] == [3.0, 4.0]
    assert "truncated_ratio is in percent" in notes and "val_acc is in percent" in notes


def test_shares_are_left_alone(tmp_path):
    rows, notes = table(tmp_path, {"truncated_ratio": [0.0, 1.0], "val_acc": [0.0, 1.0], "eval_reward": [3.0, 5.5]})
    assert rows[1] == {"length/truncated": 1.0, "eval/acc": 1.0, "eval/reward": 5.5}
    assert notes == ""


def test_a_count_is_no_share_and_is_left_out(tmp_path):
    rows, notes = table(tmp_path, {"all_wrong_groups": [78, 80], "reward": [0.1, 0.2]})
    assert rows == [{"reward/total": 0.1}, {"reward/total": 0.2}]
    assert "all_wrong_groups counts and gives no share" in notes


def test_groups_counted_by_outcome_become_shares(tmp_path):
    counts = {"batch/solve_none": [8, 4], "batch/solve_all": [2, 4], "batch/solve_partial": [6, 8]}
    rows, _ = table(tmp_path, counts)
    assert rows == [
        {"groups/all_wrong": 0.5, "groups/all_right": 0.125},
        {"groups/all_wrong": 0.25, "groups/all_right": 0.25},
    ]


def test_entropy_logged_as_a_negative_loss_is_turned_round(tmp_path):
    rows, notes = table(tmp_path, {"entropy_loss": [-0.5, -0.4], "reward": [0.1, 0.2]})
    assert [row["entropy/mean"] for row in rows] == [0.5, 0.4]
    assert "minus sign" in notes


def test_without_a_total_the_only_correctness_part_is_the_reward(tmp_path):
    rows, notes = table(tmp_path, {"accuracy": [0.1, 0.2], "format_reward": [1.0, 1.0]})
    assert [row["reward/total"] for row in rows] == [0.1, 0.2]
    assert "accuracy stands for it" in notes


def test_a_step_column_that_never_changes_is_no_step(tmp_path):
    (tmp_path / "log.csv").write_text("step,reward,entropy\n" + "\n".join(f"1,{r},{e}" for _, r, e in ROWS))
    log = read_log(tmp_path / "log.csv")
    assert [step for step, _ in log.rows] == list(range(1, 31))
    assert log.notes == ["the step column step never changes: rows are counted"]
    (tmp_path / "one.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 1, "eval_reward": 0.4}')
    assert [step for step, _ in read_log(tmp_path / "one.jsonl").rows] == [1]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("wrap", [lambda rows: {"best_metric": None, "log_history": rows}, list])
def test_of_cut_json_the_rows_before_the_cut_are_read_and_its_place_is_said(wrap, indent, tmp_path):
    text = json.dumps(wrap([{"step": s, "reward": r, "entropy": e} for s, r, e in ROWS]), indent=indent)
    (tmp_path / "state.json").write_text(text[: text.index('"step": 21') + 15])
    log = read_log(tmp_path / "state.json")
    assert [step for step, _ in log.rows] == list(range(1, 21))
    assert re.search(r"not valid JSON \(.* at line \d+ column \d+\): the 20 rows before are read", log.notes[0])


@pytest.mark.parametrize("text", ['{"log_history": [', '[{"step": 1, "rew', '{"step"', "{"])
def test_json_cut_before_its_first_row_is_called_invalid_json(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(AnalysisError, match=r"is not valid JSON \(.* at line 1 column \d+\)"):
        read_log(tmp_path / "x.json")


def test_prose_with_commas_in_it_is_no_log(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("# A tool\n\nParts: correctness, format, overlong, and more\n" + "It costs 21, or 3 a day.\n" * 9)
    with pytest.raises(AnalysisError, match="no rows of numbers"):
        read_log(page)


@pytest.mark.parametrize("text", ["{}/120", "step_{}", "global_step {}", "{} of 120", "Step: {}"])
def test_a_step_may_be_said_in_words(tmp_path, text):
    file = tmp_path / "log.csv"
    file.write_text("step,reward\n" + "".join(f"{text.format(step)},0.{step}\n" for step in range(1, 9)))
    assert [step for step, _ in read_log(file).rows] == list(range(1, 9))


def test_steps_in_camel_case_order_rows_and_an_empty_second_column_hides_nothing(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("globalStep,reward,reward\n" + "".join(f"{step},0.{step},\n" for step in range(8, 0, -1)))
    log = read_log(file)
    assert sorted(step for step, _ in log.rows) == list(range(1, 9))
    assert all(row["reward"] == pytest.approx(step / 10) for step, row in log.rows)
