"""Runs come back from W&B (recorded answers of a server, recorded offline files) as an ordinary results folder."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from analysis import load
from analysis.__main__ import main
from analysis.wandb_offline import PulledRun, _items, read_offline, read_records
from analysis.wandb_source import arm_of, run_events, write_results
from reasonrl.errors import AnalysisError

OFFLINE = Path(__file__).parent / "data" / "wandb_offline"
HISTORY = [
    {"_step": step, "_timestamp": 1.7e9 + step, "step": step, "reward/total": 0.1 * step, "loss/total": "NaN"}
    for step in range(1, 4)
] + [{"_step": 4, "_timestamp": 1.7e9 + 9, "step": 3, "eval/accuracy": 0.5, "time/eval": 0.25}]


def answer(query: str, variables: dict) -> dict:
    """What a W&B server answers to the client's queries for a group of two runs and their summary."""
    if "query Runs(" in query:
        edges = [{"node": node(name), "cursor": name} for name in ("run0", "run1", "sum2")]
        page = {"endCursor": "sum2", "hasNextPage": False}
        runs = {"edges": edges, "pageInfo": page}
        return {"project": {"internalId": "1", "runCount": 3, "readOnly": False, "runs": runs}}
    if "HistoryPage" in query:
        rows = [row for row in HISTORY if variables["minStep"] <= row["_step"] < variables["maxStep"]]
        return {"project": {"run": {"history": [json.dumps(row) for row in rows]}}}
    if "ParquetHistory" in query:
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": []}}}}
    if "name: $name" in query:
        return {"project": {"internalId": "1", "run": node(variables["name"])}}
    return {"viewer": {"id": "x", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}}


def node(name: str) -> dict:
    number = int(name[-1])
    summary = name == "sum2"
    config = {"seed": number, "run_key": name, "arm": "symmetric", "loss": {"low": 0.2}, "steps": 3}
    if summary:
        config = {"question": "Does it help?", "arms": ["symmetric"], "baseline": "symmetric"}
    text = dict.fromkeys(("description", "notes"), "")
    times = dict.fromkeys(("createdAt", "heartbeatAt"), "2026-01-01T00:00:00Z")
    return {
        **text, **times, "id": name, "projectId": "1", "tags": [], "name": name, "displayName": f"symmetric-s{number}",
        "sweepName": None, "state": "finished", "group": "demo", "jobType": "summary" if summary else "symmetric",
        "commit": None, "readOnly": False, "historyLineCount": 4, "user": {"name": "me", "username": "me"},
        "config": json.dumps({key: {"value": value} for key, value in config.items()}), "systemMetrics": "{}",
        "summaryMetrics": json.dumps({"status": "finished", "steps_done": 3}),
        "historyKeys": {"keys": {"step": {}}, "lastStep": 4},
    }  # fmt: skip


class Server(http.server.BaseHTTPRequestHandler):
    """Answers GraphQL; everything else is not found."""

    asked: list[tuple[str, dict]] = []

    def log_message(self, *args):
        """Keep quiet."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            request = json.loads(body)
        except ValueError:
            request = {"query": ""}
        query, variables = request.get("query", ""), request.get("variables") or {}
        self.asked.append((query, variables))
        data = json.dumps({"data": answer(query, variables)}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        Server.asked.clear()
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_group_is_pulled_through_the_real_client(server, tmp_path):
    environment = {**os.environ, "WANDB_BASE_URL": server, "WANDB_API_KEY": "0" * 40, "WANDB_SILENT": "true"}
    out = tmp_path / "pulled"
    command = [sys.executable, "-m", "analysis", "pull", "me/project", "--group", "demo", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "3 W&B runs from me/project" in done.stdout
    filters = [variables["filters"] for query, variables in Server.asked if "query Runs(" in query]
    assert filters == ['{"group": "demo"}']
    results = load(out)
    assert list(results.runs["key"]) == ["run0", "run1"] and list(results.runs["seed"]) == [0, 1]
    assert set(results.runs["outcome"]) == {"finished"} and set(results.runs["final_accuracy"]) == {0.5}
    assert list(results.rows["reward/total"][:3]) == pytest.approx([0.1, 0.2, 0.3])
    assert results.rows["loss/total"].isna().all() and results.plan["question"] == "Does it help?"
    assert results.runs["config.loss.low"].tolist() == [0.2, 0.2]


def test_without_a_login_pull_refuses_at_once(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert main(["pull", "me/project", "--out", str(tmp_path / "out")]) == 2
    assert "not logged in" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_offline_files_become_the_same_tables(tmp_path, capsys):
    out = tmp_path / "pulled"
    assert main(["pull", "--offline", str(OFFLINE), "--out", str(out)]) == 0
    assert "2 W&B runs" in capsys.readouterr().out
    results = load(out)
    assert results.arms == ["symmetric", "clip_higher"]
    runs = results.runs.set_index("arm")
    assert runs.loc["symmetric", ["outcome", "reason_code", "steps_done"]].tolist() == ["stopped", "A05", 2]
    assert runs.loc["clip_higher", ["outcome", "steps_done", "final_step"]].tolist() == ["finished", 4, 4]
    assert list(results.alerts["code"]) == ["A03", "A05"]
    assert list(results.evals[results.evals["arm"] == "clip_higher"]["step"]) == [0, 2, 4]
    assert runs.loc["clip_higher", "config.loss.high"] == 0.28


def test_an_offline_file_cut_anywhere_keeps_what_is_before_the_cut(tmp_path):
    file = next(OFFLINE.glob("*/run-0baaa3030de5.wandb"))
    data = file.read_bytes()
    whole = list(read_records(data))
    assert None not in whole
    for cut in (8, 200, 5000, len(data) - 1):
        kept = list(read_records(data[:cut]))
        assert kept[-1] is None and kept[:-1] == whole[: len(kept) - 1]
    (tmp_path / "run-0baaa3030de5.wandb").write_bytes(data[: len(data) // 2])
    (run,) = read_offline(tmp_path)
    assert run.damaged == 1 and run.history and run.state == "running"
    notes = write_results([run], tmp_path / "out", "test")
    assert "cannot be read" in notes[0] and notes[0] in load(tmp_path / "out").notes


def test_a_logged_table_is_no_metric_and_makes_no_step():
    from wandb.proto import wandb_internal_pb2

    history = wandb_internal_pb2.HistoryRecord()
    history.item.add(key="step", value_json="5")
    for name, value in (("_type", '"table-file"'), ("ncols", "4"), ("nrows", "9")):
        history.item.add(nested_key=["samples", name], value_json=value)
    assert _items(history.item) == {"step": 5}


def test_one_damaged_record_costs_only_itself():
    data = bytearray(next(OFFLINE.glob("*/run-0baaa3030de5.wandb")).read_bytes())
    whole = list(read_records(bytes(data)))
    data[3000] ^= 0xFF
    got = list(read_records(bytes(data)))
    assert got.count(None) == 1 and len(got) == len(whole)


def test_a_record_longer_than_a_block_is_put_together():
    # as W&B writes it: pieces of kind first, middle, last, each ending at a block of 32768 bytes
    import struct
    import zlib

    record = os.urandom(70000)
    data, rest, kind = b":W&B\xe1\xbe\x00", record, 2
    while rest:
        room = 32768 - len(data) % 32768 - 7
        piece, rest = rest[:room], rest[room:]
        kind = (kind if rest else 4) if len(data) > 7 else 2
        tail = bytes([kind]) + piece
        data += struct.pack("<IH", zlib.crc32(tail), len(piece)) + tail
        kind = 3
    assert list(read_records(data)) == [record]


def test_names_of_other_trainers_are_translated_and_unknown_ones_listed(tmp_path):
    rows = [{"_step": 1, "train/global_step": 10, "reward": 0.3, "completions/mean_length": 50.0, "my_score": 1.0}]
    run = PulledRun("abc", "trl-seed3", config={"seed": 3}, history=rows, state="crashed")
    notes = write_results([run], tmp_path / "out", "test")
    results = load(tmp_path / "out")
    row = results.rows.iloc[0]
    assert (row["step"], row["reward/total"], row["length/mean"], row["my_score"]) == (10, 0.3, 50.0, 1.0)
    assert "my_score" in notes[-1] and results.runs["outcome"].tolist() == ["lost"]


def test_runs_without_a_seed_are_never_paired(tmp_path):
    runs = [PulledRun(str(i), f"arm{i % 2}", history=HISTORY, state="finished") for i in range(4)]
    notes = write_results(runs, tmp_path / "out", "test")
    assert "4 of 4 W&B runs record no seed" in notes[0]
    results = load(tmp_path / "out")
    assert results.runs["seed"].tolist() == [-1] * 4 and results.arms == ["arm0", "arm1"]


@pytest.mark.parametrize(
    ("run", "arm"),
    [
        (PulledRun("a", "x", config={"arm": "wide"}), "wide"),
        (PulledRun("a", "x", job_type="gspo"), "gspo"),
        (PulledRun("a", "grpo-s12", job_type="train"), "grpo"),
        (PulledRun("a", "grpo_seed=3"), "grpo"),
        (PulledRun("a", ""), "a"),
    ],
)
def test_the_arm_of_a_run(run, arm):
    assert arm_of(run) == arm


def test_a_running_run_has_no_end():
    events = list(run_events(PulledRun("a", "x", history=HISTORY, state="running"), 0, set()))
    assert [event["type"] for event in events] == ["start", "step", "step", "step", "eval"]


def test_a_folder_that_was_not_pulled_is_never_overwritten(tmp_path, capsys):
    out = tmp_path / "results"
    out.mkdir()
    (out / "plan.json").write_text("{}")
    assert main(["pull", "--offline", str(OFFLINE), "--out", str(out)]) == 2
    assert "was not pulled" in capsys.readouterr().err and [path.name for path in out.iterdir()] == ["plan.json"]


def test_pulling_again_replaces_what_was_pulled(tmp_path):
    out = tmp_path / "out"
    write_results(read_offline(OFFLINE), out, "test")
    load(out)
    write_results(read_offline(OFFLINE)[:1], out, "test")
    assert len(load(out).runs) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either"),
        (["a/b", "--offline", "x"], "give either"),
        (["--offline", "{tmp}"], "no W&B files"),
        (["--offline", "{data}", "--group", "other", "--out", "{tmp}/out"], "no run belongs to group other"),
        (["--offline", "{data}", "--baseline", "wide", "--out", "{tmp}/out"], "there are symmetric, clip_higher"),
    ],
)
def test_bad_calls_say_what_is_wrong(tmp_path, capsys, arguments, words):
    given = [text.format(tmp=tmp_path, data=OFFLINE) for text in arguments]
    assert main(["pull", *given]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_that_logged_nothing_are_counted_and_none_at_all_is_an_error(tmp_path):
    full, empty = PulledRun("a", "x", history=HISTORY), PulledRun("b", "y")
    assert "1 W&B runs have logged nothing" in write_results([full, empty], tmp_path / "out", "test")[0]
    with pytest.raises(AnalysisError, match="no run has logged anything"):
        write_results([empty], tmp_path / "other", "test")
