"""Runs inside the peers' virtual environment: rldoctor, rlwatch and rlprobe over logs given as JSON.

`python alert_peers.py IN.json OUT.json`; IN is {log: [[step, {TRL name: number}], ...]}, OUT is {peer: {"version",
"findings": {log: [{"step", "severity", "code", "detector"}]}}}. Each peer runs with its own defaults, as its live
monitor would (rldoctor every 25 rows from row 60, rlprobe every 25 rows from row 30, rlwatch every row) and, where it
is also a post-mortem tool, once more on the whole log. Its critical findings count as stops, its warnings as flags.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Rows = list[tuple[float, dict[str, float]]]
# Their detectors -> our codes, so that a flag counts only with the right diagnosis.
CODES = {
    "advantage_collapse": "A05", "clip_saturation": "A14", "entropy_collapse": "A03", "gradient_pathology": "A01",
    "kl_drift": "A09", "length_pathology": "A06", "plateau": "A19", "reward_composition": "A12",
    "reward_hacking": "A10", "kl_explosion": "A09", "advantage_variance": "A15", "loss_nan": "A01",
    "gradient_norm_spike": "A01", "reward_mean_drift": "A11", "KL_BLOWUP": "A09", "ENTROPY_COLLAPSE": "A03",
    "REWARD_HACK_LENGTH": "A06", "FORMAT_GAMING": "A12", "CLIP_SATURATION": "A14", "DEGENERATE_GROUPS": "A05",
    "ADVANTAGE_COLLAPSE": "A05", "GRAD_PATHOLOGY": "A01", "TRUNCATION_STARVE": "A08", "REPETITION_SPIRAL": "A13",
    "REWARD_STD_DEATH": "A05",
}  # fmt: skip


def _finding(step: float, severity: str, detector: str) -> dict[str, Any]:
    return {"step": step, "severity": severity, "code": CODES.get(detector, "?"), "detector": detector}


def rldoctor(rows: Rows) -> list[dict[str, Any]]:
    """Live monitor at its defaults, then the post-mortem."""
    from rl_doctor.live import LiveMonitor

    severities = {"CRITICAL": "stop", "WARNING": "flag"}
    monitor = LiveMonitor(on_finding=lambda finding: None)
    found = []
    for step, row in rows:
        for finding in monitor.log(row, step=step):
            found.append(_finding(step, severities[finding.severity.name], finding.detector))
    for finding in monitor.check():
        found.append(_finding(rows[-1][0], severities[finding.severity.name], finding.detector))
    return found


def rlwatch(rows: Rows) -> list[dict[str, Any]]:
    """Its detectors, row by row, with the names its TRL callback maps."""
    from rlwatch.config import RLWatchConfig
    from rlwatch.detectors import DetectorSuite

    suite = DetectorSuite(RLWatchConfig())
    names = {
        "entropy": "entropy", "kl_divergence": "kl", "reward_mean": "reward", "reward_std": "reward_std",
        "loss": "loss", "grad_norm": "grad_norm",
    }  # fmt: skip
    found = []
    for step, row in rows:
        known = {theirs: row[name] for theirs, name in names.items() if name in row}
        for alert in suite.check_step(int(step), **known) if known else []:
            found.append(_finding(step, "stop" if alert.severity == "critical" else "flag", alert.detector))
    return found


def rlprobe(rows: Rows) -> list[dict[str, Any]]:
    """Its catalog over growing prefixes; a stop is what its default halt policy stops for."""
    from rlprobe.doctor.engine import diagnose_view
    from rlprobe.doctor.live import HaltPolicy
    from rlprobe.doctor.runview import RunView
    from rlprobe.schemas import RunManifest, StepRecord

    names = {
        "reward": "reward_mean", "reward_std": "reward_std", "frac_reward_zero_std": "zero_variance_group_frac",
        "kl": "kl_mean", "entropy": "entropy_mean", "clip_ratio/region_mean": "clip_fraction", "loss": "loss",
        "learning_rate": "lr", "grad_norm": "grad_norm", "completions/mean_length": "completion_len_mean",
        "completions/clipped_ratio": "truncation_rate",
    }  # fmt: skip
    manifest = RunManifest(run_id="log", created_at="2026-01-01T00:00:00", algorithm="grpo")
    policy, records, found = HaltPolicy(), [], []
    for number, (step, row) in enumerate(rows, 1):
        known: dict[str, Any] = {names[n]: v for n, v in row.items() if n in names and not math.isnan(v)}
        parts = {n[8:-5]: v for n, v in row.items() if n.startswith("rewards/") and not math.isnan(v)}
        records.append(StepRecord(step=int(step), reward_components=parts, **known))
        live = number >= 30 and number % 25 == 0
        if not live and number < len(rows):
            continue
        for finding in diagnose_view(RunView(manifest, list(records))):
            if finding.severity != "info":
                halts = policy.should_halt([finding]) is not None
                found.append(_finding(step, "stop" if halts else "flag", finding.signature_id))
    return found


def main(source: Path, target: Path) -> None:
    """Run every installed peer over every log."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    logs = json.loads(source.read_text())
    out: dict[str, Any] = {}
    for name, run in (("rldoctor", rldoctor), ("rlwatch", rlwatch), ("rlprobe", rlprobe)):
        try:
            out[name] = {"version": version(name), "findings": {}}
        except PackageNotFoundError:
            continue
        for log, rows in logs.items():
            with tempfile.TemporaryDirectory():
                out[name]["findings"][log] = run([(step, row) for step, row in rows])
    target.write_text(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
