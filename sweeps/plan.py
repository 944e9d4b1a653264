"""From a composed command to every run of a sweep, with all reasons to refuse it collected first."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from reasonrl.config import doubts
from reasonrl.errors import ConfigError, Mistake
from sweeps import overrides as ov
from sweeps.arms import Arm, check_arms, find_baseline, lost_values, not_of_a_run
from sweeps.compose import Composer, resolve, typed_config
from sweeps.config import SAMPLERS, folder_mistakes, validate_sweep
from sweeps.space import cells, from_override, read_space, read_stages, read_zip
from sweeps.types import Params, Plan, RunSpec, SpaceEntry, Stage

SEARCHES = tuple(name for name in SAMPLERS if name not in ("none", "grid"))


NARROW = 'To search a narrower range, write "{key}=interval(LOW,HIGH)" or "{key}=choice(A,B)".'
SEEDS_END = 2**53  # what a table of numbers holds exactly
SEEDS_ALLOWED = "seeds are whole numbers from 0 on, below 2^53"


@dataclass
class _Draft:
    """What the command and the sweep file ask for, before runs are made of it."""

    axes: dict[str, list[str]] = field(default_factory=dict)
    arms: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    space: list[SpaceEntry] = field(default_factory=list)
    zipped: list[Params] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def asks(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.axes or self.arms or self.space or self.zipped or self.stages or len(self.seeds) > 1)


def make_plan(
    cfg: DictConfig | None, loader: Any, arguments: Sequence[str], hydra: Any = None, single: bool = False
) -> Plan:
    """The plan of a composed Hydra config (None: not composed yet) and the overrides behind it.

    `hydra` is Hydra's own section (what else was given on the command line), `single` plans the one run of
    `python sweep.py`. Raises ConfigError with every mistake at once: bad overrides of an arm, configs that fail
    validation, inert, confounded or duplicate arms. Writes nothing.
    """
    root = hydra.job.config_name if hydra else "config"
    fixed = [*_hydra_overrides(hydra), *(text for text in arguments if _is_fixed(text))]
    composer = Composer(loader, fixed, root)
    if cfg is not None:
        composer.known(cfg)
    config = resolve(composer.raw())
    if config["sweep"]["base"]:
        composer = Composer(loader, _under(fixed, config["sweep"]["base"]), root)
    chosen = ov.chosen_sweep(fixed)
    config["sweep"]["name"] = config["sweep"]["name"] or (chosen and chosen.rsplit("/", 1)[-1])
    draft = _draft(config, arguments)
    name = "single" if single else _name(config, draft, fixed)
    directory = Path(config["results"]) / name
    draft.mistakes += validate_sweep(config) + ov.ignored(config, fixed) + ov.repeated(arguments)
    draft.mistakes += folder_mistakes("results", config["results"], directory)
    if chosen and not draft.asks:
        cure = "Give the file arms, a space or seeds, as the files in conf/sweep do, or leave +sweep out to train once."
        asked = "arms, space, zip, stages or more than one seed"
        draft.mistakes.append(Mistake("sweep", chosen, f"asks nothing: its section sweep has no {asked}", cure))
    sweep, study = config["sweep"], config["study"]
    searched = study["sampler"] in SEARCHES or bool(draft.stages)
    arms: list[Arm] = []
    draft.space = [_whole(entry, composer) for entry in draft.space]
    draft.stages = [replace(s, space=tuple(_whole(entry, composer) for entry in s.space)) for s in draft.stages]
    if searched:
        draft.mistakes += _check_search(draft, study, composer)
        draft.mistakes += composer.mistakes([])
    else:
        arms = _arms(draft, study)
        draft.mistakes += check_arms(arms, sweep, composer)
    if draft.mistakes:
        raise ConfigError(_once(draft.mistakes))
    baseline = find_baseline(arms, sweep["baseline"]) or (arms[0] if arms else None)
    runs = _runs(arms, draft.seeds, composer)
    tried = _tried(draft, composer) if searched else ((arm.name, arm.config) for arm in arms)
    return Plan(
        name=name, question=sweep["question"], runs=runs, arms=[arm.name for arm in arms],
        baseline=baseline.name if baseline else "", seeds=draft.seeds,
        sweep={**sweep, "name": name}, engine=config["engine"], study=study,
        directory=directory,
        space=draft.space, zipped=draft.zipped, stages=draft.stages, warnings=_warnings(tried),
        command=composer.command, code_version=_code_version(), composer=composer,
    )  # fmt: skip


def _whole(entry: SpaceEntry, composer: Composer) -> SpaceEntry:
    """`interval(4, 16)` of a key that takes whole numbers only means whole numbers."""
    ends = (entry.low, entry.high, entry.step or 1)
    if entry.kind == "float" and composer.is_whole(entry.key) and all(end == int(end or 0) for end in ends):
        low, high, step = (int(end or 0) for end in ends)
        return replace(entry, kind="int", low=low, high=high, step=step if entry.step else None)
    return entry


def _is_fixed(text: str) -> bool:
    return ov.key_of(text) != "seed" and not ov.parse(text).is_sweep_override()


def _warnings(tried: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What will most likely disappoint in these (label, config), each doubt once, with whom it concerns."""
    concerned: dict[str, list[str]] = {}
    labels: list[str] = []
    for label, config in tried:
        labels.append(label)
        for doubt in doubts(typed_config(config)):
            concerned.setdefault(doubt, []).append(label)
    return [doubt if found == labels else f"{', '.join(found)}: {doubt}" for doubt, found in concerned.items()]


def _tried(draft: _Draft, composer: Composer) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The base of a search, the arms of its stages, and every end of its space: (label, config)."""
    yield "base", composer.config()
    for stage in draft.stages:
        for arm, texts in stage.arms.items():
            yield f"{stage.name}/{arm}", composer.apply(texts)
    for entry in (*draft.space, *(entry for stage in draft.stages for entry in stage.space)):
        for texts in _ends(entry):
            yield texts[-1], composer.apply(texts)


def _hydra_overrides(hydra: Any) -> list[str]:
    """A search path or a Hydra choice given on the command line, which decides what the groups offer."""
    texts = hydra.overrides.hydra if hydra else []
    return [str(text) for text in texts if not str(text).startswith("hydra.mode")]


def _draft(config: Mapping[str, Any], arguments: Sequence[str]) -> _Draft:
    sweep, sampler = config["sweep"], config["study"]["sampler"]
    draft = _Draft()
    typed_seed = False
    for text in arguments:
        override = ov.parse(text)
        key = override.key_or_group
        if key == "seed":
            typed_seed = True
            draft.seeds = _seeds(text, draft.mistakes)
        elif not override.is_sweep_override():
            continue
        elif override.is_interval_sweep() or sampler in SEARCHES:
            _add_entry(draft, override)
        else:
            draft.axes[key] = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if typed_seed and (given := [text for text in arguments if ov.key_of(text) == "sweep.seeds"]):
        allowed = f"was given together with {given[-1]}, and one of them would be lost"
        draft.mistakes.append(Mistake("seed", ..., allowed, "Give one of them."))
    if not typed_seed:
        draft.seeds = [int(seed) for seed in sweep["seeds"]]
        if not all(0 <= seed < SEEDS_END for seed in draft.seeds):
            draft.mistakes.append(Mistake("sweep.seeds", draft.seeds, SEEDS_ALLOWED, "For instance [0,1,2]."))
    twice = sorted({seed for seed in draft.seeds if draft.seeds.count(seed) > 1})
    if twice:
        draft.mistakes.append(Mistake("sweep.seeds", draft.seeds, f"names {', '.join(map(str, twice))} twice"))
    for arm, texts in sweep["arms"].items():
        try:
            draft.arms[str(arm)] = ov.as_list(texts)
        except ValueError as error:
            draft.mistakes.append(Mistake(f"sweep.arms.{arm}", texts, str(error)))
    entries, wrong = read_space(sweep["space"])
    typed = {entry.key for entry in draft.space}
    draft.space = [entry for entry in entries if entry.key not in typed] + draft.space
    draft.zipped, wrong_zip = read_zip(sweep["zip"])
    draft.stages, wrong_stages = read_stages(sweep["stages"])
    draft.mistakes += wrong + wrong_zip + wrong_stages
    return draft


def _under(fixed: Sequence[str], base: Sequence[str]) -> list[str]:
    """The command's overrides over the sweep's own `base`, the choice of the sweep file kept."""
    return ov.layer([text for text in fixed if ov.key_of(text) == "sweep"], base, fixed)


def _seeds(text: str, mistakes: list[Mistake]) -> list[int]:
    override = ov.parse(text)
    if override.is_interval_sweep():
        mistakes.append(Mistake("seed", text.split("=", 1)[1], "seeds are enumerated", "Write seed=range(0,5)."))
        return [0]
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(whole) < len(values) or not all(0 <= seed < SEEDS_END for seed in whole):
        mistakes.append(Mistake("seed", text.split("=", 1)[1], SEEDS_ALLOWED))
    return [int(seed) for seed in whole] or [0]


def _add_entry(draft: _Draft, override: Any) -> None:
    try:
        draft.space.append(from_override(override))
    except ValueError as error:
        draft.mistakes.append(Mistake(override.key_or_group, override.get_value_string(), str(error)))


def _arms(draft: _Draft, study: Mapping[str, Any]) -> list[Arm]:
    """Named arms crossed with swept keys, zipped rows and the cells of a grid."""
    named = draft.arms or {"": []}
    axes = [list(values) for values in draft.axes.values()]
    grid: list[Params] = [{}]
    if study["sampler"] == "none" and draft.space:
        keys = ", ".join(entry.key for entry in draft.space)
        draft.mistakes.append(
            Mistake(
                "study.sampler",
                "none",
                f"cannot search {keys}",
                "Choose study=grid, tpe, random, cmaes or gp.",
            )
        )
    else:
        try:
            grid = cells(draft.space, draft.zipped)
        except ValueError as error:
            draft.mistakes.append(Mistake("sweep.space", "grid", str(error)))
    arms = []
    for (name, texts), combination, params in itertools.product(named.items(), itertools.product(*axes), grid):
        values = [ov.write(key, value) for key, value in params.items()]
        layered = ov.layer(texts, combination, values)
        parts = [name, ",".join(_short(text, list(draft.axes)) for text in combination), ov.label(params)]
        label = ",".join(part for part in parts if part) or "base"
        arms.append(Arm(label, layered, dict(params), crossed=list(combination) + values, named=name))
    return arms


def _short(text: str, keys: Sequence[str]) -> str:
    """How a swept override appears in an arm's name; a lone config group shows only its option."""
    key, _, value = text.partition("=")
    key = ov.key_of(text)
    if "." not in key and len(keys) == 1:
        return value
    return f"{key.rsplit('.', 1)[-1]}={value}"


def _runs(arms: Sequence[Arm], seeds: Sequence[int], composer: Composer) -> list[RunSpec]:
    # Seeds outside: the first comparison of all arms is complete as early as possible.
    runs = [
        composer.finish(arm.config, arm.name, seed, "", arm.overrides, arm.params) for seed in seeds for arm in arms
    ]
    keys = [run.key for run in runs]
    assert len(set(keys)) == len(keys), "arms and seeds were checked to differ"
    return runs


def _check_search(draft: _Draft, study: Mapping[str, Any], composer: Composer) -> list[Mistake]:
    mistakes = []
    if draft.stages:
        for key, given in (
            ("sweep.arms", draft.arms),
            ("sweep.space", draft.space),
            ("sweep.zip", draft.zipped),
        ):
            if given:
                names = ", ".join(entry.key if isinstance(entry, SpaceEntry) else str(entry) for entry in given)
                mistakes.append(Mistake(key, names, "belongs into a stage when sweep.stages is used"))
        for key, values in draft.axes.items():
            swept = ",".join(value.partition("=")[2] for value in values)
            cure = f"Give one value, or put {key} into a stage's space."
            mistakes.append(Mistake(key, swept, "several values belong into a stage when sweep.stages is used", cure))
        entries = [entry for stage in draft.stages for entry in stage.space]
        zipped = [row for stage in draft.stages for row in stage.zipped]
        for stage in draft.stages:
            for arm, texts in stage.arms.items():
                found = not_of_a_run(texts) or composer.mistakes(texts)
                mistakes += [_at(mistake, f"{stage.name}/{arm}") for mistake in found]
    else:
        entries, zipped = draft.space, draft.zipped
        if not entries:
            mistakes.append(
                Mistake(
                    "sweep.space",
                    "{}",
                    f"study.sampler={study['sampler']} has nothing to search",
                    'Add e.g. "optim.lr=tag(log,interval(1e-5,1e-3))".',
                )
            )
        if draft.arms or draft.zipped:
            mistakes.append(
                Mistake(
                    "study.sampler",
                    study["sampler"],
                    "a search has no arms and no zip list",
                    "Make them a choice in sweep.space, or use study=grid.",
                )
            )
        mistakes += lost_values(composer, [[entry.key for entry in entries]], "the search sets it", NARROW)
        if study["trials"] < 1:
            mistakes.append(Mistake("study.trials", study["trials"], "needs at least 1 configuration to try"))
    for entry in entries:
        mistakes += _check_entry(entry, composer)
    for row in zipped:
        mistakes += composer.mistakes([ov.write(key, value) for key, value in row.items()])
    return mistakes


def _check_entry(entry: SpaceEntry, composer: Composer) -> list[Mistake]:
    """Every choice, or both ends of the interval, must compose and validate."""
    mistakes = []
    for texts in _ends(entry):
        found = not_of_a_run(texts) or composer.mistakes(texts)
        mistakes += [Mistake(m.key, m.value, f"{m.allowed} (in the space of {entry.key})", m.cure) for m in found]
    return mistakes


def _ends(entry: SpaceEntry) -> list[list[str]]:
    """Every choice, or both ends of the interval, as overrides behind those that its conditions ask for."""
    ends = entry.choices if entry.kind == "choice" else (entry.low, entry.high)
    conditions = [ov.write(key, values[0]) for key, values in entry.when.items()]
    return [[*conditions, ov.write(entry.key, value)] for value in ends]


def _at(mistake: Mistake, arm: str) -> Mistake:
    return Mistake(f"{arm}: {mistake.key}", mistake.value, mistake.allowed, mistake.cure)


def _once(mistakes: Sequence[Mistake]) -> list[Mistake]:
    return list({str(mistake): mistake for mistake in mistakes}.values())


def _name(config: Mapping[str, Any], draft: _Draft, fixed: Sequence[str]) -> str:
    """The sweep's name; else its swept keys and a hash of what is fixed, so that it can resume."""
    if config["sweep"]["name"]:
        return str(config["sweep"]["name"])
    keys = [key.rsplit(".", 1)[-1] for key in (*draft.axes, *(entry.key for entry in draft.space))]
    rest = [text for text in fixed if ov.key_of(text) not in ("plan", "results")
            and ov.key_of(text).split(".")[0] not in ("engine", "tracking")]  # fmt: skip
    stem = "+".join(keys) or "seeds"
    return f"{stem}_{hashlib.sha256(' '.join(sorted(rest)).encode()).hexdigest()[:6]}" if rest else stem


def _code_version() -> str:
    from reasonrl import config

    return str(getattr(config, "code_version", lambda: "")())
