"""Write a small synthetic results folder in the real format, whole or with things wrong with it.

`make_results(folder)` gives two arms x three seeds that finished. `faults` maps (arm, seed) to one of FAULTS.
The curves are invented (a logistic accuracy, a falling entropy), the same on every call.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from reasonrl.events import encode_line
from sweeps.types import Plan, RunSpec

FAULTS = (
    "stopped",  # by alert A05 halfway; a second, milder alert (A03 note) stands in the log too
    "failed",  # non-finite loss, error_class non_finite, three quarters through
    "lost",  # error_class killed: not the arm's fault
    "unfinished",  # still running: no end event, half of the steps
    "torn",  # finished, but the last line is cut in the middle (no end event survives)
    "damaged",  # one line in the middle is garbage
    "no_start",  # the start event is missing: the config comes from config.yaml
    "empty",  # events.jsonl has no bytes
    "nan",  # two step rows and the last eval hold "nan"
    "repeated",  # steps 8..10 are written twice with other values (a restart)
    "no_entropy",  # entropy/* is missing in every row
    "missing",  # planned, but there is no run folder
)

PRESETS: dict[str, dict[str, Any]] = {
    "symmetric": {"loss.low": 0.2, "loss.high": 0.2},
    "clip_higher": {"loss.low": 0.2, "loss.high": 0.28},
    "wide": {"loss.low": 0.1, "loss.high": 0.3},
    "overlong_off": {"overlong.kind": "none"},
    "overlong_filter": {"overlong.kind": "filter"},
    "plain": {"data.kind": "plain"},
    "dynamic_sampling": {"data.kind": "dynamic_sampling"},
    "grpo": {"loss.kind": "clip", "loss.low": 0.2, "loss.high": 0.27},
    "gspo": {"loss.kind": "gspo", "loss.low": 3e-4, "loss.high": 4e-4, "loss.aggregation": "sequence_mean"},
    "summed": {"advantage.kind": "grpo"},
    "gdpo": {"advantage.kind": "gdpo"},
}
GAIN = {"clip_higher": 0.03, "wide": 0.02, "dynamic_sampling": 0.06, "overlong_filter": 0.08, "gdpo": 0.1}
ENTROPY_KEPT = {"clip_higher": 0.05, "wide": 0.08}


def base_config() -> dict[str, Any]:
    """A resolved config of one run with the defaults of the trainer, without seed."""
    return {
        "steps": 20,
        "algo": "dapo",
        "run_dir": None,
        "quiet": True,
        "data": {
            "kind": "plain",
            "prompts_per_step": 32,
            "max_rounds": 10,
            "patience": 5,
            "difficulty_gate": 0,
        },
        "loss": {"kind": "clip", "low": 0.2, "high": 0.2, "dual_clip": None, "cap": 5.0}
        | {"aggregation": "token_mean"},
        "kl": {"kind": "off", "coef": 0.0, "in_reward": False, "monitor": False, "token_weight": "constant"},
        "optim": {"lr": 4e-5, "warmup_steps": 5, "schedule": "constant", "minibatches": 4, "inner_epochs": 4}
        | {"micro_batch_size": None, "max_grad_norm": 1.0, "betas": [0.9, 0.99], "weight_decay": 0.0},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 28, "group_size": 8},
        "advantage": {"kind": "grpo", "eps": 1e-4, "batch_norm": True},
        "reward": {"correct": 1.0, "wrong": 0.0}
        | {"parts": {"correctness": {"weight": 1.0}, "format": {"weight": 0.3}}},
        "entropy": {"kind": "none"},
        "overlong": {"kind": "none", "cache_tokens": 20},
        "task": {"kind": "arithmetic"},
        "model": {"kind": "tiny", "path": None},
        "eval": {"every": 5, "problems": 40, "samples": 4, "max_new_tokens": None, "temperature": 1.0},
        "alerts": {"profile": "graded", "on_stop": "stop", "disable": []},
        "checkpoint": {"every": 10, "keep": 2},
        "tracking": {"kind": "none"},
    }


def make_results(
    folder: Path,
    arms: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("symmetric", "clip_higher"),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 20,
    eval_every: int = 5,
    problems: int = 40,
    faults: Mapping[tuple[str, int], str] | None = None,
    skip: Sequence[tuple[str, int]] = (),
    plan: str = "whole",
) -> Path:
    """Write `folder` (plan.json, runs/<key>/config.yaml and events.jsonl) and return it.

    `arms` are names of PRESETS or {name: {dotted key: value}}; `skip` leaves (arm, seed) out of the plan
    (unequal seeds); `plan` is "whole", "none" (no plan.json) or "damaged".
    """
    faults = dict(faults or {})
    settings = dict(arms) if isinstance(arms, Mapping) else {arm: PRESETS[arm] for arm in arms}
    specs = []
    for arm, overrides in settings.items():
        for seed in seeds:
            if (arm, seed) in skip:
                continue
            spec = _spec(arm, seed, overrides, steps, eval_every, problems)
            specs.append(spec)
            if faults.get((arm, seed)) != "missing":
                _write_run(folder / "runs" / spec.key, spec, faults.get((arm, seed), ""))
    folder.mkdir(parents=True, exist_ok=True)
    if plan == "whole":
        (folder / "plan.json").write_text(_plan(folder, settings, seeds, specs).to_json())
    elif plan == "damaged":
        (folder / "plan.json").write_text('{"name": "demo", "runs": [')
    return folder


def _spec(arm: str, seed: int, overrides: Mapping[str, Any], steps: int, every: int, problems: int) -> RunSpec:
    config = copy.deepcopy(base_config()) | {"seed": seed, "steps": steps}
    config["eval"] |= {"every": every, "problems": problems}
    for dotted, value in overrides.items():
        *groups, name = dotted.split(".")
        node = config
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    key = hashlib.sha256(json.dumps([arm, config], sort_keys=True).encode()).hexdigest()[:12]
    text = [f"{dotted}={value}" for dotted, value in overrides.items()]
    return RunSpec(key, f"{arm}-s{seed}", arm, seed, "", text, config, steps)


def _plan(folder: Path, settings: Mapping[str, Any], seeds: Sequence[int], specs: list[RunSpec]) -> Plan:
    arms = {arm: [f"{dotted}={value}" for dotted, value in over.items()] for arm, over in settings.items()}
    sweep = {
        "name": folder.name,
        "question": "Does clip-higher keep entropy and help accuracy?",
        "description": "synthetic",
        "arms": arms,
        "baseline": next(iter(arms)),
        "seeds": list(seeds),
    }
    return Plan(
        name=folder.name,
        question=sweep["question"],
        runs=specs,
        arms=list(arms),
        baseline=sweep["baseline"],
        seeds=list(seeds),
        sweep=sweep,
        engine={"kind": "local"},
        study={"sampler": "none"},
        directory=Path("results") / folder.name,
        command=[f"+sweep={folder.name}"],
        code_version="0123456789ab",
    )


def _write_run(folder: Path, spec: RunSpec, fault: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(spec.config, sort_keys=False))
    lines = [encode_line(event) for event in events(spec, fault)]
    if fault == "damaged":
        lines[len(lines) // 2] = '{"type": "step", "time": 17\x00\ufffd, "met\n'
    if fault == "torn":
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
    (folder / "events.jsonl").write_text("" if fault == "empty" else "".join(lines))


def events(spec: RunSpec, fault: str = "") -> list[dict[str, Any]]:
    """All events of one invented run, in the order a trainer writes them."""
    rng = np.random.default_rng(zlib.crc32(f"{spec.arm}/{spec.seed}".encode()))
    shared = np.random.default_rng(spec.seed)
    lift, every, stop = float(shared.normal(0, 0.04)), spec.config["eval"]["every"], _last_step(spec, fault)
    time = 1_700_000_000.0 + 1000 * spec.seed
    out: list[dict[str, Any]] = []
    if fault != "no_start":
        out.append(
            {"type": "start", "time": time, "key": spec.key, "name": spec.name, "arm": spec.arm}
            | {
                "seed": spec.seed,
                "steps": spec.steps,
                "config": spec.config,
                "resumed_from": None,
                "pid": 4242,
            }
            | {"versions": {"reasonrl": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}}
        )
    out += _evaluation(spec, 0, lift, time, fault)
    steps = list(range(1, stop + 1))
    if fault == "repeated":
        steps[10:10] = [8, 9, 10]
    for count, step in enumerate(steps):
        time += 2.0
        metrics = _metrics(spec, step, lift, rng)
        if fault == "no_entropy":
            metrics = {name: value for name, value in metrics.items() if not name.startswith("entropy/")}
        if fault == "nan" and step in (3, 4):
            metrics["entropy/mean"] = metrics["loss/total"] = math.nan
        if fault == "repeated" and count in (7, 8, 9):
            metrics["reward/total"] = -1.0
        out.append({"type": "step", "time": time, "step": step, "metrics": metrics})
        if step % every == 0 or step == spec.steps:
            out += _evaluation(spec, step, lift, time, fault)
        if step % 10 == 0:
            out.append({"type": "checkpoint", "time": time, "step": step, "path": f"step_{step:06d}"})
    return out + _ending(spec, stop, time, fault)


def _last_step(spec: RunSpec, fault: str) -> int:
    share = {"stopped": 0.5, "failed": 0.75, "lost": 0.5, "unfinished": 0.5}.get(fault, 1.0)
    return max(1, int(spec.steps * share))


def _accuracy(spec: RunSpec, step: float, lift: float) -> float:
    rise = 1 / (1 + math.exp(-(step / max(spec.steps, 1) - 0.4) * 8))
    return min(max(0.2 + (0.5 + GAIN.get(spec.arm, 0.0)) * rise + lift, 0.0), 1.0)


def _evaluation(spec: RunSpec, step: int, lift: float, time: float, fault: str) -> list[dict[str, Any]]:
    samples, count = spec.config["eval"]["samples"], spec.config["eval"]["problems"]
    rng = np.random.default_rng([spec.seed, step, 7])  # common random numbers: the same problems in every arm
    ease = rng.uniform(size=(count, samples))
    right = (ease < _accuracy(spec, step, lift)).sum(axis=1)
    accuracy = float(right.mean() / samples)
    if fault == "nan" and step == spec.steps:
        accuracy = math.nan
    metrics = {
        "eval/accuracy": accuracy,
        "eval/pass_at_k": float((right > 0).mean()),
        "eval/majority": float((right > samples / 2).mean()),
        "eval/length": 4.0 + 10 * _accuracy(spec, step, lift),
        "eval/truncated": 0.01,
    }
    rows = [
        {"prompt": f"^{i}37=", "completion": "[3a7j]j$", "reward": float(right[i] > 0)}
        | {"parts": {"correctness": float(right[i] > 0), "format": 1.0}, "finish": "stop"}
        for i in range(min(3, count))
    ]
    return [
        {"type": "eval", "time": time, "step": step, "metrics": metrics, "problems": right.tolist()}
        | {"samples": samples},
        {"type": "samples", "step": step, "rows": rows},
    ]


def _metrics(spec: RunSpec, step: int, lift: float, rng: np.random.Generator) -> dict[str, float]:
    accuracy = min(max(_accuracy(spec, step, lift) + rng.normal(0, 0.02), 0), 1)
    entropy = 0.6 * math.exp(-1.2 * step / spec.steps) + ENTROPY_KEPT.get(spec.arm, 0.0) * step / spec.steps
    entropy = max(entropy + rng.normal(0, 0.01), 0.0)
    clip = (0.15 if spec.config["loss"]["kind"] == "gspo" else 0.0015) * math.exp(rng.normal(0, 0.2))
    dynamic = spec.config["data"]["kind"] == "dynamic_sampling"
    length, flat = 4.0 + 10 * accuracy, max(0.0, 0.8 - accuracy)
    rounds = 2.0 if dynamic else 1.0
    updates = spec.config["optim"]["minibatches"] * spec.config["optim"]["inner_epochs"]
    cov = 0.02 + 0.01 * rng.normal()
    return {
        "reward/total": accuracy + 0.3 * 0.9,
        "reward/std": 0.4,
        "reward/correctness": accuracy,
        "reward/format": min(1.0, 0.3 + step / spec.steps),
        "advantage/mean": 0.0,
        "advantage/std": math.sqrt((1 - flat) * 7 / 8),
        "groups/flat": flat,
        "groups/all_right": flat / 4,
        "groups/all_wrong": flat * 3 / 4,
        "entropy/mean": entropy,
        "entropy/std": 0.3,
        "entropy/min": 0.0,
        "entropy/max": 2.5,
        "entropy/low_share": 0.6,
        "entropy/cov": cov,
        "entropy/predicted_change": -spec.config["optim"]["lr"] * 1e3 * cov,
        "entropy/measured_change": -0.03 * cov / 0.02 + rng.normal(0, 0.005),
        "shift/kl_old": 0.002,
        "shift/ratio_mean": 1.0,
        "shift/ratio_q01": 0.8,
        "shift/ratio_q50": 1.0,
        "shift/ratio_q99": 1.2,
        "shift/first_ratio_error": 1e-6,
        "clip/fraction": clip,
        "clip/low": clip * 0.4,
        "clip/high": clip * 0.6,
        "length/mean": length,
        "length/min": 3.0,
        "length/max": 28.0,
        "length/truncated": 0.02,
        "text/repetition": 0.01,
        "loss/total": rng.normal(0, 0.02),
        "loss/policy": rng.normal(0, 0.02),
        "loss/kl": 0.0,
        "loss/bonus": 0.0,
        "loss/denominator": 256 * length,
        "optim/grad_norm": 0.5 + 0.1 * rng.random(),
        "optim/lr": spec.config["optim"]["lr"] * min(1.0, step / 5),
        "optim/skipped": 0.0,
        "optim/gradient_steps": float(updates * step),
        "data/rounds": rounds,
        "data/generated_tokens": 256 * length * rounds,
        "data/kept": 32.0,
        "data/short": 0.0,
        "data/invalid": 0.0,
        "time/step": 1.9,
        "time/generate": 0.3 * rounds,
        "time/train": 1.5,
        "time/eval": 0.1,
        "speed/tokens_per_s": 256 * length * rounds / 1.9,
    }


def _ending(spec: RunSpec, stop: int, time: float, fault: str) -> list[dict[str, Any]]:
    if fault == "unfinished":
        return []
    end = {
        "type": "end",
        "time": time,
        "step": stop,
        "status": "finished",
        "reason": None,
        "error_class": None,
    }
    if fault == "failed":
        return [end | {"status": "failed", "reason": "loss is nan", "error_class": "non_finite"}]
    if fault == "lost":
        return [end | {"status": "failed", "reason": "worker killed by signal 9", "error_class": "killed"}]
    if fault != "stopped":
        return [end]
    alert = {
        "step": stop,
        "code": "A05",
        "title": "flat groups",
        "severity": "stop",
        "message": "97 % of groups all wrong for 10 steps",
        "evidence": {"value": 0.97, "window": [max(1, stop - 9), stop]},
        "intervention": ["data=dynamic_sampling"],
    }
    note = alert | {"step": max(1, stop // 2), "code": "A03", "title": "entropy collapse", "severity": "note"}
    note["message"] = "entropy fell to 45 % of its start"
    head = {"type": "alert", "time": time}
    return [head | note, head | alert, end | {"status": "stopped", "reason": alert}]
