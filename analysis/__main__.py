"""`python -m analysis COMMAND ...`; each command lives in its own module, imported when asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reasonrl.errors import ReasonRLError

Command = Callable[[Sequence[str]], int]


def report(arguments: Sequence[str]) -> int:
    """The command `report`: one self-contained page, or Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis report",
        description="Write one self-contained page on a sweep: verdict, figures, tables, stopped runs, cost.",
    )
    parser.add_argument("name", help="a sweep in the results folder, or the path of its folder")
    parser.add_argument("--format", default="html", help="html or md")
    parser.add_argument("--out", type=Path, help="file to write (default: report.html or report.md in the folder)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results folders")
    args = parser.parse_args(arguments)
    from analysis.load import find
    from analysis.report import write_report

    print(write_report(find(args.name, args.results), args.format, args.out))
    return 0


def diagnose(arguments: Sequence[str]) -> int:
    """The command `diagnose`: the alert rules on a finished run or on another trainer's log."""
    from analysis import diagnose as module

    parser = argparse.ArgumentParser(prog="python -m analysis")
    module.add_parser(parser.add_subparsers())
    args = parser.parse_args(["diagnose", *arguments])
    return int(args.main(args))


def _in(module: str) -> Command:
    return lambda arguments: int(importlib.import_module(module).main(arguments))


COMMANDS: dict[str, tuple[Command, str]] = {
    "export": (_in("analysis.export"), "figures with their numbers, tables and a manifest of a sweep"),
    "report": (report, "one self-contained page (or Markdown) on a sweep"),
    "diagnose": (diagnose, "the alerts on a finished run or on another trainer's log"),
    "pull": (_in("analysis.wandb_source"), "runs of Weights & Biases, or its offline folders, as a results folder"),
}


def usage() -> str:
    """The commands, one a line."""
    lines = [f"  {name:<9} {words}" for name, (_, words) in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m analysis COMMAND ...", "", "commands:", *lines, "", "COMMAND --help says more."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 done in part, 2 nothing could be done (and why, without a traceback)."""
    words = sys.argv[1:] if arguments is None else arguments
    # sweep.py takes results=DIR; the same spelling is understood here
    given = ["--" + word if word.startswith("results=") else word for word in words]
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else 2
    name, *rest = given
    if name not in COMMANDS:
        print(f"{name}: unknown command; choose {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name][0](rest)
    except ReasonRLError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into `head`: what it wanted it has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that cannot be written to
        print(f"{error.filename or name}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
