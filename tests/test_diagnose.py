"""Reading other people's logs, in the forms and with the damage they come in, and what `diagnose` prints."""

from __future__ import annotations

import argparse
import json
import math
import struct

import pytest

from analysis import diagnose
from analysis.logs import find_logs, read_log
from analysis.logs.table import to_number
from reasonrl.alerts import AlertMonitor
from reasonrl.alerts.names import translate_row
from reasonrl.errors import AnalysisError
from reasonrl.events import EventLog

SURGE = [
    (s, 0.15 if s < 25 else 0.15 + 0.4 * (s - 25), 0.85 if s < 27 else max(0.0, 0.85 - 0.1 * (s - 27)))
    for s in range(1, 61)
]


def run(*argv) -> int:
    parser = argparse.ArgumentParser()
    diagnose.add_parser(parser.add_subparsers())
    args = parser.parse_args(["diagnose", *map(str, argv)])
    return args.main(args)


def write(path, text):
    path.write_text(text)
    return path


def surge_csv(path):
    lines = ["step,reward,entropy"] + [f"{s},{reward},{entropy}" for s, entropy, reward in SURGE]
    return write(path, "\n".join(lines) + "\n")


def stops(path, **options):
    return [(a.code, a.step) for a in diagnose.diagnose(read_log(path), **options).alerts if a.severity == "stop"]


# ---- one run in every form gives the same stop
def as_csv(folder):
    return surge_csv(folder / "log.csv")


def as_jsonl(folder):
    rows = [json.dumps({"step": s, "reward": r, "entropy": e}) for s, e, r in SURGE]
    return write(folder / "log.jsonl", "\n".join(rows))


def as_nested_jsonl(folder):
    """verl's file logger: {"step": n, "data": {...}}."""
    rows = [json.dumps({"step": s, "data": {"critic/score/mean": r, "actor/entropy": e}}) for s, e, r in SURGE]
    return write(folder / "log.jsonl", "\n".join(rows))


def as_json_columns(folder):
    steps, entropy, reward = zip(*SURGE, strict=True)
    return write(folder / "log.json", json.dumps({"step": steps, "entropy": entropy, "reward": reward}))


def as_trainer_state(folder):
    history = [{"step": s, "epoch": s / 60, "reward": r, "entropy": e} for s, e, r in SURGE]
    old, new = folder / "checkpoint-9", folder / "checkpoint-60"
    old.mkdir()
    new.mkdir()
    write(old / "trainer_state.json", json.dumps({"log_history": history[:9]}))
    return write(new / "trainer_state.json", json.dumps({"global_step": 60, "log_history": history}))


def as_trl_console(folder):
    lines = []
    for s, e, r in SURGE:
        lines.append(f" {100 * s // 60}%|###   | {s}/60 [00:{s:02d}<01:00,  1.00s/it]")
        lines.append(
            f"{{'loss': '0.0', 'grad_norm': nan_free, 'reward': '{r}', 'entropy': {e}}}".replace("nan_free", "0.3")
        )
    return write(folder / "train.log", "\r\n".join(lines))


def as_verl_console(folder):
    lines = ["(TaskRunner pid=7) \x1b[36mstep:0 - val-core/openai/gsm8k/acc/mean@1:0.1\x1b[0m"]
    lines += [
        f"(TaskRunner pid=7) step:{s} - global_seqlen/min:3 - critic/score/mean:np.float64({r}) - actor/entropy:{e} - "
        f"odd:name:1.5 - timing_s/gen:2.0"
        for s, e, r in SURGE
    ]
    return write(folder / "verl.log", "some text\n" + "\n".join(lines) + "\n")


def as_html(folder):
    head = "<tr><th>Step</th><th>reward</th><th>entropy</th><th>completions / mean_length</th></tr>"
    rows = [f"<tr><td>{s}</td><td>{r}</td><td>{e}</td><td>No Log</td></tr>" for s, e, r in SURGE]
    return write(folder / "page.html", f"<html><table>{head}{''.join(rows)}</table></html>")


def as_events(folder):
    path = folder / "run" / "events.jsonl"
    log = EventLog(path)
    log.append({"type": "start", "time": 0, "config": {"optim": {"lr": 4e-5}, "sampling": {"group_size": 8}}})
    for s, e, r in SURGE:
        log.append({"type": "step", "time": s, "step": s, "metrics": {"reward/total": r, "entropy/mean": e}})
    log.close()
    return path


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def as_tensorboard(folder):
    data = b""
    for s, e, r in SURGE:
        scalar = message(1, b"train/reward") + varint(2 << 3 | 5) + struct.pack("<f", r)
        content = message(4, struct.pack("<f", e))  # the tensor form newer writers use
        tensor = message(1, b"train/entropy") + message(8, b"\x08\x01" + content)
        event = (
            b"\x09" + struct.pack("<d", 1.0) + b"\x10" + varint(s) + message(5, message(1, scalar) + message(1, tensor))
        )
        data += struct.pack("<Q", len(event)) + b"crc1" + event + b"crc2"
    path = folder / "events.out.tfevents.1.host"
    path.write_bytes(data)
    return path


def as_wandb(folder):
    data = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for s, e, r in SURGE:
        items = {"train/global_step": s, "train/reward": r, "train/entropy": e, "_step": s + 5}
        body = b"".join(
            message(1, message(2, k.encode()) + message(16, json.dumps(v).encode())) for k, v in items.items()
        )
        record, first = message(2, body), True
        while record:
            left = 32768 - len(data) % 32768 - 7
            if left < 0:
                data += b"\0" * (left + 7)
                continue
            part, record = record[:left], record[left:]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            data, first = data + b"crc4" + struct.pack("<HB", len(part), kind) + part, False
    path = folder / "offline-run-1" / "run-1.wandb"
    path.parent.mkdir()
    path.write_bytes(data)
    return path


FORMS = [
    as_csv, as_jsonl, as_nested_jsonl, as_json_columns, as_trainer_state, as_trl_console, as_verl_console, as_html,
    as_events, as_tensorboard, as_wandb,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__[3:])
def test_the_same_run_in_any_form_gets_the_same_diagnosis(form, tmp_path):
    reference = stops(surge_csv(tmp_path / "reference.csv"))
    assert reference[0][0] == "A04"
    folder = tmp_path / "form"
    folder.mkdir()
    assert stops(form(folder)) == reference


@pytest.mark.parametrize("form", [as_trainer_state, as_events, as_tensorboard, as_wandb], ids=lambda f: f.__name__[3:])
def test_a_folder_is_searched_for_its_logs(form, tmp_path):
    form(tmp_path)
    (found,) = find_logs(tmp_path)
    assert len(read_log(found).rows) == 60


# ---- damage and oddities
def test_restarted_log_is_sorted_and_the_last_writing_of_a_step_is_kept(tmp_path):
    log = read_log(write(tmp_path / "r.csv", "step,reward\n0,1\n1,1\n2,1\n3,1\n2,9\n3,9\n4,9\n"))
    assert [(s, r["reward"]) for s, r in log.rows] == [(0, 1), (1, 1), (2, 9), (3, 9), (4, 9)]
    assert "restarted" in log.notes[0] and "last writing is kept" in log.notes[0]


def test_steps_left_over_from_an_earlier_attempt_are_said(tmp_path):
    log = read_log(write(tmp_path / "r.csv", "step,reward\n0,1\n1,1\n2,1\n3,1\n0,5\n1,5\n"))
    assert any("2 steps after 1 come from an attempt before" in note for note in log.notes)


def test_evaluation_rows_among_train_rows_share_their_step(tmp_path):
    history = [{"step": 1, "epoch": 0.1, "reward": 0.5}, {"step": 1, "epoch": 0.1, "eval_reward": 0.4}]
    history.append({"step": 2, "epoch": 0.2, "reward": 0.6})
    log = read_log(write(tmp_path / "trainer_state.json", json.dumps({"log_history": history})))
    assert log.rows == [(1.0, {"epoch": 0.1, "reward": 0.5, "eval_reward": 0.4}), (2.0, {"epoch": 0.2, "reward": 0.6})]
    assert log.notes == []


def test_a_rewritten_step_keeps_its_evaluation(tmp_path):
    history = [{"step": 1, "reward": 0.5, "eval_reward": 0.4}, {"step": 2, "reward": 0.6}, {"step": 1, "reward": 0.7}]
    log = read_log(write(tmp_path / "log.json", json.dumps(history)))
    assert log.rows[0] == (1.0, {"eval_reward": 0.4, "reward": 0.7})


@pytest.mark.parametrize("spelling", ["nan", "NaN", "-nan", " NAN ", "nan(ind)", "np.float64(nan)"])
def test_every_spelling_of_nan_is_nan(spelling):
    assert math.isnan(to_number(spelling))


@pytest.mark.parametrize("spelling", ["", "No Log", "None", "null", "N/A", None, True, "text", "1_000"])
def test_missing_is_not_nan(spelling):
    assert to_number(spelling) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("inf", math.inf), ("-Infinity", -math.inf), ("1,234.5", 1234.5), ("12 %", 0.12), ("tensor(0.5)", 0.5)],
)  # fmt: skip
def test_other_spellings_of_numbers(text, number):
    assert to_number(text) == number


def test_empty_cells_raise_nothing_and_printed_nan_does(tmp_path):
    empty = write(tmp_path / "a.csv", "step,kl,reward\n1,,0.5\n2,,0.5\n3,,0.5\n")
    assert stops(empty) == []
    printed = write(tmp_path / "b.csv", "step,kl,reward\n1,nan,0.5\n2,NaN,0.5\n3,nan,0.5\n")
    assert stops(printed) == [("A01", 2.0)]


def test_a_table_filled_up_with_nan_is_not_a_diverged_run(tmp_path):
    """pandas writes NaN where train and evaluation rows have other columns; a diverged run has no NaN learning rate."""
    lines = ["step,reward,kl,learning_rate,eval_reward"]
    for step in range(1, 9):
        lines += [f"{step},0.5,0.01,1e-5,nan", f"{step},nan,nan,nan,0.4"]
    log = read_log(write(tmp_path / "merged.csv", "\n".join(lines)))
    assert stops(tmp_path / "merged.csv") == []
    assert any("read as not logged" in note for note in log.notes)
    assert log.rows[0][1]["eval_reward"] == 0.4


def test_torn_last_lines_are_left_out_and_said(tmp_path):
    jsonl = read_log(write(tmp_path / "a.jsonl", '{"step": 1, "reward": 1}\n{"step": 2, "rew'))
    assert len(jsonl.rows) == 1 and "1 damaged line" in jsonl.notes[0]
    verl = read_log(write(tmp_path / "v.log", "step:1 - reward:0.5 - kl:0.1\nstep:2 - reward:0.5 - kl"))
    assert len(verl.rows) == 2 and "left out" in verl.notes[0]
    cut = read_log(write(tmp_path / "c.csv", "step,reward,kl\n1,0.5,0.1\n2,0.5"))
    assert len(cut.rows) == 2 and "cut last line" in cut.notes[0]


def test_a_torn_record_of_a_binary_log_is_said(tmp_path):
    for form in (as_tensorboard, as_wandb):
        path = form(tmp_path)
        path.write_bytes(path.read_bytes()[:-9])
        log = read_log(path)
        assert 0 < len(log.rows) < 60
        assert any("cut off" in note for note in log.notes)


@pytest.mark.parametrize("content", ["", "   \n", "step,reward\n", "just words\n", "[]", "{}"])
def test_a_log_without_rows_is_an_error_not_a_clean_bill(tmp_path, content):
    with pytest.raises(AnalysisError):
        read_log(write(tmp_path / "x.csv", content))


def test_binary_rubbish_and_missing_paths_are_errors(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0\1\2" * 100)
    with pytest.raises(AnalysisError, match="binary"):
        read_log(tmp_path / "x.bin")
    with pytest.raises(AnalysisError, match="does not exist"):
        find_logs(tmp_path / "nowhere")


def test_console_without_step_numbers_counts_its_lines_and_says_so(tmp_path):
    log = read_log(write(tmp_path / "t.log", "\n".join(f"{{'loss': 0.1, 'reward': {i}}}" for i in range(5))))
    assert [s for s, _ in log.rows] == [1, 2, 3, 4, 5]
    assert "logging interval" in log.notes[0]


def test_thousands_of_columns(tmp_path):
    names = ["step", "reward", *(f"layer_{i}/norm" for i in range(4000))]
    rows = [",".join([str(s), "0.5", *["1.0"] * 4000]) for s in range(1, 31)]
    found = diagnose.diagnose(read_log(write(tmp_path / "w.csv", "\n".join([",".join(names), *rows]))))
    assert len(found.unknown) == 4000
    assert "and 3988 more" in diagnose.describe(found)


# ---- the command
def test_findings_are_printed_with_evidence_cure_skipped_rules_and_unknown_names(tmp_path, capsys):
    text = surge_csv(tmp_path / "a.csv").read_text().replace("entropy\n", "entropy,mystery\n", 1)
    lines = text.splitlines()
    write(tmp_path / "a.csv", "\n".join([lines[0], *(f"{line},1" for line in lines[1:])]))
    assert run(tmp_path / "a.csv") == 1
    out = capsys.readouterr().out
    assert "  STOP A04 entropy surge, step" in out
    assert "evidence: entropy" in out and "window" in out
    assert "try: overlong=filter or loss.high / 2 or optim.lr / 2" in out
    assert "A09 (kl/ref)" in out
    assert "unknown names (checked for NaN only): mystery" in out


def test_a_finding_raised_many_times_is_one_line_under_the_verdict(tmp_path, capsys):
    lines = ["step,reward,entropy"]
    lines += [
        f"{s},{0.3 + 0.01 * (s % 2)},{0.6 if s < 30 else 0.6 * math.exp(-(s - 30) / 3):.6g}" for s in range(1, 121)
    ]
    path = write(tmp_path / "a.csv", "\n".join(lines))
    assert run(path) == 1
    out = capsys.readouterr().out
    verdict = next(line for line in out.splitlines() if "verdict:" in line)
    assert verdict.startswith("  verdict: STOP A03 entropy collapse (step ")
    (line,) = (line for line in out.splitlines() if line.startswith("  STOP A03 entropy collapse, step "))
    run(path, "--json")
    raised = [a for a in json.loads(capsys.readouterr().out)["alerts"] if a["code"] == "A03"]
    assert len(raised) > 5
    worst, first = raised[-1]["step"], raised[0]["step"]
    assert f"{raised[0]['severity']} from {first:g}, worst and last at {worst:g}, raised {len(raised)} times" in line
    assert "e-" not in out and "under 0.0001" in out


def test_a_healthy_log_says_so_and_how_many_rules_could_not_judge(tmp_path, capsys):
    calm = write(tmp_path / "calm.csv", "step,reward\n" + "\n".join(f"{s},{0.5 + s / 100}" for s in range(30)))
    skipped = diagnose.diagnose(read_log(calm)).skipped
    run(calm)
    assert f"verdict: no findings; {len(skipped)} rules had no input" in capsys.readouterr().out
    assert len(skipped) > 10


def test_our_own_runs_get_overrides_with_numbers(tmp_path):
    found = diagnose.diagnose(read_log(as_events(tmp_path)))
    stop = next(alert for alert in found.alerts if alert.severity == "stop")
    assert "optim.lr=2e-05" in stop.intervention


def test_our_own_log_is_judged_as_the_run_judged_itself(tmp_path):
    """The run evaluates before its first step without showing that to the rules."""
    scores = {0: 0.9, 10: 0.3, 20: 0.32, 30: 0.34}
    log, monitor = EventLog(tmp_path / "events.jsonl"), AlertMonitor()
    log.append({"type": "eval", "time": 0, "step": 0, "metrics": {"eval/accuracy": 0.9, "time/eval": 1.0}})
    raised = []
    for step, entropy, reward in SURGE:
        metrics = {"reward/total": reward, "entropy/mean": entropy}
        held_out = {"eval/accuracy": scores[step], "time/eval": 1.0} if step in scores else {}
        if held_out:
            log.append({"type": "eval", "time": step, "step": step, "metrics": held_out})
        log.append({"type": "step", "time": step, "step": step, "metrics": metrics})
        raised += monitor.update(step, {**metrics, **held_out})
    log.close()
    assert diagnose.diagnose(read_log(tmp_path / "events.jsonl")).alerts == raised
    assert raised[0].code == "A04"


def test_json_has_every_field_and_no_bare_nan(tmp_path, capsys):
    surge_csv(tmp_path / "a.csv")
    assert run(tmp_path / "a.csv", "--json") == 1
    data = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert data["worst"] == "stop" and data["rows"] == 60 and data["skipped"]["A09"] == ["kl/ref"]
    assert {"code", "severity", "step", "message", "evidence", "intervention"} <= data["alerts"][0].keys()


def test_exit_codes(tmp_path, capsys):
    calm = write(tmp_path / "calm.csv", "step,reward\n" + "\n".join(f"{s},{0.5 + s / 100}" for s in range(30)))
    bad = surge_csv(tmp_path / "bad.csv")
    assert run(calm) == 0
    assert run(calm, bad) == 1
    assert run(bad, "--fail-on", "never") == 0
    assert run(calm, tmp_path / "missing.csv") == 2
    assert run(bad, "--limit", "A03.nonsense=1") == 2
    assert run(bad, "--limit", "A03.ratio") == 2
    assert run(bad, "--updates-per-rollout", "0") == 2
    assert "A03.nonsense" in capsys.readouterr().err


def test_a_log_no_rule_can_judge_is_no_pass(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    blind = write(tmp_path / "logs" / "x.jsonl", '{"a": 1}')
    for options in ([], ["--profile", "textbook"], ["--fail-on", "never"]):
        assert run(blind, *options) == 2
        assert "verdict: cannot judge: no rule found its inputs" in capsys.readouterr().out
    write(tmp_path / "logs" / "calm.csv", "step,reward\n" + "\n".join(f"{s},{0.5 + s / 100}" for s in range(30)))
    assert run(tmp_path / "logs") == 0
    assert "1 of 2 logs cannot be judged" in capsys.readouterr().err
    assert run(tmp_path / "logs", blind) == 2
    surge_csv(tmp_path / "logs" / "bad.csv")
    assert run(tmp_path / "logs") == 1


def test_columns_that_are_never_finite_are_not_called_unlogged(tmp_path, capsys):
    rows = "\n".join(f"{s},0.5,nan,nan,nan" for s in range(1, 31))
    run(write(tmp_path / "x.csv", f"step,reward,entropy,reward_std,eval_accuracy\n{rows}"))
    out = capsys.readouterr().out
    missing = next(line for line in out.splitlines() if "skipped, input not logged" in line)
    empty = next(line for line in out.splitlines() if "skipped, input logged but never finite" in line)
    assert "A03 (entropy/mean)" in empty and "A10 (eval)" in empty and "reward/std" in empty
    assert "A03" not in missing and "A09 (kl/ref)" in missing


def test_limits_rules_and_profile_can_be_chosen(tmp_path):
    bad = surge_csv(tmp_path / "bad.csv")
    assert run(bad, "--disable", "A04", "--disable", "A11") == 0
    assert run(bad, "--limit", "A04.nats=99", "--limit", "A11.windows=99") == 0
    steady = write(tmp_path / "s.csv", "step,frac_reward_zero_std\n" + "\n".join(f"{s},0.4" for s in range(30)))
    assert run(steady) == 0
    assert run(steady, "--profile", "textbook") == 1


def test_the_step_unit_is_declared(tmp_path, capsys):
    """The surge logged per gradient step, 16 to a rollout step, is too short for any rule's warm-up but A04's."""
    lines = ["step,entropy,frac_reward_zero_std"] + [f"{s},{0.5 if s < 30 else 0.1},0.9" for s in range(1, 61)]
    path = write(tmp_path / "g.csv", "\n".join(lines))
    run(path)
    assert "A03" in capsys.readouterr().out
    run(path, "--updates-per-rollout", "16")
    out = capsys.readouterr().out
    assert "16 per rollout step" in out and "verdict: no findings" in out


def test_picture_is_written_one_per_log(tmp_path):
    one, two = surge_csv(tmp_path / "one.csv"), surge_csv(tmp_path / "two.csv")
    run(one, two, "--picture", tmp_path / "found.png")
    for name in ("found.png", "found_2.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert run(one, "--picture", tmp_path / "found.bmp") == 2


def test_a_picture_that_cannot_be_written_costs_no_findings(tmp_path, capsys):
    assert run(surge_csv(tmp_path / "one.csv"), "--picture", "/proc/nowhere/found.png") == 2
    printed = capsys.readouterr()
    assert "verdict: STOP A04" in printed.out
    assert printed.err.startswith("--picture /proc/nowhere/found.png: ")


@pytest.mark.parametrize(
    "line",
    [
        "Global step {s}: {{'reward': {s}.5, 'kl': 0.1}}",  # OpenRLHF
        "{{'loss': 0.1, 'reward': {s}.5, 'global_step/max_steps': '{s}/100', 'epoch': 0.1}}",  # ms-swift
        "rollout: {{'rollout/raw_reward': {s}.5, 'rollout/step': {s}, 'rollout/truncated': 0.1}}",  # slime
    ],
)
def test_printed_dicts_that_name_their_step_are_put_there(tmp_path, line):
    log = read_log(write(tmp_path / "c.log", "\n".join(line.format(s=s) for s in (5, 10, 15))))
    assert [s for s, _ in log.rows] == [5, 10, 15]
    assert [translate_row(row)["reward/total"] for _, row in log.rows] == [5.5, 10.5, 15.5]
