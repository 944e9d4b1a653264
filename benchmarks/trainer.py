"""The same job in this trainer and in TRL's GRPOTrainer, side by side.

    python benchmarks/trainer.py --trl-python VENV/bin/python --job tiny --out trainer_tiny.json
    python benchmarks/trainer.py --trl-python VENV/bin/python --job small --model MODEL_DIR --data gsm8k.jsonl

Job `tiny`: the built-in model, 32 x 8 rollouts of up to 48 tokens, 4 updates, one thread. Job `small`: a Hugging
Face model (SmolLM2-135M), 4 x 8 rollouts of up to 64 tokens, 4 updates, two threads, each trainer in the dtype that
is fastest for it. Same weights, prompts, order of prompts, reward, group size, limits, updates, learning rate.
Every run is a process of its own; the two trainers alternate. The rewards are compared at the end: if the two did
not learn alike, the comparison is void and says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

RUNS = Path(__file__).with_name("trainer_runs.py")
UPDATES = 4
GROUP_SIZE = 8
JOBS: dict[str, dict[str, Any]] = {
    "tiny": {"prompts": 32, "max_new_tokens": 48, "threads": 1, "lr": 1e-4, "measured": 25},
    "small": {"prompts": 4, "max_new_tokens": 64, "threads": 2, "lr": 2e-5, "measured": 10},
}
DTYPES = {"ours": ("float32", "bfloat16"), "trl": ("float32", "bfloat16", "autocast")}
TOLERANCE = 3.0  # standard errors that the mean rewards may differ by


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--job", choices=tuple(JOBS), default="tiny")
    parser.add_argument("--model", help="job small: folder of the model in Hugging Face form")
    parser.add_argument("--data", help="job small: JSON lines with question and answer; default: own word problems")
    parser.add_argument("--reward", choices=("correct", "digits"), help="default: correct (tiny), digits (small)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="rollout steps left out of every run")
    parser.add_argument("--measured", type=int, help="rollout steps measured in every run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--ours-dtype", choices=("auto", *DTYPES["ours"]), help="default: float32 (tiny), auto (small)")
    parser.add_argument("--trl-dtype", choices=("auto", *DTYPES["trl"]), help="default: float32 (tiny), auto (small)")
    parser.add_argument("--trl-checkpointing", action="store_true", help="leave TRL's gradient checkpointing on")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds one run may take")
    parser.add_argument("--out", default="trainer.json")
    options = parser.parse_args()
    if options.job == "small" and not options.model:
        parser.error("--job small needs --model DIR")
    options.reward = options.reward or {"tiny": "correct", "small": "digits"}[options.job]
    return options


def word_problems(path: Path, count: int = 400) -> None:
    """Write easy word problems as JSON lines: one sum or difference each."""
    from reasonrl.randomness import stream

    rng = stream("word problems")
    people, things = ("Anna", "Ben", "Carla", "Daniel"), ("apples", "books", "coins", "stamps")
    lines = []
    for _ in range(count):
        a, b = int(rng.integers(3, 40)), int(rng.integers(1, 30))
        who, what = people[rng.integers(4)], things[rng.integers(4)]
        more = bool(rng.integers(2))
        story = f"buys {b} more" if more else f"gives {min(b, a)} away"
        question = f"{who} has {a} {what} and {story}. How many {what} does {who} have now?"
        lines.append(json.dumps({"question": question, "answer": str(a + b if more else a - min(b, a))}))
    path.write_text("\n".join(lines) + "\n")


def job_config(options: argparse.Namespace, spec: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return the configuration of this trainer, as plain values, without model, seed and dtype."""
    task: dict[str, Any] = {"kind": "arithmetic"}
    if options.job == "small":
        data = Path(options.data).resolve() if options.data else home / "problems.jsonl"
        if not options.data:
            word_problems(data)
        task = {"kind": "records", "path": str(data)}
    config = {
        "quiet": True,
        "task": task,
        "data": {"prompts_per_step": spec["prompts"]},
        "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": spec["max_new_tokens"]},
        "optim": {"lr": spec["lr"], "warmup_steps": 0, "minibatches": UPDATES, "inner_epochs": 1},
        "eval": {"every": 0, "problems": 1, "samples": 1, "max_new_tokens": 1},
        "checkpoint": {"every": 0},
        "alerts": {"on_stop": "continue"},
    }
    if options.reward == "digits":
        config["reward"] = {"parts": {"digits": {"function": "trainer_runs.digit_share"}}}
    return config


def make_job(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Return everything the runs of this job share."""
    from transformers import AutoTokenizer

    from reasonrl.models import ModelConfig
    from reasonrl.models.tiny import base_model_dir

    given = {name: getattr(options, name) for name in ("measured", "threads", "lr")}
    spec = JOBS[options.job] | {name: value for name, value in given.items() if value is not None}
    # all rows worked out, so that every seed learns from the first step on
    model = str(Path(options.model).resolve()) if options.model else ""
    if options.job == "tiny":
        model = str(base_model_dir(ModelConfig(careful=1.0, noise=0.2), [4, 5, 6]))
    config = job_config(options, spec, home)
    config["model"] = {"kind": "hf", "path": model}
    return {
        "job": options.job,
        "model": model,
        "reward": options.reward,
        "config": config,
        "warmup": options.warmup,
        "measured": spec["measured"],
        "threads": spec["threads"],
        "lr": spec["lr"],
        "rows": spec["prompts"] * GROUP_SIZE,
        "prompts": spec["prompts"],
        "group_size": GROUP_SIZE,
        "max_new_tokens": spec["max_new_tokens"],
        "updates": UPDATES,
        "gradient_checkpointing": options.trl_checkpointing,
        "eos_ids": [AutoTokenizer.from_pretrained(model).eos_token_id],
        "count_flops": False,
    }


def for_seed(job: dict[str, Any], seed: int, dtype: str, measured: int) -> dict[str, Any]:
    """Return the job of one run, with the very problems it will visit, in order."""
    from reasonrl.data import ProblemStream
    from reasonrl.tasks import TaskConfig, load_task

    steps = job["warmup"] + measured + 1  # the last one ends the time of the one before
    problems = ProblemStream(load_task(TaskConfig(**job["config"]["task"]), seed), seed).take(steps * job["prompts"])
    config = {**job["config"], "seed": seed, "steps": steps}
    config["model"] = {**config["model"], "dtype": "float32" if dtype == "autocast" else dtype}
    return {
        **job,
        "seed": seed,
        "steps": steps,
        "measured": measured,
        "dtype": dtype,
        "config": config,
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def run(kind: str, python: str, job: dict[str, Any], home: Path, timeout: float) -> dict[str, Any]:
    """Run one process and return its result; raises SystemExit with the end of its output when it fails."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=home))
    paths = [scratch / name for name in ("job.json", "result.json", "output.txt")]
    threads = str(job["threads"])
    env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with paths[2].open("w") as output:
        paths[0].write_text(json.dumps({**job, "scratch": str(scratch / "run"), "started": time.time()}))
        command = [python, str(RUNS), kind, str(paths[0]), str(paths[1])]
        code = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=timeout).returncode
    if code:
        sys.exit(f"The {kind} run ended with code {code}:\n{paths[2].read_text()[-3000:]}")
    return json.loads(paths[1].read_text())


def choose_dtype(
    kind: str, python: str, wanted: str, job: dict[str, Any], home: Path, timeout: float, emulated: bool
) -> dict[str, Any]:
    """Return the wanted dtype, or with `auto` the one with the shortest rollout step, and what was tried.

    A machine that only emulates bfloat16 (its products are slower than float32's) is not asked to try it.
    """
    if wanted != "auto" or emulated:
        return {"chosen": "float32" if wanted == "auto" else wanted, "tried_step_s": {}, "bfloat16_emulated": emulated}
    tried: dict[str, float] = {}
    for dtype in DTYPES[kind]:
        result = run(kind, python, for_seed(job, 0, dtype, 1), home, timeout)
        tried[dtype] = result["step_s"][0]
        print(f"  {kind} {dtype}: {tried[dtype]:.2f} s per rollout step", flush=True)
    chosen = min(tried, key=lambda name: tried[name])
    return {"chosen": chosen, "tried_step_s": tried, "bfloat16_emulated": False}


def learning(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare the mean reward of the last third of the steps, and say whether both learned, and alike.

    The standard error of a trainer's mean takes the larger of the spread between seeds and that between steps.
    """
    out: dict[str, Any] = {}
    for kind, results in runs.items():
        third = max(len(results[0]["reward"]) // 3, 1)
        firsts = [statistics.mean(result["reward"][:third]) for result in results]
        lasts = [statistics.mean(result["reward"][-third:]) for result in results]
        steps = [statistics.variance(result["reward"][-third:]) / third if third > 1 else 0.0 for result in results]
        between = statistics.variance(lasts) if len(lasts) > 1 else 0.0
        error = math.sqrt(max(between, statistics.mean(steps)) / len(lasts))
        out[kind] = {"first": statistics.mean(firsts), "last": statistics.mean(lasts), "standard_error": error}
    error = math.hypot(out["ours"]["standard_error"], out["trl"]["standard_error"])
    out["difference"] = out["ours"]["last"] - out["trl"]["last"]
    out["allowed"] = TOLERANCE * error
    out["learned"] = all(out[k]["last"] - out[k]["first"] > 2 * out[k]["standard_error"] > 0 for k in runs)
    out["alike"] = abs(out["difference"]) <= out["allowed"]
    out["verdict"] = (
        "VOID: no gain in reward that stands out from the noise; take more steps or repetitions"
        if not out["learned"]
        else "valid: both learned, and alike"
        if out["alike"]
        else "VOID: the two did not learn alike"
    )
    return out


def middle(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def table(runs: dict[str, list[dict[str, Any]]]) -> list[tuple[str, float, float, str]]:
    """Return (name, ours, TRL, ratio) lines; a run's steps are reduced to their median, then runs to theirs."""
    lines = []
    for name, key, smaller in (
        ("seconds per rollout step", "step_s", True),
        ("  generation", "generate_s", True),
        ("  rest of the step", "train_s", True),
        ("completion tokens per second", "tokens_per_s", False),
        ("start-up seconds", "startup_s", True),
        ("peak memory (MiB)", "peak_mib", True),
        ("  at the first step (MiB)", "loaded_mib", True),
        ("completion tokens per step", "tokens", True),
        ("share of flat groups", "flat", True),
    ):
        ours, trl = (
            middle([middle(value) if isinstance(value := result[key], list) else value for result in runs[kind]])
            for kind in ("ours", "trl")
        )
        ratio = (ours / trl if smaller else trl / ours) if ours and trl else math.nan
        lines.append((name, ours, trl, "" if key in ("tokens", "flat") else f"{ratio:.3f}"))
    return lines


def peak_share(runs: dict[str, list[dict[str, Any]]], machine: dict[str, Any]) -> dict[str, Any]:
    """Return what share of the measured matrix-product peaks the training pass and a plain pass reach."""
    measured = [result["pass"] for result in runs["ours"] if "pass" in result]
    rate = middle([one["flop"] / one["seconds"] for one in measured])
    best = max(machine[name]["peak_flop_per_s"] for name in ("float32", "bfloat16"))
    out: dict[str, Any] = {"training_pass_gflop_per_s": rate / 1e9, "training_pass_of_best_peak": rate / best}
    for name in ("float32", "bfloat16"):
        peak, plain = machine[name]["peak_flop_per_s"], machine[name].get("plain_pass")
        out[f"{name}_peak_gflop_per_s"] = peak / 1e9
        if plain is not None:
            out[f"plain_{name}_pass_s"] = plain["seconds"]
            out[f"plain_{name}_pass_of_best_peak"] = plain["flop"] / plain["seconds"] / best
    return out


def report(record: dict[str, Any]) -> str:
    """Return the record as the table that is printed."""
    ours, trl = (record["dtypes"][kind]["chosen"] for kind in ("ours", "trl"))
    head = f"job {record['job']}, {record['threads']} thread(s), {record['repetitions']} repetitions"
    lines = [f"{head}: ours in {ours}, TRL in {trl}", f"{'':32}{'ours':>12}{'TRL':>12}{'ours/TRL':>10}"]
    for name, mine, theirs, ratio in record["table"]:
        lines.append(f"{name:32}{mine:12.3f}{theirs:12.3f}{ratio:>10}")
    learned = record["learning"]
    for kind in ("ours", "trl"):
        one = learned[kind]
        text = f"{one['first']:.3f} -> {one['last']:.3f} (+- {one['standard_error']:.3f})"
        lines.append(f"reward, first and last third, {kind}: {text}")
    lines.append(f"difference {learned['difference']:+.3f}, allowed {learned['allowed']:.3f}")
    lines.append(learned["verdict"])
    lines += [f"{name}: {value:.3f}" for name, value in record["peak"].items()]
    lines += [f"{kind}: {versions}" for kind, versions in record["versions"].items()]
    return "\n".join(lines)


def main() -> None:
    """Run everything, print the table, and write one JSON file."""
    options = arguments()
    pythons = {"ours": sys.executable, "trl": options.trl_python}
    with tempfile.TemporaryDirectory(prefix="reasonrl-trainer-") as folder:
        home = Path(folder)
        job = make_job(options, home)
        machine = run("machine", sys.executable, job, home, options.timeout)
        rates = [machine[name]["peak_flop_per_s"] for name in ("float32", "bfloat16")]
        print(f"  matrix products: float32 {rates[0] / 1e9:.1f}, bfloat16 {rates[1] / 1e9:.1f} Gflop/s", flush=True)
        default = "float32" if options.job == "tiny" else "auto"
        dtypes: dict[str, Any] = {}
        for kind, wanted in (("ours", options.ours_dtype), ("trl", options.trl_dtype)):
            rest = (job, home, options.timeout, rates[1] < rates[0])
            dtypes[kind] = choose_dtype(kind, pythons[kind], wanted or default, *rest)
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for repetition in range(options.repetitions):
            for kind in ("ours", "trl") if repetition % 2 == 0 else ("trl", "ours"):
                one = for_seed(job, repetition, dtypes[kind]["chosen"], job["measured"])
                result = run(kind, pythons[kind], {**one, "count_flops": True}, home, options.timeout)
                runs[kind].append(result)
                steps = f"{middle(result['step_s']):.2f} s per step, start-up {result['startup_s']:.1f} s"
                print(f"  {kind}, repetition {repetition}: {steps}, {result['peak_mib']:.0f} MiB", flush=True)
        for mine, theirs in zip(runs["ours"], runs["trl"], strict=True):
            if mine["prompt_tokens"] != theirs["prompt_tokens"]:
                sys.exit(f"Not the same prompts: {mine['prompt_tokens']} and {theirs['prompt_tokens']} tokens.")
    record = {
        **{name: value for name, value in job.items() if name not in ("count_flops", "eos_ids")},
        "repetitions": options.repetitions,
        "dtypes": dtypes,
        "table": table(runs),
        "learning": learning(runs),
        "peak": peak_share(runs, machine),
        "machine": machine,
        "versions": {kind: results[0]["versions"] for kind, results in runs.items()},
        "runs": runs,
    }
    Path(options.out).write_text(json.dumps(record, indent=1))
    print(report(record))


if __name__ == "__main__":
    main()
