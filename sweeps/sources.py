"""Which source of runs a plan needs: the runs it names, one search, or stages of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweeps.search import Planned, Search, Source

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator


def make_source(sweep: Coordinator) -> Source:
    """The source of the coordinator's plan, brought up to what stands in specs and event logs."""
    plan, book, study, ledger = sweep.plan, sweep.book, sweep.study, sweep.ledger
    sampler = str(plan.study.get("sampler", "none"))
    if plan.stages:
        from sweeps.stages import Stages

        return Stages(plan, book, study, ledger, sweep.budget, sweep.progress.line)
    if plan.searched:
        trials = int(plan.study.get("trials", 0))
        search = Search(plan, book, study, ledger, space=plan.space, sampler=sampler, trials=trials)
        search.recover()
        return search
    return Planned(book, searched=sampler == "grid")
