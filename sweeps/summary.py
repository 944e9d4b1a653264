"""The end of a sweep: the report is made, what happened is said in a few lines, W&B gets its summary run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sweeps.claims import without_password
from sweeps.findings import edge_findings
from sweeps.progress import describe_end, duration
from sweeps.state import RunState

if TYPE_CHECKING:
    from sweeps.coordinator import Coordinator


def conclude(sweep: Coordinator, seconds: float) -> int:
    """Make the report, print the summary, and return the exit code of the sweep."""
    runs = list(sweep.book.runs.values())
    failed = [run for run in runs if run.status == "failed"]
    code = sweep.exit_code or (1 if failed else 0)
    ended = any(run.status in ("finished", "stopped") for run in runs)
    for line in summary_lines(sweep, runs, seconds):
        sweep.progress.line(line)
    try:
        if sweep.sharing.duty("report") is False:
            sweep.progress.line("  the report is made by another coordinator")
        else:
            if ended and not sweep.exit_code:
                make_report(sweep)
            _track(sweep, runs)
    except KeyboardInterrupt:
        code = 130
        again = f"python -m analysis export {sweep.plan.name}"
        sweep.progress.line(f"  interrupted; every run is safe, and the report can be made with: {again}")
    sweep.ledger.note("concluded", seconds=round(seconds, 3), exit_code=code, counts=counts_of(runs))
    return code


def counts_of(runs: Iterable[RunState]) -> dict[str, int]:
    """How many runs are in which state."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.status] = counts.get(run.status, 0) + 1
    return counts


def steps_saved(runs: Iterable[RunState]) -> int:
    """Rollout steps that stopped runs did not have to make; forks were not planned and do not count."""
    planned = (run for run in runs if run.status == "stopped" and not run.spec.parent)
    return sum(max(0, run.spec.steps - run.step) for run in planned)


def summary_lines(sweep: Coordinator, runs: list[RunState], seconds: float) -> list[str]:
    """The closing lines: counts, every stop and failure with its reason, steps saved, time, where things are."""
    counts = counts_of(runs)
    stopped = [run for run in runs if run.status == "stopped"]
    failed = [run for run in runs if run.status == "failed"]
    open_runs = sum(run.open and not run.given_up for run in runs)
    head = f"{counts.get('finished', 0)} finished, {len(stopped)} stopped, {len(failed)} failed"
    if open_runs:
        head += f", {open_runs} still to do"
    lines = [f"{head} in {duration(seconds)}"]
    lines += ["  " + describe_end(run) for run in (*stopped, *failed)]
    if stopped:
        total = sum(run.spec.steps for run in runs if not run.spec.parent)
        lines.append(f"  stops saved {steps_saved(stopped)} of {total} rollout steps")
    if cut := [configuration for configuration in sweep.book.configurations if configuration.abandoned]:
        many = f"{len(cut)} configuration{'s' * (len(cut) != 1)}"
        lines.append(f"  {many} behind the others did not get all seeds or steps: python -m sweeps why KEY says why")
    if failed:
        lines.append(f"  try failed runs again: python -m sweeps retry {sweep.plan.name}, then the same command")
    if sweep.barred:
        lines.append(f"  {sweep.barred}; raise it and give the same command to go on")
    if sweep.leaving and open_runs:
        lines.append(f"  {sweep.leaving}; the same command continues where it was left")
    lines += [f"  {finding['code']} {finding['message']}" for finding in findings(sweep)]
    if sweep.unwritten:
        lines.append("  the study's database is away: it may lack what came last; the same command adds that")
    study = without_password(str(sweep.plan.study.get("storage") or "study.db"))
    lines.append(f"  results in {sweep.plan.directory} ({study}, {sweep.ledger.name}, runs/<key>/events.jsonl)")
    return lines


def findings(sweep: Coordinator) -> list[dict[str, Any]]:
    """Findings on the search as a whole, noted in the ledger."""
    plan = sweep.plan
    if not plan.searched or sweep.leaving:
        return []
    maximize = plan.study.get("direction", "maximize") == "maximize"
    found = []
    for stage, space in [("", plan.space), *((stage.name, stage.space) for stage in plan.stages)]:
        mine = [configuration for configuration in sweep.book.configurations if configuration.stage == stage]
        found += edge_findings(mine, space, maximize)
    for finding in found:
        sweep.ledger.note("finding", **finding)
    return found


def make_report(sweep: Coordinator) -> None:
    """Figures, tables, verdict and report; a failure is said, and costs nothing but the report."""
    try:
        sweep.progress.line("  making figures, tables and the report ...")
        from analysis.report import finish

        finish(sweep.plan.directory)
    except Exception as error:  # whatever the report trips over, the runs are safe on disk
        sweep.ledger.note("report_failed", message=str(error), error=type(error).__name__)
        sweep.progress.line(
            f"  the report could not be made ({type(error).__name__}: {error}); the runs are safe, try again with:"
            f" python -m analysis export {sweep.plan.name}"
        )


def table_rows(runs: Iterable[RunState]) -> list[dict[str, Any]]:
    """One row per run for the summary run of a tracker."""
    rows = []
    for run in runs:
        reason = run.stop_reason() or {}
        rows.append(
            {
                "key": run.key, "name": run.spec.name, "arm": run.spec.arm, "seed": run.spec.seed,
                "stage": run.spec.stage, "status": run.status, "step": run.step, "steps": run.spec.steps,
                run.metric: run.value, "code": reason.get("code"), "reason": reason.get("message") or run.error_class,
                "intervention": " or ".join(reason.get("intervention") or []), "parent": run.spec.parent,
            }
        )  # fmt: skip
    return rows


def _track(sweep: Coordinator, runs: list[RunState]) -> None:
    kinds = {run.spec.config.get("tracking", {}).get("kind") for run in runs}
    if "wandb" not in kinds:
        return
    try:
        from reasonrl.tracking import sweep_summary

        sweep_summary(sweep.plan, table_rows(runs), runs[0].spec.config["tracking"])
    except Exception as error:  # a tracker that is away must not cost the sweep
        sweep.progress.line(f"  the W&B summary run could not be written ({type(error).__name__}: {error})")
