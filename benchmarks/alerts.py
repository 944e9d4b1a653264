"""Score the alert rules on labelled logs: `python benchmarks/alerts.py CASES_DIR [--peers-python PY] [--quick]`.

CASES_DIR holds logs and an INDEX.md whose table has the columns name, source, label and evid. (evidence: A, M or N).
Printed for both profiles, per rule and overall: stops on good and on bad runs, bad runs stopped or flagged with the
right code, median lead of the first stop over the collapse of the reward, and rules skipped for missing inputs; then
a leave-one-source-out choice of the rules' strictness, which shows what fitting the cases would be worth; and the same
for rldoctor, rlwatch and rlprobe when their Python is given. Scored: evidence A and M, series of 20 points or more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.logs import find_logs, read_log  # noqa: E402
from reasonrl.alerts import AlertMonitor, AlertsConfig  # noqa: E402
from reasonrl.alerts.names import translate_row  # noqa: E402
from reasonrl.alerts.vocabulary import is_score, part_kind  # noqa: E402
from reasonrl.errors import AnalysisError  # noqa: E402

LEAST_POINTS = 20
COLUMNS = ("name", "source", "label", "evid")
GOOD = ("healthy",)
UNSCORED = ("unlabelled", "")
# What counts as the right diagnosis of a label.
RIGHT_CODES = {
    "entropy_collapse": ("A03", "A16"), "entropy_surge": ("A04",), "format_only": ("A12", "A10"),
    "kl_drift": ("A09", "A15"), "length_explosion": ("A06", "A13"), "length_collapse": ("A07",), "nan": ("A01",),
    "no_learning": ("A19",), "no_update": ("A02",), "reward_collapse": ("A11",), "reward_hacking": ("A10", "A12"),
    "truncated": ("A08", "A06"), "zero_advantage": ("A05",), "off_policy": ("A15", "A14", "A17"),
    "overfitting": ("A10",), "repetition": ("A13",), "kl_explosion": ("A09", "A15"), "low_entropy": ("A03", "A16"),
    "grad_explosion": ("A01", "A11", "A14"), "flat_groups": ("A05",), "length_growth": ("A06", "A13"),
}  # fmt: skip
TRL_NAMES = {
    "reward/total": "reward", "reward/std": "reward_std", "groups/flat": "frac_reward_zero_std",
    "entropy/mean": "entropy", "kl/ref": "kl", "clip/fraction": "clip_ratio/region_mean",
    "length/mean": "completions/mean_length", "length/truncated": "completions/clipped_ratio",
    "optim/grad_norm": "grad_norm", "optim/lr": "learning_rate", "loss/total": "loss",
}  # fmt: skip
Rows = list[tuple[float, dict[str, float]]]


@dataclass
class Case:
    """One labelled log; `rows` under our metric names."""

    name: str
    source: str
    label: str
    evidence: str
    rows: Rows

    @property
    def good(self) -> bool:
        return self.label in GOOD

    @property
    def scored(self) -> bool:
        """Evidence A or M, a verdict, and enough points."""
        return self.evidence in ("A", "M") and self.label not in UNSCORED and len(self.rows) >= LEAST_POINTS


@dataclass(frozen=True)
class Found:
    """One finding of any tool."""

    step: float
    severity: str
    code: str


@dataclass
class Outcome:
    """What one tool found in one case."""

    found: list[Found]
    skipped: list[str] = field(default_factory=list)

    def first_stop(self, code: str | None = None) -> float | None:
        """Step of the first stop (of one code)."""
        return next((f.step for f in self.found if f.severity == "stop" and code in (None, f.code)), None)

    def caught(self, label: str) -> bool:
        """Stopped, or flagged with a right code."""
        right = RIGHT_CODES.get(label, ())
        return any(f.severity == "stop" or (f.severity == "flag" and f.code in right) for f in self.found)

    def flagged(self) -> bool:
        return any(f.severity == "flag" for f in self.found)


@dataclass(frozen=True)
class Score:
    """Counts over the scored cases."""

    good: int
    good_stopped: int
    bad: int
    bad_caught: int
    bad_stopped: int
    good_flagged: int

    def line(self) -> str:
        return f"good_stopped={self.good_stopped}/{self.good} bad_caught={self.bad_caught}/{self.bad}"


# ---- cases
def read_index(folder: Path) -> list[Case]:
    """Read the INDEX table and its logs; logs that are missing or unreadable are said and left out."""
    index = folder / "INDEX.md"
    if not index.exists():
        sys.exit(f"{index} does not exist.")
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in index.read_text().splitlines()
            if line.lstrip().startswith("|")]  # fmt: skip
    head = [name.lower().rstrip(".") for name in rows[0]]
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        sys.exit(f"{index}: the table has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}.")
    columns = {name: head.index(name) for name in COLUMNS}
    cases, source = [], ""
    for row in rows[1:]:
        if len(row) < len(head) or set(row[0]) <= set("-: "):
            continue
        name = row[columns["name"]]
        if not row[columns["source"]].startswith("same file"):
            source = row[columns["source"]].split(":")[0].split(" ")[0]
        files = (file for file in sorted(folder.iterdir()) if name in (file.stem, file.name) and file.suffix != ".md")
        path = next(files, None)
        if path is None:
            print(f"{name}: no such log, left out")
            continue
        try:
            log = read_log(find_logs(path)[0])
        except AnalysisError as error:
            print(f"{name}: left out: {error}")
            continue
        label = re.sub(r"[\s-]+", "_", row[columns["label"]].lower())
        if label not in (*RIGHT_CODES, *GOOD, *UNSCORED):
            print(f"{name}: label {label} has no code of its own; only a stop counts as caught")
        translated = [(step, translate_row(values)) for step, values in log.rows]
        cases.append(Case(name, source, label, row[columns["evid"]].upper(), translated))
    return cases


def collapse_step(rows: Rows) -> float | None:
    """First step from which the 5-row mean reward stays under 60 % of its best for the rest of the log."""
    rewards = [
        (step, row["reward/total"])
        for step, row in rows
        if row.get("reward/total", float("nan")) == row.get("reward/total")
    ]
    if len(rewards) < 10:
        return None
    floor = min(0.0, min(value for _, value in rewards))
    means = [(rewards[i][0], statistics.fmean(v for _, v in rewards[i - 4 : i + 1])) for i in range(4, len(rewards))]
    best = max(mean for _, mean in means)
    step = None
    for at, mean in reversed(means):
        if mean - floor >= 0.6 * (best - floor):
            break
        step = at
    return step


# ---- running
def run(case: Case, config: AlertsConfig) -> Outcome:
    """Every finding of a profile over the whole log, as if stops were ignored."""
    monitor = AlertMonitor(config)
    alerts = [alert for step, row in case.rows for alert in monitor.update(step, row)]
    return Outcome([Found(a.step, a.severity, a.code) for a in alerts], sorted(monitor.skipped()))


def score(cases: Iterable[Case], outcomes: Mapping[str, Outcome]) -> Score:
    """Count over the scored cases."""
    scored = [case for case in cases if case.scored]
    good, bad = [c for c in scored if c.good], [c for c in scored if not c.good]
    return Score(
        len(good), sum(outcomes[c.name].first_stop() is not None for c in good),
        len(bad), sum(outcomes[c.name].caught(c.label) for c in bad),
        sum(outcomes[c.name].first_stop() is not None for c in bad), sum(outcomes[c.name].flagged() for c in good),
    )  # fmt: skip


def leads(cases: Iterable[Case], outcomes: Mapping[str, Outcome], code: str | None = None) -> list[float]:
    """Steps between the first stop (of a code) and the collapse of the reward, where there are both."""
    found = []
    for case in cases:
        if case.scored and not case.good:
            stop, collapse = outcomes[case.name].first_stop(code), collapse_step(case.rows)
            if stop is not None and collapse is not None:
                found.append(collapse - stop)
    return found


def median_text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):+.0f} steps over {len(values)}" if values else "none"


# ---- leave one source out
def settings() -> list[AlertsConfig]:
    """Graded profiles of different windows, confirmations and strictness; the default comes first."""
    out = []
    for window, confirm, factor in itertools.product((10, 5, 20), (3, 2, 5), (1.0, 0.7, 1.4)):
        rules = {
            "A03": {"ratio": min(0.9, 0.5 / factor), "stop_ratio": 0.1 / factor, "fall": min(0.9, 0.3 * factor)},
            "A04": {"ratio": 3 * factor, "nats": factor, "fall": min(0.9, 0.3 * factor)},
            "A05": {"all_wrong": 1 - 0.1 / factor, "steps": 30 * factor},
            "A06": {"points": min(0.9, 0.5 * factor), "fall": min(0.9, 0.3 * factor)},
            "A09": {"fall": min(0.9, 0.3 * factor)},
            "A10": {"evals": 2 if factor <= 1 else 3},
            "A11": {"fall": min(0.9, 0.4 * factor), "fall_with_damage": min(0.9, 0.3 * factor)},
            "A12": {"flag_steps": 25 * factor, "stop_steps": 45 * factor},
        }
        out.append(AlertsConfig(window=window, confirm=confirm, rules=rules))
    return out


def leave_one_source_out(cases: Sequence[Case]) -> tuple[Score, list[str], list[Score]]:
    """Choose a setting on all other sources, judge it on the one left out; sum over sources.

    Chosen is the setting with the fewest good runs stopped, then the most bad runs caught; ties go to the default.
    Also returned: the setting chosen for each source, and every setting's score on all cases.
    """
    scored = [case for case in cases if case.scored]
    choices = settings()
    results = [{case.name: run(case, config) for case in scored} for config in choices]
    held_out: dict[str, Outcome] = {}
    chosen: list[str] = []
    for source in dict.fromkeys(case.source for case in scored):
        rest = [case for case in scored if case.source != source]

        def worth(index: int, rest: Sequence[Case] = rest) -> tuple[int, int]:
            counts = score(rest, results[index])
            return (-counts.good_stopped, counts.bad_caught)

        best = max(range(len(choices)), key=worth)  # ties: the earlier, the default first
        config = choices[best]
        chosen.append(f"window {config.window}, confirm {config.confirm}, A03.ratio {config.rules['A03']['ratio']:.2f}")
        held_out |= {case.name: results[best][case.name] for case in scored if case.source == source}
    return score(scored, held_out), chosen, [score(scored, result) for result in results]


# ---- peers
def run_peers(python: Path, cases: Sequence[Case]) -> dict[str, tuple[str, dict[str, Outcome]]]:
    """{peer: (version, outcomes)} from the peers' own Python; raises SystemExit when that fails."""
    rows = {case.name: [[step, to_trl(row)] for step, row in case.rows] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.json"), Path(folder, "out.json")
        source.write_text(json.dumps(rows))
        script = Path(__file__).with_name("alert_peers.py")
        done = subprocess.run([str(python), str(script), str(source), str(target)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"The peers failed in {python}:\n{done.stderr[-2000:]}")
        found = json.loads(target.read_text())
    out = {}
    for peer, result in found.items():
        outcomes = {
            log: Outcome([Found(f["step"], f["severity"], f["code"]) for f in findings])
            for log, findings in result["findings"].items()
        }
        out[peer] = (result["version"], outcomes)
    return out


def to_trl(row: Mapping[str, float]) -> dict[str, float]:
    """Our names -> TRL's, which all three peers know; held-out scores as eval_rewards, parts as rewards/NAME/mean."""
    out = {TRL_NAMES[name]: value for name, value in row.items() if name in TRL_NAMES}
    out |= {f"rewards/{name[7:]}/mean": value for name, value in row.items() if part_kind(name)}
    scores = [value for name, value in row.items() if is_score(name)]
    return out | ({"eval/accuracy": scores[0]} if scores else {})


# ---- printing
def print_profile(name: str, cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> None:
    """Per rule and overall."""
    scored = [case for case in cases if case.scored]
    good, bad = [c for c in scored if c.good], [c for c in scored if not c.good]
    codes = sorted(
        {f.code for o in outcomes.values() for f in o.found} | {k[:3] for o in outcomes.values() for k in o.skipped}
    )
    print(f"\n{name}: per rule ({len(good)} good and {len(bad)} bad runs)")
    print("  code  stops good  stops bad  flags good  flags bad  skipped  median lead")
    for code in codes:
        counts = []
        for severity in ("stop", "flag"):
            for group in (good, bad):
                hits = [any(f.code == code and f.severity == severity for f in outcomes[c.name].found) for c in group]
                counts.append(f"{sum(hits)}/{len(group)}")
        skipped = sum(any(key[:3] == code for key in outcomes[c.name].skipped) for c in scored)
        lead = median_text(leads(scored, outcomes, code))
        print(f"  {code}   {counts[0]:>10}  {counts[1]:>9}  {counts[2]:>10}  {counts[3]:>9}  {skipped:>7}  {lead}")
    total = score(cases, outcomes)
    print(
        f"  all   stops: good {total.good_stopped}/{total.good}, bad {total.bad_stopped}/{total.bad}; "
        f"caught {total.bad_caught}/{total.bad}; good runs flagged {total.good_flagged}/{total.good}; "
        f"median lead {median_text(leads(scored, outcomes))}"
    )


def print_cases(cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> None:
    """One line per case: the first finding of every code and severity above a note."""
    print("\ngraded: per case")
    for case in sorted(cases, key=lambda c: (not c.scored, not c.good, c.name)):
        first: dict[tuple[str, str], float] = {}
        for found in outcomes[case.name].found:
            if found.severity != "note":
                first.setdefault((found.code, found.severity), found.step)
        text = ", ".join(f"{code} {severity}@{step:g}" for (code, severity), step in first.items()) or "-"
        mark = " " if case.scored else "("
        print(f" {mark}{case.label:17} {case.evidence}  {case.name}: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the scores; the last two lines are the profiles'."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", type=Path, metavar="CASES_DIR")
    parser.add_argument("--peers-python", type=Path, help="Python of an environment with rldoctor, rlwatch, rlprobe")
    parser.add_argument("--quick", action="store_true", help="without leave-one-source-out")
    args = parser.parse_args(argv)
    cases = read_index(args.cases)
    profiles = {
        "textbook": AlertsConfig(profile="textbook", warmup=0, confirm=1),
        "graded": AlertsConfig(),
    }
    outcomes = {name: {case.name: run(case, config) for case in cases} for name, config in profiles.items()}
    scored = sum(case.scored for case in cases)
    print(f"{len(cases)} logs, {scored} scored (evidence A or M, {LEAST_POINTS} points or more)")
    for name, found in outcomes.items():
        print_profile(name, cases, found)
    print_cases(cases, outcomes["graded"])
    if args.peers_python:
        print("\npeers (own defaults, TRL names; critical = stop, warning = flag)")
        for peer, (version, found) in run_peers(args.peers_python, [c for c in cases if c.scored]).items():
            counts = score(cases, found)
            print(f"  {peer} {version} {counts.line()} (stopped {counts.bad_stopped}/{counts.bad}, good runs flagged "
                  f"{counts.good_flagged}/{counts.good}, median lead {median_text(leads(cases, found))})")  # fmt: skip
    else:
        print("\npeers: not run; give --peers-python the Python of an environment that has them")
    if not args.quick:
        counts, chosen, each = leave_one_source_out(cases)
        print(f"\nleave one source out over {len(chosen)} sources and {len(each)} settings")
        clean, caught = sum(one.good_stopped == 0 for one in each), [one.bad_caught for one in each]
        worst = max(one.good_stopped for one in each)
        print(f"  on all cases {clean} of {len(each)} settings stop no good run (at most {worst}/{counts.good}), "
              f"and they catch {min(caught)} to {max(caught)} of {counts.bad} bad ones")  # fmt: skip
        for text in sorted(set(chosen)):
            print(f"  chosen {chosen.count(text)} times: {text}")
        print(f"  graded, held-out sources: {counts.line()}")
    print()
    for name, found in outcomes.items():
        print(f"{name} {score(cases, found).line()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
