"""Results folders, whole and broken, become the same tidy tables, and nothing is lost without a note."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from make_results import FAULTS, events, make_results

from analysis import load, readers
from analysis.compare import arm_runs, compare, compare_problems
from analysis.eventlog import parse_log, read_log
from analysis.load import find
from analysis.readers import read_logs
from analysis.records import RUN_COLUMNS
from analysis.tables import make_tables
from analysis.verdict import verdict
from reasonrl.errors import AnalysisError
from reasonrl.events import encode_line
from sweeps.types import Plan

TABLES = ("runs", "rows", "evals", "alerts")


def note(results, words):
    return [text for text in results.notes if words in text]


def one(results, arm, seed):
    runs = results.runs
    return runs[(runs["arm"] == arm) & (runs["seed"] == seed)].iloc[0]


def spec_of(tmp_path, **kwargs):
    folder = make_results(tmp_path / "one", arms=["symmetric"], seeds=[0], **kwargs)
    return folder, Plan.from_json((folder / "plan.json").read_text()).runs[0]


def test_a_finished_sweep_gives_one_row_per_run_and_per_step(tmp_path):
    results = load(make_results(tmp_path / "demo"))
    assert list(results.runs.columns[: len(RUN_COLUMNS)]) == list(RUN_COLUMNS)
    assert results.arms == ["symmetric", "clip_higher"] and results.baseline == "symmetric"
    assert list(results.runs["seed"]) == [0, 1, 2, 0, 1, 2]
    assert len(results.rows) == 6 * 20 and len(results.evals) == 6 * 5
    assert list(results.rows.columns[:5]) == ["key", "arm", "seed", "step", "gradient_step"]
    assert set(results.runs["outcome"]) == {"finished"} and results.notes == []
    assert results.versions["torch"] == ["2.13.0"]


def test_the_numbers_of_a_run_are_those_of_its_log(tmp_path):
    folder, spec = spec_of(tmp_path)
    results = load(folder)
    log = events(spec)
    steps = [event for event in log if event["type"] == "step"]
    evals = [event for event in log if event["type"] == "eval"]
    run = one(results, "symmetric", 0)
    assert run["final_accuracy"] == evals[-1]["metrics"]["eval/accuracy"] and run["final_step"] == 20
    assert run["final_entropy"] == pytest.approx(np.mean([e["metrics"]["entropy/mean"] for e in steps[-5:]]))
    assert run["generated_tokens"] == pytest.approx(sum(e["metrics"]["data/generated_tokens"] for e in steps))
    assert run["seconds"] == pytest.approx(sum(e["metrics"]["time/step"] for e in steps))
    assert list(results.rows["loss/total"]) == [e["metrics"]["loss/total"] for e in steps]
    assert list(results.evals["problems"].iloc[-1]) == evals[-1]["problems"]
    assert run["config.loss.high"] == 0.2 and run["config.optim.betas"] == "[0.9, 0.99]"


def test_gradient_steps_are_those_recorded_and_else_steps_times_updates(tmp_path):
    folder, spec = spec_of(tmp_path)
    assert list(load(folder).rows["gradient_step"][:3]) == [16.0, 32.0, 48.0]
    log = folder / "runs" / spec.key / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for event in lines:
        if event["type"] == "step":
            event["metrics"]["optim/gradient_steps"] -= 4.0  # a step whose updates were skipped
    log.write_text("".join(encode_line(event) for event in lines))
    results = load(folder)
    assert list(results.rows["gradient_step"][:2]) == [12.0, 28.0]
    assert list(results.evals["gradient_step"][:2]) == [0.0, 76.0]
    for event in lines:
        event.get("metrics", {}).pop("optim/gradient_steps", None)
    log.write_text("".join(encode_line(event) for event in lines))
    assert list(load(folder).evals["gradient_step"][:2]) == [0.0, 80.0]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_told_in_the_notes_or_the_outcome_and_never_raises(tmp_path, fault):
    results = load(make_results(tmp_path / "demo", faults={("clip_higher", 1): fault}))
    assert len(results.runs) == 6
    told = bool(results.notes) or bool(results.alerts.shape[0])
    assert told or fault in ("no_start", "no_entropy")
    healthy = results.runs[results.runs["arm"] == "symmetric"]
    assert set(healthy["outcome"]) == {"finished"}


def test_faults_have_the_outcome_that_decides_whether_they_count(tmp_path):
    faults = {("symmetric", seed): fault for seed, fault in enumerate(FAULTS)}
    results = load(make_results(tmp_path / "demo", seeds=range(len(FAULTS)), faults=faults))
    outcome = {fault: one(results, "symmetric", seed)["outcome"] for seed, fault in enumerate(FAULTS)}
    assert outcome == {
        "stopped": "stopped",
        "failed": "failed",
        "lost": "lost",
        "unfinished": "unfinished",
        "torn": "unfinished",
        "damaged": "finished",
        "no_start": "finished",
        "empty": "unfinished",
        "nan": "finished",
        "repeated": "finished",
        "no_entropy": "finished",
        "missing": "unfinished",
    }
    stopped = one(results, "symmetric", FAULTS.index("stopped"))
    assert (stopped["reason_code"], stopped["reason_title"], stopped["steps_done"]) == ("A05", "flat groups", 10)
    assert one(results, "symmetric", FAULTS.index("missing"))["status"] == "not started"
    assert one(results, "symmetric", FAULTS.index("empty"))["status"] == "empty"
    assert one(results, "symmetric", FAULTS.index("no_start"))["config.loss.high"] == 0.2
    assert np.isnan(one(results, "symmetric", FAULTS.index("nan"))["final_accuracy"])
    assert np.isnan(one(results, "symmetric", FAULTS.index("no_entropy"))["final_entropy"])


def test_alerts_keep_evidence_and_advice(tmp_path):
    results = load(make_results(tmp_path / "demo", faults={("symmetric", 2): "stopped"}))
    assert list(results.alerts["code"]) == ["A03", "A05"]
    last = results.alerts.iloc[-1]
    assert last["evidence"]["window"] == [1, 10] and last["intervention"] == ["data=dynamic_sampling"]
    assert note(results, "stopped by an alert") == [
        "1 run: stopped by an alert: symmetric seed 2 at step 10 (A05 flat groups)."
    ]


def test_a_repeated_step_keeps_its_last_writing_and_is_noted(tmp_path):
    results = load(
        make_results(tmp_path / "demo", arms=["symmetric"], seeds=[0], faults={("symmetric", 0): "repeated"})
    )
    assert list(results.rows["step"]) == list(range(1, 21))
    assert (results.rows["reward/total"] > -1).all(), "the first writing of steps 8 to 10 was -1"
    assert note(results, "steps written twice")[0].endswith("symmetric seed 0 (3 steps).")


def test_steps_that_go_back_are_sorted_and_the_last_writing_counts():
    def line(step, value):
        return encode_line({"type": "step", "time": 1.0, "step": step, "metrics": {"reward/total": value}})

    text = "".join(line(step, place) for place, step in enumerate([0, 1, 2, 3, 2, 3, 4]))
    log = parse_log(text.encode())
    assert log.steps.column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert log.steps.column("reward/total").to_pylist() == [0.0, 1.0, 4.0, 5.0, 6.0]
    assert log.header["repeated"] == 2


@pytest.mark.parametrize("fault", ["", "nan", "damaged", "torn", "repeated", "stopped", "no_start"])
def test_the_fast_reader_gives_what_the_plain_json_reader_gives(tmp_path, fault):
    folder = make_results(tmp_path / "demo", arms=["symmetric"], seeds=[0], faults={("symmetric", 0): fault})
    data = next(folder.glob("runs/*/events.jsonl")).read_bytes()
    fast, slow = parse_log(data), parse_log(data, fast=False)
    assert fast.header == slow.header
    names = sorted(slow.steps.column_names)
    assert sorted(fast.steps.column_names) == names
    left, right = (log.steps.select(names).to_pandas() for log in (fast, slow))
    pd.testing.assert_frame_equal(left, right, check_exact=True)
    pd.testing.assert_frame_equal(fast.evals.to_pandas(), slow.evals.to_pandas(), check_exact=True)


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":true,"b":null}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"b":2.0,"a":1.0}}',
        '{"type":"step","time":1.0,"step":2.0,"metrics":{"a":1.0,"b":"inf"}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"b":[1,2]}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"a":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{}}',
        '{"type":"step","time":1.0,"step":2}',
        '{"type": "step", "step": 2, "metrics": {"a": 1e400, "b": -1e-400}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1e400,"b":-1e-400}}',
        '{"type":"step","time":1.0,"step":1e400,"metrics":{"a":1.0,"b":2.0}}',
        '{"type":"step","time":1.0,"step":2.5,"metrics":{"a":1.0,"b":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":NaN,"b":-Infinity}}',
        '{"type":"step","time":null,"step":2,"metrics":{"a":1.0,"b":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"c":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"b":2.0,"c":3.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"b":2.0}}\r',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"b":2.0}}}',
        '{"type":"step","time":1.0,"step":"2","metrics":{"a":1.0,"b":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"b":2.0}}{"type":"step"}',
        '{"type":"step","time":1.0,"st{"type":"step","time":1.0,"step":2,"metrics":{"a":1.0,"b":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"a,\\":":1.0,"b":2.0}}',
        '{"type":"step","time":1.0,"step":2,"metrics":{"step":7.0,"time":8.0}}',
        "[1, 2]",
        '"text"',
        "\x00\x00\x00",
    ],
)
def test_odd_lines_are_read_alike_by_both_readers(line):
    ordinary = '{"type":"step","time":1.0,"step":%d,"metrics":{"a":1.5,"b":-2.5}}\n'
    data = (ordinary % 1 + line + "\n" + ordinary % 3).encode()
    fast, slow = parse_log(data), parse_log(data, fast=False)
    assert fast.header == slow.header
    names = sorted(slow.steps.column_names)
    assert sorted(fast.steps.column_names) == names
    pd.testing.assert_frame_equal(fast.steps.select(names).to_pandas(), slow.steps.select(names).to_pandas())
    assert {1, 3} <= set(fast.steps.column("step").to_pylist())


def test_values_that_are_not_numbers_are_counted():
    line = '{"type":"step","time":1.0,"step":1,"metrics":{"a":"fast","b":2.0,"c":"nan","d":[1]}}\n'
    log = parse_log(line.encode())
    assert log.header["bad_values"] == 2
    assert log.steps.column("b").to_pylist() == [2.0] and np.isnan(log.steps.column("c")[0].as_py())


def test_a_log_in_binary_rubbish_has_no_rows_and_is_counted(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(os.urandom(3000).replace(b"\n", b"") + b"\n" + b"\xff\xfe")
    log = read_log(path)
    assert log.steps.num_rows == 0 and log.header["damaged"] == 2


def test_a_continued_run_forgets_the_end_and_alerts_of_its_first_life(tmp_path):
    folder, spec = spec_of(tmp_path, faults={("symmetric", 0): "stopped"})
    log = folder / "runs" / spec.key / "events.jsonl"
    start = {"type": "start", "time": 2e9, "key": spec.key, "arm": "symmetric", "seed": 0, "resumed_from": 4}
    with log.open("a") as file:
        file.write(encode_line({**start, "config": spec.config}))
    results = load(folder)
    run = one(results, "symmetric", 0)
    assert run["status"] == "unfinished" and run["reason_code"] == ""
    assert results.alerts.empty, "both alerts came after step 4"


def test_the_coordinators_decision_is_the_reason_and_a_budget_stop_is_no_failure(tmp_path):
    folder, spec = spec_of(tmp_path, faults={("symmetric", 0): "unfinished"})
    log = folder / "runs" / spec.key / "events.jsonl"
    decision = {"type": "decision", "time": 2e9, "action": "stop"}
    end = {"type": "end", "time": 2e9, "step": 10, "status": "stopped", "reason": "stop", "error_class": None}
    text = log.read_text()
    alert = {"code": "A03", "title": "entropy collapse", "message": "0.02 nats"}
    log.write_text(text + encode_line({**decision, "reason": alert}) + encode_line(end))
    assert one(load(folder), "symmetric", 0)[["outcome", "reason_code"]].tolist() == ["stopped", "A03"]
    budget = {"code": "BUDGET", "title": "out of time", "message": "60 minutes"}
    log.write_text(text + encode_line({**decision, "reason": budget}) + encode_line(end))
    results = load(folder)
    assert one(results, "symmetric", 0)["outcome"] == "ended"
    assert note(results, "ended early, not by an alert")


def test_the_cache_gives_the_same_tables_and_only_changed_logs_are_parsed_again(tmp_path, monkeypatch):
    folder = make_results(tmp_path / "demo", faults={("symmetric", 0): "unfinished", ("clip_higher", 2): "nan"})
    first = load(folder, cache=False)
    load(folder)
    parsed = []
    monkeypatch.setattr(readers, "read_log", lambda path: parsed.append(path) or read_log(path))
    second = load(folder)
    assert parsed == []
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name))
    assert second.notes == first.notes and second.versions == first.versions
    key = one(first, "symmetric", 0)["key"]
    log = folder / "runs" / key / "events.jsonl"
    with log.open("a") as file:
        file.write(encode_line({"type": "step", "time": 2e9, "step": 11, "metrics": {"reward/total": 0.5}}))
    third = load(folder)
    assert [path.parent.name for path in parsed] == [key]
    assert one(third, "symmetric", 0)["steps_done"] == 11 and len(third.rows) == len(first.rows) + 1


@pytest.mark.parametrize("damage", ["truncate", "other_version", "one_file_gone", "mixed"])
def test_a_broken_cache_is_only_slower(tmp_path, damage):
    folder = make_results(tmp_path / "demo")
    first = load(folder)
    if damage == "truncate":
        path = folder / "cache" / "rows.parquet"
        path.write_bytes(path.read_bytes()[:200])
    elif damage == "one_file_gone":
        (folder / "cache" / "evals.parquet").unlink()
    else:
        other = make_results(tmp_path / "other", seeds=[7])
        load(other)
        names = ["rows"] if damage == "mixed" else ["rows", "evals", "runs"]
        for name in names:
            os.replace(other / "cache" / f"{name}.parquet", folder / "cache" / f"{name}.parquet")
    again = load(folder)
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(first, name), getattr(again, name))


def test_a_folder_that_cannot_be_written_to_still_loads(tmp_path):
    folder = make_results(tmp_path / "demo")
    (folder / "cache").write_text("a file where the cache folder would be")
    assert len(load(folder).rows) == 120


def test_runs_of_an_earlier_plan_are_left_out_with_a_note(tmp_path):
    folder = make_results(tmp_path / "demo")
    plan = json.loads((folder / "plan.json").read_text())
    plan["runs"] = [run for run in plan["runs"] if run["seed"] != 2]
    (folder / "plan.json").write_text(json.dumps(plan))
    results = load(folder)
    assert len(results.runs) == 4 and len(results.rows) == 80
    assert note(results, "from an earlier plan or space, or made by other code, left out")[0].startswith("2 runs")


def test_runs_of_a_search_made_by_other_code_are_left_out_with_a_note(tmp_path):
    folder = make_results(tmp_path / "demo")
    plan = json.loads((folder / "plan.json").read_text())
    key = plan["runs"][0]["key"]
    (folder / "plan.json").write_text(
        json.dumps({**plan, "runs": [], "study": {"sampler": "tpe"}, "code_version": "new"})
    )
    for log in folder.glob("runs/*/events.jsonl"):
        code = "old" if log.parent.name == key else "new"
        log.write_text(log.read_text().replace('"versions":{', f'"versions":{{"code":"{code}",', 1))
    results = load(folder)
    assert key not in set(results.runs["key"]) and len(results.runs) == len(plan["runs"]) - 1
    assert note(results, "made by other code, left out")[0].startswith("1 run")


def test_runs_outside_of_the_space_that_is_searched_now_are_left_out_with_a_note(tmp_path):
    folder = make_results(tmp_path / "demo", arms={"low": {"optim.lr": 1e-5}, "high": {"optim.lr": 1e-3}})
    plan = json.loads((folder / "plan.json").read_text())
    space = [{"key": "optim.lr", "kind": "float", "low": 1e-4, "high": 1e-2}]
    (folder / "plan.json").write_text(json.dumps({**plan, "study": {"sampler": "tpe"}, "space": space}))
    results = load(folder)
    assert set(results.runs["config.optim.lr"]) == {1e-3}
    assert note(results, "from an earlier plan or space")[0].startswith("3 runs")


def test_rows_that_are_not_numbers_are_counted(tmp_path):
    results = load(make_results(tmp_path / "demo", faults={("clip_higher", 2): "nan"}))
    assert "clip_higher seed 2" in note(results, "rows whose reward, entropy or length is not a number")[0]


def test_a_fork_is_listed_but_is_no_data_of_its_arm(tmp_path):
    folder, spec = spec_of(tmp_path)
    child = folder / "runs" / "c0ffee000000"
    child.mkdir()
    record = spec.to_dict() | {"key": child.name, "parent": spec.key, "parent_step": 10, "name": "fork"}
    (child / "run.json").write_text(json.dumps(record))
    (child / "events.jsonl").write_bytes((folder / "runs" / spec.key / "events.jsonl").read_bytes())
    results = load(folder)
    assert list(results.runs["parent"]) == ["", spec.key]
    assert list(arm_runs(results)["key"]) == [spec.key]


@pytest.mark.parametrize("plan", ["none", "damaged"])
def test_without_a_sound_plan_the_logs_speak_for_themselves(tmp_path, plan):
    results = load(make_results(tmp_path / "demo", plan=plan))
    assert sorted(results.arms) == ["clip_higher", "symmetric"] and len(results.runs) == 6
    assert note(results, "arms and runs are taken from the event logs alone")


def test_unequal_seeds_are_noted(tmp_path):
    results = load(make_results(tmp_path / "demo", skip=[("clip_higher", 1), ("clip_higher", 2)]))
    assert note(results, "different seeds") == [
        "The arms have different seeds: symmetric 3 (0, 1, 2), clip_higher 1 (0); comparisons use the seeds two "
        "arms share."
    ]


def test_a_single_run_folder_loads(tmp_path):
    folder, spec = spec_of(tmp_path)
    results = load(folder / "runs" / spec.key)
    assert len(results.runs) == 1 and len(results.rows) == 20 and results.notes == []


def test_an_empty_folder_has_empty_tables_with_the_usual_columns(tmp_path):
    (tmp_path / "demo").mkdir()
    results = load(tmp_path / "demo")
    assert list(results.runs.columns) == list(RUN_COLUMNS) and results.runs.empty and results.rows.empty
    assert results.arms == [] and results.baseline == "" and note(results, "no runs")


def test_a_sweep_is_found_by_name_or_path_and_else_the_known_ones_are_named(tmp_path):
    folder = make_results(tmp_path / "results" / "demo")
    assert find("demo", tmp_path / "results") == folder and find(folder) == folder
    with pytest.raises(AnalysisError, match="nope: no such results folder .* Sweeps in .*: demo"):
        find("nope", tmp_path / "results")
    with pytest.raises(AnalysisError, match="is not a folder"):
        load(tmp_path / "missing")


def test_samples_are_read_on_demand_and_a_repeated_step_is_not_doubled(tmp_path):
    folder, spec = spec_of(tmp_path)
    log = folder / "runs" / spec.key / "events.jsonl"
    again = [event for event in events(spec) if event["type"] == "samples" and event["step"] == 20]
    with log.open("a") as file:
        file.writelines(encode_line(event) for event in again)
    samples = load(folder).samples()
    assert list(samples.groupby("step").size()) == [3] * 5
    assert samples.iloc[0]["parts"] == {"correctness": 1.0, "format": 1.0}


def test_loading_needs_no_torch_and_no_matplotlib():
    code = "import sys, analysis, analysis.stats; print(sorted({'torch', 'matplotlib', 'wandb'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


JUNK = (None, True, "x", "", -1, 1e308, float("nan"), [], [1], {}, {"a": 1}, "nan", 10**30)


def mutilate(value, draw, depth=0):
    """Take one thing out of a JSON value, or put junk in its place."""
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        if draw.random() < 0.3:
            del value[key]
        else:
            value[key] = (
                draw.choice(JUNK) if draw.random() < 0.5 or depth > 3 else mutilate(value[key], draw, depth + 1)
            )
        return value
    if isinstance(value, list) and value:
        place = draw.randrange(len(value))
        value[place] = mutilate(value[place], draw, depth + 1)
        return value
    return draw.choice(JUNK)


@pytest.mark.parametrize("seed", range(6))
def test_mutilated_logs_and_plans_never_raise(tmp_path, seed):
    draw, faults = random.Random(seed), {("symmetric", 0): "stopped"}
    folder = make_results(tmp_path / "demo", steps=6, eval_every=2, problems=5, seeds=[0, 1], faults=faults)
    for log in folder.glob("runs/*/events.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for _ in range(4):
            mutilate(lines[draw.randrange(len(lines))], draw)
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = json.loads((folder / "plan.json").read_text())
    for _ in range(3):
        mutilate(plan, draw)
    (folder / "plan.json").write_text(json.dumps(plan))
    results = load(folder)
    comparisons = compare(results, np.random.default_rng(0))
    assert verdict(results, comparisons)
    for table in make_tables(results, comparisons, compare_problems(results, np.random.default_rng(0))):
        assert table.to_markdown() and table.to_latex() and table.to_csv()
    assert list(results.samples().columns[:4]) == ["key", "arm", "seed", "step"]


def test_logs_read_by_several_processes_are_those_read_by_one(tmp_path):
    folder = make_results(tmp_path / "demo", faults={("symmetric", 0): "unfinished", ("clip_higher", 2): "damaged"})
    paths = sorted(folder.glob("runs/*/events.jsonl"))
    paths.insert(1, tmp_path / "gone.jsonl")
    alone, shared = read_logs(paths, 0, processes=1), read_logs(paths, 0, processes=3)
    assert isinstance(alone[1], FileNotFoundError) and isinstance(shared[1], FileNotFoundError)
    for mine, theirs in zip(alone[:1] + alone[2:], shared[:1] + shared[2:], strict=True):
        assert mine.header == theirs.header
        pd.testing.assert_frame_equal(mine.steps.to_pandas(), theirs.steps.to_pandas(), check_exact=True)
        pd.testing.assert_frame_equal(mine.evals.to_pandas(), theirs.evals.to_pandas(), check_exact=True)


def test_what_a_reading_process_could_not_do_is_read_here(tmp_path, monkeypatch):
    folder = make_results(tmp_path / "demo")
    paths = sorted(folder.glob("runs/*/events.jsonl"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    logs = read_logs(paths, 0, processes=2)
    assert [log.steps.num_rows for log in logs] == [read_log(path).steps.num_rows for path in paths]
