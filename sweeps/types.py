"""The records the parts of a sweep hand to each other: search-space entries, stages, runs and the plan."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweeps.compose import Composer

Value = bool | int | float | str | None
Params = dict[str, Any]


@dataclass(frozen=True)
class SpaceEntry:
    """One searched key: a float or int interval, or a list of choices, active only when `when` holds.

    `when` maps another searched (or fixed) key to the values under which this one is asked for; an entry that
    is not active is left out of the parameters, and the run keeps its default.
    """

    key: str
    kind: str  # "float" | "int" | "choice"
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: tuple[Value, ...] = ()
    when: dict[str, tuple[Value, ...]] = field(default_factory=dict)

    def active(self, params: Mapping[str, Any]) -> bool:
        """True when every condition of `when` is met by `params` (values already chosen)."""
        return all(params.get(key) in allowed for key, allowed in self.when.items())

    def holds(self, value: Any) -> bool:
        """True for a value that a search of this entry could give."""
        if self.kind == "choice":
            return value in self.choices
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return bool(number and (self.low is None or value >= self.low) and (self.high is None or value <= self.high))

    def grid(self) -> list[Value]:
        """The values a grid visits: the choices, or low..high by `step` (int: 1); ValueError without one."""
        if self.kind == "choice":
            return list(self.choices)
        if self.low is None or self.high is None:
            raise ValueError(f"{self.key}: an interval needs low and high")
        step = self.step or (1 if self.kind == "int" else None)
        if step is None:
            raise ValueError(f"{self.key}: a grid over an interval needs a step")
        count = int((self.high - self.low) / step + 1e-9) + 1
        values = [self.low + step * index for index in range(count)]
        # 0.1 + 0.1 + 0.1 must print as 0.3, or the arm's name and its key change with the platform.
        return [int(value) if self.kind == "int" else float(f"{value:.12g}") for value in values]


@dataclass(frozen=True)
class Stage:
    """One step of a staged sweep: it searches `space` (or compares `arms`) with the earlier winners fixed.

    `trials` counts configurations (0 = every cell of the grid), `share` is its part of the budget (0 to 1).
    """

    name: str
    space: tuple[SpaceEntry, ...] = ()
    zipped: tuple[Params, ...] = ()
    arms: dict[str, list[str]] = field(default_factory=dict)
    sampler: str = "grid"
    trials: int = 0
    share: float = 0.0


@dataclass
class RunSpec:
    """One training run: its key, its place in the plan and the resolved config the worker receives.

    `overrides` are the Hydra overrides in which it differs from the base, `params` the searched values behind
    them. `parent` is the key of the run it was forked from (interventions), at rollout step `parent_step`.
    """

    key: str
    name: str
    arm: str
    seed: int
    stage: str
    overrides: list[str]
    config: dict[str, Any]
    steps: int
    params: Params = field(default_factory=dict)
    parent: str | None = None
    parent_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunSpec:
        """The inverse of `to_dict`."""
        return cls(**data)


@dataclass
class Plan:
    """Everything a sweep will do, settled before anything runs.

    `runs` are all runs known now (arms x seeds, grids). With a sampler other than "none" and "grid", or with
    stages, more are made from suggested values by `make_run`. `command` are the overrides the user gave;
    `directory` is the results folder; `sweep`, `engine`, `study` are resolved config sections as plain dicts.
    """

    name: str
    question: str
    runs: list[RunSpec]
    arms: list[str]
    baseline: str
    seeds: list[int]
    sweep: dict[str, Any]
    engine: dict[str, Any]
    study: dict[str, Any]
    directory: Path
    space: list[SpaceEntry] = field(default_factory=list)
    zipped: list[Params] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    code_version: str = ""
    composer: Composer | None = field(default=None, repr=False, compare=False)

    @property
    def searched(self) -> bool:
        """True when runs are suggested by a sampler while the sweep goes on."""
        return self.study.get("sampler", "none") not in ("none", "grid") or bool(self.stages)

    def make_run(
        self,
        params: Mapping[str, Any],
        seed: int,
        stage: str = "",
        arm: str | None = None,
        overrides: Sequence[str] = (),
    ) -> RunSpec:
        """The sweep's base with `params` ({key: value}, group choices too) and `overrides` put on top.

        Winners of earlier stages are simply further `params`. Cheap for values and seeds (no composition);
        raises ConfigError with every mistake when the values do not make a valid run.
        """
        return self._composer().make_run(self.name, params, seed, stage, arm, overrides)

    def typical_run(self) -> RunSpec:
        """The first run, or of a search that has none yet, the base."""
        return self.runs[0] if self.runs else self.make_run({}, self.seeds[0])

    def make_child(self, run: RunSpec, overrides: Sequence[str], step: int) -> RunSpec:
        """A fork of `run` from rollout step `step` with `overrides` on top, under a key of its own."""
        return self._composer().make_child(self.name, run, overrides, step)

    def _composer(self) -> Composer:
        if self.composer is None:
            from sweeps.compose import Composer

            self.composer = Composer.from_command(self.command)
        return self.composer

    def to_json(self) -> str:
        """The plan as JSON; configs that differ only in their seed are stored once."""
        configs: dict[str, dict[str, Any]] = {}
        index: dict[str, str] = {}
        runs = []
        for run in self.runs:
            shared = {key: value for key, value in run.config.items() if key != "seed"}
            text = json.dumps(shared, sort_keys=True)
            name = index.setdefault(text, f"c{len(index)}")
            configs[name] = shared
            record = {key: value for key, value in vars(run).items() if key != "config"}
            runs.append({**record, "config": name})
        apart = ("runs", "composer", "directory")
        body = {key: value for key, value in vars(self).items() if key not in apart}
        body["space"] = [asdict(entry) for entry in self.space]
        body["stages"] = [asdict(stage) for stage in self.stages]
        body.update(directory=str(self.directory), configs=configs, runs=runs)
        return json.dumps(body, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`; `make_run` then composes from `command` on first use."""
        body = json.loads(text)
        configs = body.pop("configs")
        runs = []
        for record in body.pop("runs"):
            config = copy.deepcopy(configs[record["config"]])
            config["seed"] = record["seed"]
            runs.append(RunSpec(**{**record, "config": config}))
        body["directory"] = Path(body["directory"])
        body["space"] = [_entry(entry) for entry in body["space"]]
        body["stages"] = [_stage(stage) for stage in body["stages"]]
        return cls(runs=runs, **body)

    def by_key(self) -> dict[str, RunSpec]:
        """The known runs by key."""
        return {run.key: run for run in self.runs}

    def __iter__(self) -> Iterator[RunSpec]:
        return iter(self.runs)


def _entry(data: dict[str, Any]) -> SpaceEntry:
    when = {key: tuple(values) for key, values in data.pop("when").items()}
    return SpaceEntry(**{**data, "choices": tuple(data["choices"]), "when": when})


def _stage(data: dict[str, Any]) -> Stage:
    space = tuple(_entry(entry) for entry in data.pop("space"))
    return Stage(**{**data, "space": space, "zipped": tuple(data["zipped"])})
