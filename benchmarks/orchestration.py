"""What the coordinator costs: overhead per trial, idle slots, memory; and the same trials under two peers.

    python benchmarks/orchestration.py overhead --trials 100,1000,10000
    python benchmarks/orchestration.py idle --trials 40
    python benchmarks/orchestration.py peers --trials 100      # in virtual environments of their own (network)

overhead: trials that do nothing (one step, one evaluation). "per trial" is the time from the first start to the last
end, times the slots, divided by the trials: what a slot spends on a trial that costs nothing. "first" and "last" are
the same over the first and last tenth of the trials: growth would show there. "CPU ms" is what the coordinator alone
computes per trial, start-up included, which a busy machine changes little.
idle: trials that sleep 0.1 to 2 s (the same lengths for everyone); the share of slot time that was not slept, from
the first start to the moment the last trial starts (after that, slots run out of work under any scheduler), and to
the end. "batches" is what a scheduler that waits for whole batches would leave idle, by arithmetic.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHORTEST_S, LONGEST_S = 0.1, 2.0
PEERS = {
    "hydra": ["hydra-core==1.3.8", "hydra-optuna-sweeper==1.3.0", "hydra-joblib-launcher==1.2.0", "setuptools<81"],
    "ray": ["ray[tune]>=2.40"],
}

HYDRA_APP = """
import json, sys, time
import hydra
from omegaconf import DictConfig

@hydra.main(version_base=None, config_path=None)
def main(cfg: DictConfig) -> float:
    lengths = json.load(open({lengths!r}))
    index = int(cfg.x)
    began = time.time()
    time.sleep(lengths[index % len(lengths)])
    with open({log!r}, "a") as file:
        file.write(json.dumps([began, time.time()]) + "\\n")
    return 0.0

main()
"""

RAY_APP = """
import json, logging, os, time
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
import ray
from ray import tune

lengths = json.load(open({lengths!r}))

def trial(config):
    began = time.time()
    time.sleep(lengths[config["index"]])
    with open({log!r}, "a") as file:
        file.write(json.dumps([began, time.time()]) + "\\n")
    return {{"value": 0.0}}

ray.init(address="local", num_cpus={slots}, logging_level=logging.ERROR, include_dashboard=False)
tune.Tuner(
    trial,
    param_space={{"index": tune.grid_search(list(range(len(lengths))))}},
    run_config=tune.RunConfig(storage_path={folder!r}, verbose=0),
).fit()
"""


def ours(lengths: Sequence[float], slots: int, folder: Path) -> list[tuple[float, float]]:
    """(start, end) of every trial under this project's coordinator, oldest start first; seconds since the epoch."""
    from sweeps import summary
    from sweeps.ledger import read_ledger
    from sweeps.runner import run
    from tests.fakes import base_config, make_plan

    summary.make_report = lambda sweep: None  # type: ignore[assignment]
    base = {**base_config(1), "eval": {"every": 1}, "checkpoint": {"every": 1, "keep": 1}}
    scripts = {("a", index): {"sleep": length} for index, length in enumerate(lengths) if length}
    plan = make_plan(
        folder / "ours", {"a": {}}, seeds=range(len(lengths)), steps=1, base=base, seed_scripts=scripts,
        engine={"slots": slots},
    )  # fmt: skip
    for run_spec in plan.runs:  # one configuration per trial: a study with as many trials
        run_spec.arm = f"a{run_spec.seed}"
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(plan)
    assert code == 0
    begun: dict[str, float] = {}
    spans = []
    for entry in read_ledger(plan.directory):
        if entry["type"] == "start":
            begun[entry["key"]] = entry["time"]
        elif entry["type"] == "finished":
            spans.append((begun[entry["key"]], entry["time"]))
    return sorted(spans)


def per_trial(spans: Sequence[tuple[float, float]], slots: int) -> tuple[float, float, float]:
    """Slot seconds per trial over all trials, over the first tenth, and over the last tenth."""

    def cost(part: Sequence[tuple[float, float]]) -> float:
        return (max(end for _, end in part) - min(start for start, _ in part)) * slots / len(part)

    tenth = max(2, len(spans) // 10)
    return cost(spans), cost(spans[:tenth]), cost(spans[-tenth:])


def idle_share(spans: Sequence[tuple[float, float]], lengths: Sequence[float], slots: int) -> tuple[float, float]:
    """Share of slot time not slept: up to the last start, and up to the last end."""
    first, last_start, last_end = spans[0][0], max(s for s, _ in spans), max(e for _, e in spans)
    useful = sum(min(end, last_start) - start for start, end in spans)
    overhead = sum(end - start for start, end in spans) - sum(lengths)
    whole = (last_end - first) * slots
    until = (last_start - first) * slots
    return 1 - (useful - overhead) / until if until else 0.0, 1 - sum(lengths) / whole


def batch_idle(lengths: Sequence[float], slots: int) -> float:
    """Share of slot time idle when every batch of `slots` trials waits for its longest."""
    batches = [lengths[index : index + slots] for index in range(0, len(lengths), slots)]
    return 1 - sum(lengths) / (slots * sum(max(batch) for batch in batches))


def draw_lengths(count: int, seed: int = 0) -> list[float]:
    """Uneven trial lengths in seconds."""
    dice = random.Random(seed)
    return [round(dice.uniform(SHORTEST_S, LONGEST_S), 3) for _ in range(count)]


def overhead(counts: Sequence[int], slots: int) -> None:
    """Print the cost of trials that do nothing; every count in a process of its own, so that memory is its own."""
    print(f"{'trials':>8} {'ms/trial':>9} {'first':>7} {'last':>7} {'CPU ms':>7} {'peak MB':>8} {'total s':>8}")
    for count in counts:
        command = [sys.executable, __file__, "one", "--trials", str(count), "--slots", str(slots)]
        print(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip())


def one(count: int, slots: int) -> None:
    """One line of `overhead`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        spans = ours([0.0] * count, slots, Path(folder))
    mean, first, last = (1000 * value for value in per_trial(spans, slots))
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu, peak = 1000 * (used.ru_utime + used.ru_stime) / count, used.ru_maxrss / 1024
    seconds = time.monotonic() - began
    print(f"{count:>8} {mean:>9.1f} {first:>7.1f} {last:>7.1f} {cpu:>7.1f} {peak:>8.0f} {seconds:>8.1f}")


def idle(count: int, slots: int) -> None:
    """Print how much slot time is lost with trials of uneven length."""
    lengths = draw_lengths(count)
    with tempfile.TemporaryDirectory() as folder:
        until, whole = idle_share(ours(lengths, slots, Path(folder)), lengths, slots)
    print(f"idle slot time, {count} trials of {SHORTEST_S} to {LONGEST_S} s on {slots} slots")
    print(f"  ours     {100 * until:5.1f} %  (to the very end {100 * whole:.1f} %)")
    print(f"  batches  {100 * batch_idle(lengths, slots):5.1f} %  (arithmetic)")


def peer(name: str, lengths: Sequence[float], slots: int, folder: Path, venv: Path) -> list[tuple[float, float]]:
    """(start, end) of the same trials under a peer in its own virtual environment."""
    (folder / "lengths.json").write_text(json.dumps(list(lengths)))
    log = folder / f"{name}.jsonl"
    values = {"lengths": str(folder / "lengths.json"), "log": str(log), "slots": slots, "folder": str(folder)}
    app = folder / f"{name}_app.py"
    app.write_text((HYDRA_APP if name == "hydra" else RAY_APP).format(**values))
    command = [str(venv / "bin" / "python"), str(app)]
    if name == "hydra":
        command += ["-m", "hydra/sweeper=optuna", "hydra/launcher=joblib", f"hydra.launcher.n_jobs={slots}"]
        command += [f"hydra.sweeper.n_trials={len(lengths)}", f"hydra.sweeper.n_jobs={slots}"]
        command += [f"+x=range(0,{len(lengths)})", "hydra.output_subdir=null"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
    if done.returncode or not log.exists():
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return sorted((start, end) for start, end in map(json.loads, log.read_text().splitlines()))


def peers(count: int, slots: int, cache: Path) -> None:
    """Print overhead and idle share of every peer beside ours."""
    lengths = draw_lengths(max(8, count // 4))
    print(f"{'':8} {'ms/trial (nothing)':>19} {'idle % (uneven)':>16}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nothing = ours([0.0] * count, slots, folder / "a")
        uneven = ours(lengths, slots, folder / "b")
        _print_peer("ours", nothing, uneven, lengths, slots)
        for rival, packages in PEERS.items():
            venv = cache / rival
            done, wanted = venv / "done", " ".join(packages)
            if not done.exists() or done.read_text() != wanted:
                subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
                subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", *packages], check=True)
                done.write_text(wanted)
            for part in ("a", "b"):
                (folder / rival / part).mkdir(parents=True)
            nothing = peer(rival, [0.0] * count, slots, folder / rival / "a", venv)
            uneven = peer(rival, lengths, slots, folder / rival / "b", venv)
            _print_peer(rival, nothing, uneven, lengths, slots)


def _print_peer(
    name: str, nothing: Sequence[tuple[float, float]], uneven: Sequence[tuple[float, float]], lengths: Sequence[float],
    slots: int,
) -> None:  # fmt: skip
    until, _ = idle_share(uneven, lengths, slots)
    print(f"{name:8} {1000 * per_trial(nothing, slots)[0]:>19.1f} {100 * until:>16.1f}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "idle", "peers", "one"])
    parser.add_argument("--trials", default="100", help="how many; several, separated by commas, for overhead")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "reasonrl" / "peers")
    args = parser.parse_args()
    counts = [int(text) for text in args.trials.split(",")]
    if args.what == "overhead":
        overhead(counts, args.slots)
    elif args.what == "one":
        one(counts[0], args.slots)
    elif args.what == "idle":
        idle(counts[0], args.slots)
    else:
        peers(counts[0], args.slots, args.cache)


if __name__ == "__main__":
    main()
