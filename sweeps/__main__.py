"""`python -m sweeps`: look at sweeps and steer them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrl.errors import ReasonRLError
from reasonrl.events import EventLog
from sweeps.control import send
from sweeps.lock import live_holders
from sweeps.story import find, find_single, read_runs, single_lines, status_lines, sweeps_in, why_lines

WAIT_S = 30.0
VERBS = {
    "status": ("[NAME]", "how far every run is (also while it runs, and after)"),
    "why": ("RUN", "the story of one run, also a single one: overrides, alerts, evidence, what to try"),
    "stop": ("NAME|RUN", "end the sweep (runs write a checkpoint first), or one run for good"),
    "pause": ("NAME|RUN", "hold the sweep, or one run, at its next step"),
    "resume": ("NAME|RUN", "let it go on"),
    "retry": ("NAME|RUN", "put failed runs, or one, in line again"),
}
MORE = {
    "status": """Without NAME, one line for every sweep. A row has key, run, state, step, the last reward, entropy and
metric, and the alerts raised. States: waiting, running, paused, partial (will be continued), finished,
stopped (for a reason), failed.""",
    "stop": "The same command continues a stopped sweep; a run that was stopped by itself has ended for good.",
    "retry": "Also after the sweep has ended: then give its command again.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2 when it could not be carried out)."""
    # sweep.py takes results=DIR; the same spelling is understood here
    words = sys.argv[1:] if arguments is None else arguments
    args = _parser().parse_args(["--" + word if word.startswith("results=") else word for word in words])
    try:
        return {"status": _status, "why": _why, "retry": _retry}.get(args.verb, _steer)(args)
    except ReasonRLError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head
        return 0


def _parser() -> argparse.ArgumentParser:
    results: dict[str, Any] = {"type": Path, "metavar": "DIR", "help": "folder of all results (results)"}
    parser = argparse.ArgumentParser(prog="python -m sweeps", description="Look at sweeps and steer them.")
    parser.add_argument("--results", default=Path("results"), **results)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (metavar, text) in VERBS.items():
        described = f"{text[0].upper()}{text[1:]}. {MORE.get(verb, '')}"
        one = verbs.add_parser(verb, help=f"{metavar}: {text}", description=described)
        one.add_argument(
            "words", nargs="*", metavar=metavar.strip("[]"), help="name of a sweep, name of a run, or start of its key"
        )
        one.add_argument("--results", default=argparse.SUPPRESS, **results)
    return parser


def _status(args: argparse.Namespace) -> int:
    folders = sweeps_in(args.results) if not args.words else [find(args.results, args.words)[0]]
    if not folders:
        raise ReasonRLError(f"There is no sweep in {args.results}.")
    for folder in folders:
        for line in status_lines(folder):
            print(line)
            if not args.words:
                break
    return 0


def _why(args: argparse.Namespace) -> int:
    single = find_single(args.results, args.words)
    if single is not None:
        for line in single_lines(single):
            print(line)
        return 0
    if not args.words:
        raise ReasonRLError("Name a run, or its key: python -m sweeps status NAME lists them.")
    folder, key = find(args.results, args.words)
    if key is None:
        raise ReasonRLError(f"Name a run, or its key; they are in: python -m sweeps status {folder.name}")
    for line in why_lines(folder, key):
        print(line)
    return 0


def _steer(args: argparse.Namespace) -> int:
    folder, key = find(args.results, args.words)
    holders = live_holders(folder)
    if not holders:
        raise ReasonRLError(f"No coordinator works on {folder.name}: there is nothing to {args.verb}.")
    send(folder, args.verb, key)
    print(f"{args.verb} {key or folder.name}: told {' and '.join(holder.describe() for holder in holders)}")
    if args.verb == "stop" and key is None:
        return _wait_for_end(folder)
    return 0


def _wait_for_end(folder: Path) -> int:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if not live_holders(folder):
            print("it has ended; the same command continues the sweep")
            return 0
        time.sleep(0.2)
    print(f"it has not ended within {WAIT_S:.0f} s: runs are still writing checkpoints")
    return 0


def _retry(args: argparse.Namespace) -> int:
    folder, key = find(args.results, args.words)
    if live_holders(folder):
        return _steer(args)
    runs = read_runs(folder)
    failed = [run for run in runs.values() if run.status == "failed" and key in (None, run.key)]
    if not failed:
        ended = [run for run in runs.values() if key == run.key and run.status == "stopped"]
        why = "it was stopped, which is an end" if ended else "no failed run"
        raise ReasonRLError(f"{key or folder.name}: {why}, nothing to try again.")
    for run in failed:
        log = EventLog(folder / "runs" / run.key / "events.jsonl")
        log.append({"type": "retry", "time": time.time()}, sync=True)
        log.close()
    print(f"{len(failed)} run(s) are in line again; start the sweep with the same command")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
