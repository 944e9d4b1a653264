"""The command `export`: what it writes, that it writes the same twice, and how it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pandas as pd
import pytest
from make_results import FAULTS, make_results

from analysis.__main__ import main
from analysis.export import export
from reasonrl.errors import AnalysisError

ONE = ["--figures", "accuracy_entropy"]


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def sweep(tmp_path):
    return make_results(tmp_path / "results" / "demo", faults={("symmetric", 0): "stopped"})


def test_export_writes_figures_numbers_tables_verdict_and_manifest(sweep, tmp_path, capsys):
    out = tmp_path / "out"
    code = main(["export", "demo", *ONE, "--results", str(sweep.parent), "--out", str(out)])
    printed = capsys.readouterr().out
    written = files_in(out)
    assert code == 0
    figure = {f"figures/accuracy_entropy.{end}" for end in ("pdf", "png", "svg", "csv")}
    tables = {
        f"tables/{n}.{e}"
        for n in ("arms", "differences", "problems", "learning", "stops")
        for e in ("csv", "md", "tex")
    }
    assert set(written) == figure | tables | {"verdict.md", "manifest.json"}
    assert written["figures/accuracy_entropy.png"][:4] == b"\x89PNG"
    assert written["figures/accuracy_entropy.pdf"][:4] == b"%PDF"
    assert "not distinguishable with 3 seeds" in printed and "note: 1 run: stopped by an alert" in printed
    assert not pd.read_csv(out / "figures" / "accuracy_entropy.csv").empty


def test_the_manifest_names_runs_versions_command_and_the_hash_of_every_file(sweep, tmp_path):
    made = export(sweep, ["accuracy_entropy"], ["svg"], tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {run["key"] for run in manifest["runs"]} == {path.name for path in (sweep / "runs").iterdir()}
    assert manifest["command"] == (
        "python -m analysis export demo --figures accuracy_entropy --formats svg --size double"
    )
    assert manifest["trained_with"]["torch"] == ["2.13.0"] and "matplotlib" in manifest["versions"]
    assert manifest["code_version"] == "0123456789ab" and manifest["verdict"] == made.verdict
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    assert set(manifest["files"]) | {"manifest.json"} == set(made.files) == set(files_in(tmp_path / "out"))


def test_two_exports_in_two_processes_are_the_same_bytes(sweep, tmp_path):
    for name, hash_seed in (("first", "1"), ("second", "2")):
        command = [sys.executable, "-m", "analysis", "export", str(sweep), *ONE, "--out", str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    first, second = files_in(tmp_path / "first"), files_in(tmp_path / "second")
    assert first == second and len(first) > 10


def test_by_default_the_figures_that_suit_the_sweep_go_into_its_own_folder(sweep):
    made = export(sweep, formats=["svg"])
    assert "figures/accuracy_entropy.svg" in made.files and made.folder == sweep and made.broken == []
    assert (sweep / "tables" / "differences.tex").is_file()


def test_every_mistake_is_named_at_once_and_nothing_is_written(sweep, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--figures", "pie,accuracy_entropy", "--formats", "jpg,png", "--size", "poster", "--out", str(out)]
    assert main(["export", str(sweep), *arguments]) == 2
    said = capsys.readouterr().err
    assert "pie is unknown" in said and "jpg is unknown" in said and "poster is unknown" in said
    assert "accuracy_entropy is unknown" not in said and not out.exists()


@pytest.mark.parametrize("kind", ["absent", "empty_folder", "no_events", "all_missing"])
def test_nothing_to_export_is_said_with_exit_code_2(tmp_path, capsys, kind):
    folder = tmp_path / "results" / "demo"
    arms = ("symmetric", "clip_higher")
    if kind == "empty_folder":
        folder.mkdir(parents=True)
    elif kind != "absent":
        fault = {"no_events": "empty", "all_missing": "missing"}[kind]
        make_results(folder, faults={(arm, seed): fault for arm in arms for seed in range(3)})
    assert main(["export", "demo", "--results", str(tmp_path / "results")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "demo" in said.err and "Traceback" not in said.err
    words = {"absent": "no such results folder", "no_events": "empty log", "all_missing": "not started yet"}
    assert words.get(kind, "no runs") in said.err


def test_a_sweep_with_a_run_of_every_fault_is_exported_and_each_fault_is_told(tmp_path):
    faults = {("clip_higher", seed): fault for seed, fault in enumerate(FAULTS)}
    folder = make_results(tmp_path / "demo", seeds=range(len(FAULTS)), faults=faults)
    made = export(folder, ["accuracy_entropy"], ["svg"])
    told = (folder / "verdict.md").read_text()
    assert made.broken == [] and len(made.notes) >= 8
    assert all(text in told for text in made.notes)


def test_every_figure_comes_out_of_the_thinnest_sweep(tmp_path):
    folder = make_results(tmp_path / "demo", arms=["symmetric"], seeds=[0], steps=1, eval_every=1)
    made = export(folder, ["all"], ["svg"])
    assert made.broken == [] and "figures/clip_objective.svg" in made.files


@pytest.mark.parametrize(
    "shape",
    [
        {"seeds": [0]},
        {"arms": ["symmetric"]},
        {"skip": [("clip_higher", 1), ("clip_higher", 2)]},
        {"plan": "none"},
        {"plan": "damaged"},
        {"faults": {(arm, seed): "no_entropy" for arm in ("symmetric", "clip_higher") for seed in range(3)}},
        {"faults": {(arm, seed): "nan" for arm in ("symmetric", "clip_higher") for seed in range(3)}},
        {"faults": {(arm, seed): "unfinished" for arm in ("symmetric", "clip_higher") for seed in range(3)}},
    ],
    ids=["one_seed", "one_arm", "unequal_seeds", "no_plan", "bad_plan", "no_entropy", "nan", "unfinished"],
)
def test_figure_and_tables_come_out_of_a_thin_sweep(tmp_path, shape):
    made = export(make_results(tmp_path / "demo", **shape), ["accuracy_entropy"], ["svg"])
    assert made.broken == [] and made.verdict


def test_a_figure_that_breaks_does_not_cost_the_others(sweep, tmp_path, monkeypatch, capsys):
    from analysis.figures import FIGURES, FigureSpec

    def broken(results, figure):
        raise KeyError("a bug")

    monkeypatch.setitem(FIGURES, "broken", FigureSpec("broken", broken, "Broken", ""))
    out = tmp_path / "out"
    assert main(["export", str(sweep), "--figures", "broken,accuracy_entropy", "--out", str(out)]) == 1
    assert "figure not drawn: broken: KeyError" in capsys.readouterr().out
    assert (out / "figures" / "accuracy_entropy.svg").is_file()
    assert json.loads((out / "manifest.json").read_text())["figures_not_drawn"] == ["broken: KeyError: 'a bug'"]


def test_a_place_that_cannot_be_written_to_is_named_without_a_traceback(sweep, tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    assert main(["export", str(sweep), *ONE, "--out", str(tmp_path / "taken")]) == 2
    assert "taken: File exists" in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    assert main(["exprot"]) == 2
    assert "choose export, report, diagnose, pull" in capsys.readouterr().err


def test_export_raises_the_projects_own_error(tmp_path):
    (tmp_path / "demo").mkdir()
    with pytest.raises(AnalysisError, match="nothing to export"):
        export(tmp_path / "demo")


def test_an_export_to_a_url_is_the_same_files_with_the_manifest_last(sweep, tmp_path, capsys, monkeypatch):
    import fsspec

    store = fsspec.filesystem("memory")
    order = []
    put = type(store).put_file
    monkeypatch.setattr(type(store), "put_file", lambda self, a, b, **k: (order.append(b), put(self, a, b, **k))[1])
    try:
        arguments = ["export", str(sweep), "--figures", "default", "--formats", "png", "--out"]
        assert main([*arguments, "memory://bucket/paper"]) == 0
        assert main([*arguments, str(tmp_path / "paper")]) == 0
        here = files_in(tmp_path / "paper")
        there = {name.removeprefix("/bucket/paper/"): store.cat_file(name) for name in store.find("/bucket/paper")}
        assert there == here
        assert order[-1].endswith("manifest.json")
        assert "files in memory://bucket/paper" in capsys.readouterr().out
    finally:
        store.rm("/bucket", recursive=True)


@pytest.mark.parametrize("url", ["nosuchstore://bucket", "s3://bucket/paper"])
def test_a_store_that_cannot_be_used_is_said_before_the_work(sweep, capsys, url, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert main(["export", str(sweep), "--out", url]) == 2
    said = capsys.readouterr()
    assert url in said.err and "Traceback" not in said.err and not said.out


def test_a_store_that_breaks_on_the_way_is_named_and_leaves_no_manifest(sweep, capsys, monkeypatch):
    import fsspec

    store = fsspec.filesystem("memory")

    def refuse(self, source, target, **more):
        raise PermissionError(13, "AccessDenied")

    monkeypatch.setattr(type(store), "put_file", refuse)
    assert main(["export", str(sweep), "--formats", "png", "--out", "memory://bucket/paper"]) == 2
    assert "AccessDenied" in capsys.readouterr().err
    assert not store.exists("/bucket/paper/manifest.json")
