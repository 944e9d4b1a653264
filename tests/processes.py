"""Work on several forked processes that form a group, and what they must agree on with one process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import GROUP, Onlooker, make_batch, make_settings

from reasonrl.config import Config, to_dict
from reasonrl.entropy import EntropyConfig
from reasonrl.events import read_events
from reasonrl.kl import KlConfig
from reasonrl.loss import AGGREGATIONS, LossConfig
from reasonrl.metrics import TIMINGS
from reasonrl.update import update


def on_processes(count: int, work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Run `work(rank)` in `count` forked processes that form a group; results in rank order."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store = torch.distributed.FileStore(str(folder / "store"), count)
                torch.distributed.init_process_group(
                    "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60)
                )
                torch.save(work(rank), folder / f"result-{rank}.pt")
                torch.distributed.destroy_process_group()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(count)]


SCRIPT = """import json, pathlib, sys
from reasonrl.config import from_dict
from reasonrl.train import train
train(from_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))
"""


def launched(options: list[str], config: Config, run_dir: Path) -> dict[str, Any]:
    """Train through `accelerate launch` with these options; the start event of the run."""
    script = run_dir.with_name("script.py")
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options]
    done = subprocess.run(
        [*launch, str(script), json.dumps(to_dict(config)), str(run_dir)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(iter(read_events(run_dir / "events.jsonl")))


def gradients(policy: Any, cases: list[Any]) -> list[Any]:
    """[(gradient of each update, metrics)] of every case."""
    found = []
    for batch, settings in cases:
        onlooker = Onlooker(policy)
        metrics = update(policy, onlooker, batch, settings)
        found.append((onlooker.gradients, metrics))
    return found


def cases(policy: Any) -> list[Any]:
    """Batches with flat groups, filtered rows, a reference, every aggregation, loss and extra term."""
    batch = make_batch(policy)
    batch.advantages_B[:GROUP] = 0.0
    batch.loss_mask_BT[6] = 0.0
    pulled = make_batch(policy, ref_BT=batch.completions.logprobs_BT - 0.4, beta_B=torch.linspace(0, 0.4, 16))
    lonely = make_batch(policy)
    lonely.advantages_B[:] = 0.0
    lonely.advantages_B[3] = 1.0  # a single row to share: one process has none
    found = [(batch, make_settings(minibatches=2, loss=LossConfig(aggregation=name))) for name in AGGREGATIONS]
    found.append((pulled, make_settings(kl=KlConfig(kind="k3"), bonus=0.02, micro_batch_size=3)))
    found.append((batch, make_settings(loss=LossConfig(kind="gspo", low=0.01, high=0.01))))
    found.append((batch, make_settings(entropy=EntropyConfig(kind="kl_cov", cov_share=0.2))))
    found.append((batch, make_settings(entropy=EntropyConfig(kind="clip_cov", cov_share=0.5, cov_low=-9.0))))
    found.append((lonely, make_settings()))
    return found


def rows_of(run_dir: Path) -> list[Any]:
    """(type, step, metrics without clocks) of every step and evaluation."""
    events = [event for event in read_events(run_dir / "events.jsonl") if event["type"] in ("step", "eval")]
    return [
        (e["type"], e["step"], {k: v for k, v in e["metrics"].items() if not k.startswith(TIMINGS)}) for e in events
    ]


def same_rows(one: list[Any], other: list[Any]) -> None:
    """Compare rows up to the rounding of sums that were split in another way."""
    assert [row[:2] for row in one] == [row[:2] for row in other]
    for (kind, step, metrics), (_, _, twin) in zip(one, other, strict=True):
        assert twin == pytest.approx(metrics, rel=1e-3, abs=1e-5), (kind, step)
