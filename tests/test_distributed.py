"""One run on two processes (Gloo on the CPU): the same gradient, the same rows, one writer."""

from __future__ import annotations

import pytest
from processes import cases, gradients, launched, on_processes, rows_of, same_rows

from reasonrl import distributed
from reasonrl.events import read_events
from reasonrl.train import train


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
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", "0"]
    start = launched(options, config, tmp_path / "two")
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))
    assert start["versions"]["processes"] == "2"  # with --cpu the launcher starts one, whatever --num_processes says
