"""Figures, their numbers, tables and a manifest into a folder; the same runs give the same bytes.

python -m analysis export clip_ablation --figures all --formats pdf,png,svg --out paper/
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.compare import compare, compare_problems
from analysis.load import Results, find, load
from analysis.remote import is_url, open_store, upload
from analysis.tables import make_tables
from analysis.verdict import verdict
from reasonrl.errors import AnalysisError

FORMATS = ("pdf", "png", "svg")
SIZES = ("single", "double")
SEED = 0  # of the bootstrap: the same runs give the same intervals
_LIBRARIES = ("numpy", "pandas", "scipy", "pyarrow", "matplotlib")


@dataclass
class Exported:
    """What was written: folder, files (relative, sorted), the verdict, the notes, and figures that broke."""

    folder: Path | str
    files: list[str]
    verdict: list[str]
    notes: list[str]
    broken: list[str] = field(default_factory=list)


def export(
    folder: Path,
    figures: Sequence[str] = ("default",),
    formats: Sequence[str] = FORMATS,
    out: Path | None = None,
    size: str = "double",
    results: Results | None = None,
) -> Exported:
    """Write figures/NAME.{pdf,png,svg,csv}, tables/NAME.{csv,md,tex}, verdict.md and manifest.json under `out`.

    `figures` are names, or "all", or "default" (those that suit the sweep); `out` is the results folder unless
    given. AnalysisError for unknown names (all of them at once) and when no run has recorded anything.
    """
    from analysis.figures import FIGURES

    names = _check(figures, formats, size, list(FIGURES))
    results = load(folder) if results is None else results
    if results.rows.empty and results.evals.empty:
        because = " ".join(results.notes) or "There are no runs."
        raise AnalysisError(f"{folder}: nothing to export, no run has recorded a step or an evaluation. {because}")
    out = folder if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    chosen = [n for n in FIGURES if names == ["all"] or n in names or _by_default(names, FIGURES[n], results)]
    rng = np.random.default_rng(SEED)
    comparisons, problems = compare(results, rng), compare_problems(results, rng)
    sentences = verdict(results, comparisons)
    files: list[Path] = []
    broken: list[str] = []
    figure_facts: dict[str, Any] = {}
    for name in chosen:
        try:
            files += _write_figure(FIGURES[name], results, out / "figures" / name, formats, size)
            figure_facts[name] = {"title": FIGURES[name].title, "caption": FIGURES[name].caption}
        except AnalysisError as error:
            broken.append(f"{name}: {error}")
        except Exception as error:  # one figure that breaks must not cost the others
            broken.append(f"{name}: {type(error).__name__}: {error}")
    for table in make_tables(results, comparisons, problems):
        files += table.save(out / "tables")
    files.append(_write(out / "verdict.md", _verdict_text(results, sentences)))
    command = _command(results, figures, formats, size)
    manifest = _manifest(results, sentences, figure_facts, files, out, command, broken)
    files.append(_write(out / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n"))
    return Exported(out, sorted(_relative(files, out)), sentences, list(results.notes), broken)


def _check(figures: Sequence[str], formats: Sequence[str], size: str, known: list[str]) -> list[str]:
    """The wanted figure names; every mistake in names, formats and size at once."""
    names = [name.strip() for name in figures if name.strip()] or ["default"]
    mistakes = [
        f"--figures: {name} is unknown; choose all, default or some of {', '.join(known)}."
        for name in names
        if name not in (*known, "all", "default")
    ]
    mistakes += [
        f"--formats: {format} is unknown; choose some of {', '.join(FORMATS)}."
        for format in formats
        if format not in FORMATS
    ]
    if not formats:
        mistakes.append(f"--formats: none given; choose some of {', '.join(FORMATS)}.")
    if size not in SIZES:
        mistakes.append(f"--size: {size} is unknown; choose {' or '.join(SIZES)}.")
    if mistakes:
        raise AnalysisError("\n".join(mistakes))
    return ["all"] if "all" in names else names


def _by_default(names: list[str], spec: Any, results: Results) -> bool:
    return "default" in names and bool(spec.default_for(results))


def _write_figure(spec: Any, results: Results, stem: Path, formats: Sequence[str], size: str) -> list[Path]:
    from analysis.style import save

    figure, numbers = spec.draw(results, size)
    paths = save(figure, stem, formats)
    text = numbers.to_csv(index=False, float_format="%.10g", lineterminator="\n")
    return [*paths, _write(stem.with_name(f"{stem.name}.csv"), text)]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def _verdict_text(results: Results, sentences: Sequence[str]) -> str:
    question = str(results.plan.get("question") or "").strip()
    lines = [f"# {results.name}", ""] + ([question, ""] if question else [])
    lines += [f"- {sentence}" for sentence in sentences]
    if results.notes:
        lines += ["", "Notes on the data:", "", *(f"- {note}" for note in results.notes)]
    return "\n".join(lines) + "\n"


def _command(results: Results, figures: Sequence[str], formats: Sequence[str], size: str) -> str:
    # Without --out: the same export into two folders is the same export.
    chosen = f"--figures {','.join(figures)} --formats {','.join(formats)}"
    return f"python -m analysis export {results.path.name} {chosen} --size {size}"


def _manifest(
    results: Results,
    sentences: Sequence[str],
    figures: dict[str, Any],
    files: Sequence[Path],
    out: Path,
    command: str,
    broken: Sequence[str],
) -> dict[str, Any]:
    columns = ["key", "name", "arm", "seed", "stage", "parent", "status", "outcome", "steps_done", "steps_planned"]
    columns += ["reason_code"]
    return {
        "sweep": results.name,
        "question": str(results.plan.get("question") or ""),
        "command": command,
        "code_version": str(results.plan.get("code_version") or ""),
        "versions": {"python": platform.python_version(), "reasonrl": _own_version(), **_library_versions()},
        "trained_with": results.versions,
        "bootstrap_seed": SEED,
        "verdict": list(sentences),
        "notes": list(results.notes),
        "figures": figures,
        "figures_not_drawn": list(broken),
        "runs": json.loads(results.runs[columns].to_json(orient="records")),
        "files": {
            name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in sorted(_relative(files, out))
        },
    }


def _relative(files: Sequence[Path], out: Path) -> list[str]:
    return [path.relative_to(out).as_posix() for path in files]


def _own_version() -> str:
    import reasonrl

    return str(getattr(reasonrl, "__version__", "unknown"))


def _library_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `export`; returns 0, or 1 when a figure could not be drawn. AnalysisError is left to the caller."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis export",
        description="Write figures with their numbers, tables, the verdict and a manifest of a sweep.",
    )
    parser.add_argument("name", help="a sweep in the results folder, or the path of its folder")
    parser.add_argument("--figures", default="default", help="all, default (what suits the sweep), or names, by commas")
    parser.add_argument("--formats", default=",".join(FORMATS), help="some of pdf,png,svg (default: all three)")
    parser.add_argument("--out", help="folder or URL (s3://, gs://) to write to (default: the results folder itself)")
    parser.add_argument("--size", default="double", help="single or double: the column width of the figures")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results folders")
    args = parser.parse_args(arguments)
    sweep, names, formats = find(args.name, args.results), _split(args.figures), _split(args.formats)
    if args.out and is_url(args.out):
        store = open_store(args.out)  # before the work
        with tempfile.TemporaryDirectory() as folder:
            made = export(sweep, names, formats, Path(folder), size=args.size)
            upload(Path(folder), made.files, store)
        made.folder = args.out
    else:
        made = export(sweep, names, formats, Path(args.out) if args.out else None, size=args.size)
    for sentence in made.verdict:
        print(sentence)
    for note in made.notes:
        print(f"note: {note}")
    for text in made.broken:
        print(f"figure not drawn: {text}")
    print(f"{len(made.files)} files in {made.folder}")
    return 1 if made.broken else 0


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
