"""One self-contained page per sweep: question, verdict, figures, tables, stopped runs, cost, environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from analysis.export import export
from analysis.figures.curves import shown_arms
from analysis.load import Results, load
from analysis.report import answer, content, stopped
from analysis.report.answer import compare_all
from analysis.report.blocks import Report, Section, Text
from analysis.report.figures import figures_section
from analysis.report.html import to_html
from analysis.report.markdown import to_markdown
from reasonrl.errors import AnalysisError

FORMATS = {"html": to_html, "md": to_markdown}


def build(results: Results, figures: Sequence[str] | None = None) -> Report:
    """The report of a sweep as blocks; `figures` are names of figures, default those that fit the sweep."""
    compared = cache(lambda: compare_all(results))
    parts: list[tuple[str, str, Callable[[], Section]]] = [
        ("verdict", "Verdict", lambda: answer.verdict_section(results, compared())),
        ("figures", "Figures", lambda: figures_section(results, figures)),
        ("tables", "Tables", lambda: answer.tables_section(results, compared())),
        ("stopped", "Stopped runs", lambda: stopped.stopped_section(results)),
        ("plan", "Plan", lambda: content.plan_section(results)),
        ("config", "Configuration", lambda: content.differences_section(results)),
        ("alerts", "Alerts", lambda: stopped.alerts_section(results)),
        ("completions", "Completions", lambda: stopped.completions_section(results)),
        ("cost", "Cost", lambda: content.cost_section(results)),
        ("environment", "Environment", lambda: content.environment_section(results)),
    ]
    question = str(results.plan.get("question") or "")
    sections = [_guarded(*part) for part in parts]
    return Report(results.name, question, content.state_line(results), sections, shown_arms(results))


def _guarded(anchor: str, title: str, make: Callable[[], Section]) -> Section:
    """A section, or in its place a note on why it could not be made: one damaged record must not cost the page."""
    try:
        return make()
    except Exception as error:
        return Section(anchor, title, [Text(f"Could not be made ({type(error).__name__}: {error}).", "note")])


def write_report(
    folder: Path,
    format: str = "html",
    out: Path | None = None,
    figures: Sequence[str] | None = None,
    results: Results | None = None,
) -> Path:
    """Write the report of a results folder (default `folder/report.html` or `.md`) and return its path.

    AnalysisError for an unknown format, a folder that is not there, and one with neither runs nor a plan;
    everything else that is missing is said in the report.
    """
    if format not in FORMATS:
        raise AnalysisError(f"format={format}: choose {' or '.join(FORMATS)}.")
    results = load(folder) if results is None else results
    if results.runs.empty and not results.plan:
        raise AnalysisError(f"{folder} holds no results: neither runs nor a plan.json.")
    path = out or folder / f"report.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FORMATS[format](build(results, figures)), encoding="utf-8")
    return path


def finish(sweep_dir: Path) -> Path:
    """What happens at the end of a sweep: default figures and tables, report.html, and the verdict printed.

    Returns the path of the report; a sweep in which nothing was recorded still gets one that says so.
    """
    results = load(sweep_dir)
    try:
        made = export(sweep_dir, results=results)
    except AnalysisError as error:
        print(error)
    else:
        print("\n".join(made.verdict))
        for text in made.broken:
            print(f"figure not drawn: {text}")
    path = write_report(sweep_dir, results=results)
    print(f"Report: {path}")
    return path
