"""How long `analysis.load` takes: cold (no cache), warm, and after a few logs grew.

    python benchmarks/load.py --runs 1000 --rows 1000

Writes synthetic event logs with the full set of metrics at full precision into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests")]

from make_results import events, make_results  # noqa: E402

from analysis.load import load  # noqa: E402
from reasonrl.events import encode_line  # noqa: E402

DISTINCT = 8  # different logs that are written; the others repeat their numbers under other keys


def write(folder: Path, runs: int, rows: int) -> int:
    """Write `runs` logs of `rows` step events and return their size in bytes."""
    from sweeps.types import Plan

    make_results(folder, arms=["symmetric"], seeds=range(runs), steps=rows, eval_every=rows, faults=_none(runs))
    plan = Plan.from_json((folder / "plan.json").read_text())
    rng = np.random.default_rng(0)
    bodies: list[bytes] = []
    size = 0
    for index, spec in enumerate(plan.runs):
        if index < DISTINCT:
            log = events(spec)
            for event in log:
                if event["type"] == "step":
                    event["metrics"] = {k: v + 1e-9 * rng.random() for k, v in event["metrics"].items()}
            bodies.append("".join(encode_line(event) for event in log if event["type"] != "start").encode())
        start = {"type": "start", "time": 1.7e9, "key": spec.key, "arm": spec.arm, "seed": spec.seed}
        data = encode_line(start | {"steps": rows, "config": spec.config}).encode() + bodies[index % DISTINCT]
        (folder / "runs" / spec.key).mkdir(parents=True)
        (folder / "runs" / spec.key / "events.jsonl").write_bytes(data)
        size += len(data)
    return size


def _none(runs: int) -> dict[tuple[str, int], str]:
    return {("symmetric", seed): "missing" for seed in range(runs)}


def main() -> None:
    """Print one JSON object with the sizes and the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="reasonrl-load-"))
    try:
        size = write(home / "sweep", args.runs, args.rows)
        out: dict[str, float] = {"runs": args.runs, "rows": args.rows, "megabytes": round(size / 1e6)}
        for name in ("no_cache", "cold", "warm", "four_logs_grew"):
            if name == "four_logs_grew":
                for log in sorted(home.glob("sweep/runs/*/events.jsonl"))[:4]:
                    with log.open("ab") as file:
                        file.write(b'{"type":"step","time":1.8e9,"step":1000000,"metrics":{"reward/total":1.0}}\n')
            began, cpu = time.perf_counter(), time.process_time()
            results = load(home / "sweep", cache=name != "no_cache")
            out[f"{name}_s"] = round(time.perf_counter() - began, 2)
            out[f"{name}_cpu_s"] = round(time.process_time() - cpu, 2)
        out |= {"table_rows": len(results.rows), "metrics": results.rows.shape[1] - 5}
        print(json.dumps(out, indent=1))
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
