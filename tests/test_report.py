"""The report: complete, honest, one file without network, and alive in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from make_results import FAULTS, make_results

from analysis import load
from analysis.report import build, finish, write_report
from analysis.report.html import to_html
from analysis.report.stopped import evidence
from reasonrl.errors import AnalysisError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")
EVIL = '</script><script>document.title="pwned"</script><b>'


def add_fork(folder, arm="symmetric", seed=1):
    """A copy of the stopped run, as an intervention leaves it: own key, own run.json, other data kind."""
    plan = json.loads((folder / "plan.json").read_text())
    parent = next(run for run in plan["runs"] if run["arm"] == arm and run["seed"] == seed)
    donor = next(run for run in plan["runs"] if run["arm"] == arm and run["seed"] == 0)
    child = folder / "runs" / "feedfacecafe"
    shutil.copytree(folder / "runs" / donor["key"], child)
    spec = parent | {"key": child.name, "name": "repair", "parent": parent["key"], "parent_step": 5}
    spec["config"] = plan["configs"][parent["config"]] | {"data": {"kind": "dynamic_sampling"}}
    (child / "run.json").write_text(json.dumps(spec))
    lines = (child / "events.jsonl").read_text().splitlines()
    start = json.loads(lines[0]) | {"key": child.name, "config": spec["config"] | {"seed": seed}}
    (child / "events.jsonl").write_text("\n".join([json.dumps(start), *lines[1:]]) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("results") / "clip_demo"
    make_results(made, arms=("symmetric", "clip_higher"), faults={("symmetric", 1): "stopped"})
    add_fork(made)
    return made


@pytest.fixture(scope="module")
def page(folder):
    return write_report(folder).read_text()


def words(page):
    """What a reader sees: no tags, no scripts, no styles."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", bare)).split())


def test_report_answers_the_question_and_shows_what_it_rests_on(page):
    said = words(page)
    assert "Does clip-higher keep entropy and help accuracy?" in said
    assert "clip-higher against symmetric:" in said
    assert "2 arms, 3 seeds, 6 runs: 5 finished, 1 stopped by an alert; 1 repaired copy" in said
    for title in ("Verdict", "Figures", "Tables", "Stopped runs", "Plan", "Configuration", "Completions", "Cost"):
        assert f">{title}</h2>" in page
    assert "python sweep.py +sweep=clip_demo -m" in said
    assert "torch 2.13.0" in said and "0123456789ab" in said


def test_stopped_run_comes_with_reason_evidence_advice_and_what_was_tried(page):
    row = next(line for line in re.findall(r"<tr>.*?</tr>", page) if "10 of 20" in line)
    said = words(row)
    assert "A05 flat groups: 97 % of groups all wrong for 10 steps" in said
    assert "value 0.97, window 1 to 10" in said and "data=dynamic_sampling" in said
    assert "repair (finished at step 20, accuracy" in said


def test_parent_and_child_of_an_intervention_stand_side_by_side(page):
    row = next(line for line in re.findall(r"<tr>.*?</tr>", page) if "data.kind plain to dynamic_sampling" in line)
    assert "stopped at step 10" in words(row) and "finished at step 20" in words(row)


def test_fork_counts_in_the_cost_and_not_in_its_arm(page):
    table = page[page.index('id="cost"') :]
    rows = [words(row) for row in re.findall(r"<tr>.*?</tr>", table)]
    assert any(re.match(r"symmetric 3 50 of 60", row) for row in rows)
    assert any(re.match(r"repaired copies 1 20 of 20", row) for row in rows)
    assert "Stopping early saved 10 of 120 planned rollout steps (8%)" in words(table)


def test_ledger_gives_gpu_hours_wall_time_findings_and_decisions(tmp_path):
    folder = make_results(tmp_path / "r", seeds=[0])
    keys = [run["key"] for run in json.loads((folder / "plan.json").read_text())["runs"]]
    entries = [{"type": "start", "time": 100.0, "key": key, "arm": "a", "slot": "gpu 0,1"} for key in keys]
    entries.append(
        {"type": "retry", "time": 160.0, "key": keys[0], "arm": "symmetric", "seed": 0, "error_class": "oom"}
    )
    entries += [{"type": "finding", "code": "A18", "message": "best at the edge", "intervention": ["widen"]}] * 2
    entries.append({"type": "concluded", "time": 500.0, "seconds": 7200.0})
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"torn')
    page = write_report(folder, figures=["stop_map"]).read_text()
    cost = words(page[page.index('id="cost"') :])
    # 20 steps of 1.9 s on two GPUs: 76 s = 0.02 h per run
    assert "GPU-hours" in cost and re.search(r"symmetric 1 20 of 20 38 s 0\.02", cost)
    assert "The sweep took 2.0 h." in cost
    said = words(page)
    assert said.count("A18 best at the edge widen") == 1
    assert "1.0 min retry symmetric seed 0 error_class oom" in said


def test_configuration_shows_only_what_differs(page):
    section = page[page.index('id="config"') : page.index('id="alerts"')]
    table = section[: section.index("<details>")]
    assert "loss.high 0.2 0.28" in words(table) and "optim.lr" not in table
    assert "optim.lr: 4e-05" in words(section)


def test_page_needs_nothing_from_outside(page):
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    assert "default-src 'none'" in html.unescape(page)
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_ids_are_unique_and_every_reference_has_its_target(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used <= set(ids)


def test_recorded_words_cannot_become_markup(tmp_path):
    folder = make_results(tmp_path / "r", arms={"a": {}, EVIL: {"loss.high": 0.28}}, seeds=[0, 1])
    for log in (folder / "runs").glob("*/events.jsonl"):
        log.write_text(log.read_text().replace("[3a7j]j$", json.dumps(EVIL)[1:-1]))
    plan = json.loads((folder / "plan.json").read_text())
    plan["question"] = EVIL
    (folder / "plan.json").write_text(json.dumps(plan))
    page = write_report(folder, figures=["accuracy_entropy"]).read_text()
    assert EVIL not in page and "<b>" + "<" not in page
    assert page.count("<script") == page.count("</script>")
    assert html.escape(EVIL) in page


def test_same_results_give_the_same_page(folder):
    one, two = (to_html(build(load(folder), ["accuracy_entropy", "stop_map"])) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("fault", [*FAULTS, "no_runs", "no_plan", "one_seed"])
def test_damaged_results_get_a_report_that_says_so(fault, tmp_path):
    seeds = (0,) if fault == "one_seed" else (0, 1)
    arms = ("symmetric", "clip_higher")
    faults = {(arm, seed): fault for arm in arms for seed in seeds} if fault in FAULTS else {}
    folder = make_results(tmp_path / "r", arms, seeds, faults=faults, plan="damaged" if fault == "no_plan" else "whole")
    if fault == "no_runs":
        folder = tmp_path / "empty"
        folder.mkdir()
        (folder / "plan.json").write_text('{"name": "empty", "runs": []}')
    # One figure is enough here: tests/test_figures.py draws them all on damaged results.
    figure = "accuracy_entropy" if fault == "no_entropy" else "stop_map"
    said = words(write_report(folder, figures=[figure]).read_text())
    expected = {
        "stopped": "A05 flat groups",
        "failed": "non-finite",
        "lost": "lost to the machine",
        "unfinished": "4 not finished",
        "torn": "cannot be read",
        "damaged": "cannot be read",
        "empty": "nothing recorded",
        "nan": "not a number",
        "repeated": "written twice",
        "no_entropy": "entropy/mean was not",
        "missing": "not started",
        "no_runs": "No runs are recorded",
        "no_plan": "plan.json",
        "one_seed": "One seed gives no interval",
        "no_start": "symmetric",
    }
    assert expected[fault] in said


def test_a_folder_without_runs_and_plan_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(AnalysisError, match="holds no results"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_markdown_holds_the_same_and_links_the_exported_figures(folder):
    text = write_report(folder, "md", figures=["accuracy_entropy"]).read_text()
    assert text.startswith("# clip_demo\n") and "**clip-higher against symmetric:" in text
    assert "![Held-out accuracy and policy entropy](figures/accuracy_entropy.png)" in text
    assert "| Arm | Finished |" in text and "A05 flat groups" in text


def test_unknown_format_is_refused_with_the_choices(folder):
    with pytest.raises(AnalysisError, match="html or md"):
        write_report(folder, "pdf")


def test_finish_exports_writes_the_page_and_prints_the_verdict(tmp_path, capsys):
    folder = make_results(tmp_path / "demo", {"small": {}, "large": {"sampling.group_size": 16}}, seeds=[0, 1])
    path = finish(folder)
    printed = capsys.readouterr().out
    assert path == folder / "report.html" and path.stat().st_size > 50_000
    assert (folder / "figures" / "accuracy_entropy.pdf").exists() and (folder / "tables" / "arms.tex").exists()
    assert "large against small:" in printed and str(path) in printed


def test_finish_of_a_sweep_without_any_result_still_leaves_a_page(tmp_path, capsys):
    arms = ("symmetric", "clip_higher")
    folder = make_results(tmp_path / "demo", arms, [0], faults={(arm, 0): "missing" for arm in arms})
    assert "not started" in words(finish(folder).read_text())
    assert "nothing to export" in capsys.readouterr().out


def test_figure_that_breaks_does_not_cost_the_page(folder, monkeypatch):
    def broken(results, spec):
        raise RuntimeError("boom")

    monkeypatch.setattr("analysis.report.figures.picture", broken)
    said = words(to_html(build(load(folder))))
    assert "not drawn (RuntimeError: boom)" in said and "clip-higher against symmetric" in said


def test_evidence_is_spelled_out():
    facts = {"value": 0.97123, "window": [11, 20], "all_wrong": True}
    assert evidence(facts) == "value 0.9712, window 11 to 20, all wrong True"


# --- in a browser ------------------------------------------------------------------------------------------------


def browse(page, tmp_path, probe, width=1100, extra=()):
    """Open the page `width` pixels wide in headless Chromium, run `probe` (JavaScript giving a value), return it.

    The page is framed: a window cannot be made as narrow as a phone. Also returns what the console said.
    """
    (tmp_path / "page.html").write_text(
        page.replace(
            "</body>", f"<script>parent.postMessage(JSON.stringify((() => {{ {probe} }})()), '*')</script></body>"
        )
    )
    (tmp_path / "frame.html").write_text(
        f'<body style="margin:0"><pre id="out"></pre><iframe src="page.html" width="{width}" height="900"></iframe>'
        "<script>onmessage = (e) => { document.getElementById('out').textContent = e.data; }</script></body>"
    )
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--window-size=1300,1000"]
    command += [*extra, "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found and found[1], done.stdout[-500:] + done.stderr[-500:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), console


@needs_browser
def test_browser_shows_values_under_the_pointer_and_complains_of_nothing(folder, page, tmp_path):
    probe = """
      const svg = document.getElementById("accuracy_entropy-wide"), box = svg.getBoundingClientRect();
      const fire = (kind, x, y) => svg.dispatchEvent(new PointerEvent(kind, {clientX: x, clientY: y}));
      fire("pointermove", box.left + box.width * 0.2, box.top + box.height * 0.5);
      const tip = svg.closest("figure").querySelector(".tip:not([hidden])");
      const text = tip && tip.innerText, dots = svg.querySelectorAll("g[pointer-events] circle").length;
      fire("pointerleave", 0, 0);
      return {text, dots, hidden: !svg.closest("figure").querySelector(".tip:not([hidden])"), title: document.title};
    """
    seen, console = browse(page, tmp_path, probe)
    assert console == []
    assert seen["dots"] == 2 and seen["hidden"] and seen["title"] == "clip_demo"
    step = int(re.search(r"rollout step (\d+) · gradient step (\d+)", seen["text"])[1])
    evals = load(folder).evals
    here = evals[(evals["arm"] == "clip_higher") & (evals["step"] == step)]["eval/accuracy"]
    shown = float(re.search(r"clip-higher (\S+)", seen["text"])[1])
    assert shown == pytest.approx(here.mean(), abs=5e-4) and "n=3" in seen["text"]


@needs_browser
def test_phone_page_fits_its_width_and_shows_the_narrow_figures(page, tmp_path):
    probe = """
      const shown = (name) => getComputedStyle(document.querySelector(`svg.${name}`)).display !== "none";
      return {wide: shown("wide"), narrow: shown("narrow"), over: document.documentElement.scrollWidth > innerWidth};
    """
    seen, _ = browse(page, tmp_path, probe, width=390)
    assert seen == {"wide": False, "narrow": True, "over": False}


@needs_browser
def test_dark_page_has_light_words_in_text_and_figures(page, tmp_path):
    probe = """
      const ink = (node, what) => getComputedStyle(node)[what];
      const word = document.querySelector("svg.wide g text[style*='f1a1a1a']");
      const read = () => [ink(document.body, "backgroundColor"), ink(document.body, "color"), ink(word, "fill")];
      const before = read();
      document.getElementById("theme").click();
      return {before, after: read(), button: document.getElementById("theme").textContent};
    """
    seen, _ = browse(page, tmp_path, probe)
    assert seen["before"][0] == "rgb(255, 255, 255)" and seen["after"][0] == "rgb(27, 27, 30)"
    assert seen["after"][1] == seen["after"][2] == "rgb(232, 230, 227)"
    assert seen["button"] == "Light page"


@needs_browser
def test_page_prints(page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--print-to-pdf={tmp_path / 'page.pdf'}", (tmp_path / "page.html").as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF") and data.count(b"/Type /Page\n") >= 2
