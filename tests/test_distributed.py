"""One run on two processes (Gloo on the CPU): the same gradient, the same rows, one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from batches import GROUP, Onlooker, make_batch, make_settings

from reasonrl import distributed
from reasonrl.entropy import EntropyConfig
from reasonrl.events import read_events
from reasonrl.kl import KlConfig
from reasonrl.loss import AGGREGATIONS, LossConfig
from reasonrl.metrics import TIMINGS
from reasonrl.train import train
from reasonrl.update import update


def on_processes(count, work, folder):
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


def gradients(policy, cases):
    """[(gradient of each update, metrics)] of every case."""
    found = []
    for batch, settings in cases:
        onlooker = Onlooker(policy)
        metrics = update(policy, onlooker, batch, settings)
        found.append((onlooker.gradients, metrics))
    return found


def cases(policy):
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


def test_one_and_two_processes_give_the_same_gradient_and_metrics(policy, tmp_path):
    work = cases(policy)
    alone = gradients(policy, work)
    for shared in on_processes(2, lambda rank: gradients(policy, work), tmp_path):
        for (one, metrics), (two, joint) in zip(alone, shared, strict=True):
            assert len(one) == len(two)
            for single, double in zip(one, two, strict=True):
                assert single.norm() > 1e-3
                assert (single - double).norm() <= 1e-5 * single.norm()
            assert joint == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def shares(rank):
    own = distributed.share(5)
    return {
        "slice": (own.start, own.stop),
        "gathered": distributed.gather([rank] * (rank + 1)),
        "main": distributed.from_main(lambda: f"from {rank}"),
        "writes": distributed.is_main(),
    }


def test_shares_cover_everything_once_and_gather_keeps_the_order(tmp_path):
    first, second, third = on_processes(3, shares, tmp_path)
    assert [first["slice"], second["slice"], third["slice"]] == [(0, 1), (1, 3), (3, 5)]
    assert first["gathered"] == second["gathered"] == third["gathered"] == [0, 1, 1, 2, 2, 2]
    assert {r["main"] for r in (first, second, third)} == {"from 0"}
    assert [r["writes"] for r in (first, second, third)] == [True, False, False]


def test_alone_everything_is_ones_own():
    assert (distributed.size(), distributed.rank(), distributed.is_main()) == (1, 0, True)
    assert distributed.share(5) == slice(0, 5)
    assert distributed.gather([1, 2]) == [1, 2]
    assert distributed.from_main(lambda: 3) == 3


def rows_of(run_dir):
    events = [event for event in read_events(run_dir / "events.jsonl") if event["type"] in ("step", "eval")]
    return [
        (e["type"], e["step"], {k: v for k, v in e["metrics"].items() if not k.startswith(TIMINGS)}) for e in events
    ]


def same_rows(one, other):
    assert [row[:2] for row in one] == [row[:2] for row in other]
    for (kind, step, metrics), (_, _, twin) in zip(one, other, strict=True):
        assert twin == pytest.approx(metrics, rel=1e-3, abs=1e-5), (kind, step)


SETTINGS = {
    "data.kind": "dynamic_sampling",
    "data.prompts_per_step": 5,
    "kl.kind": "k3",
    "kl.coef": 0.01,
    "checkpoint.every": 1,
}


def test_two_processes_make_the_rows_of_one_and_only_the_first_writes(make_config, tmp_path):
    config = make_config(SETTINGS)
    train(config, tmp_path / "one")

    def work(rank):
        told = []
        summary = train(config, tmp_path / "two", lambda event: told.append(event["type"]))
        return summary.status, summary.step, len(told)

    (first, second) = on_processes(2, work, tmp_path)
    assert first[:2] == second[:2] == ("finished", 3)
    assert first[2] > 10 and second[2] == 0
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))
    start = next(iter(read_events(tmp_path / "two" / "events.jsonl")))
    assert start["versions"]["processes"] == "2"


def test_a_pause_reaches_every_process_and_both_resume(make_config, tmp_path):
    config = make_config(SETTINGS)
    train(config, tmp_path / "one")

    def pause(event):
        return "pause" if event["type"] == "step" and event["step"] == 2 else None

    for answer, expected in ((pause, ("paused", 2)), (lambda event: None, ("finished", 3))):
        part = tmp_path / expected[0]
        part.mkdir()

        def work(rank, answer=answer):
            summary = train(config, tmp_path / "two", answer)
            return summary.status, summary.step

        assert on_processes(2, work, part) == [expected, expected]
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))


def test_accelerate_starts_it(make_config, tmp_path):
    config = make_config(SETTINGS, steps=1)
    train(config, tmp_path / "one")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "from reasonrl.config import from_dict\n"
        "from reasonrl.train import train\n"
        "train(from_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
    )
    import json

    from reasonrl.config import to_dict

    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [*launch, str(script), json.dumps(to_dict(config)), str(tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))
