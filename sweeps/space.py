"""Search spaces: `choice()`, `interval()`, entries with log and step, conditions, zip lists, stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reasonrl.errors import Mistake
from sweeps import overrides as ov
from sweeps.types import Params, SpaceEntry, Stage

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

ENTRY_KEYS = ("choices", "low", "high", "log", "step", "type", "when")
STAGE_KEYS = ("name", "space", "arms", "zip", "sampler", "trials", "share")
FORMS = "write choice(a, b), interval(low, high), a list, or {low: , high: , log: , step: , type: , when: }"


def read_space(spec: Mapping[str, Any], where: str = "sweep.space") -> tuple[list[SpaceEntry], list[Mistake]]:
    """The entries of a `space` section and every mistake in it; conditions may name keys of any entry."""
    entries, mistakes = [], []
    for key, value in spec.items():
        try:
            entries.append(_read_entry(str(key), value))
        except ValueError as error:
            mistakes.append(Mistake(f"{where}.{key}", value, str(error)))
    known = {entry.key: entry for entry in entries}
    for entry in entries:
        for key in entry.when:
            if key == entry.key:
                mistakes.append(Mistake(f"{where}.{key}.when", key, "a key cannot depend on itself"))
    mistakes += [
        Mistake(f"{where}.{entry.key}.when", " -> ".join(loop), "the conditions form a circle")
        for entry in entries
        if (loop := _circle(entry.key, known))
    ]
    # A condition can only be answered once its key has a value.
    return sorted(entries, key=lambda entry: _depth(entry, known)), mistakes


def from_override(override: Override) -> SpaceEntry:
    """The entry behind a swept command-line override such as `optim.lr=tag(log, interval(1e-5, 1e-3))`."""
    key = override.key_or_group
    if override.is_interval_sweep():
        sweep: Any = override.value()
        low, high = sweep.start, sweep.end
        kind = "int" if isinstance(low, int) and isinstance(high, int) else "float"
        unknown = sweep.tags - {"log", "int", "float"}
        if unknown:
            raise ValueError(f"unknown tag {', '.join(sorted(unknown))}; the tags are log, int and float")
        if "float" in sweep.tags or "int" in sweep.tags:
            kind = "int" if "int" in sweep.tags else "float"
        return _interval(key, low, high, "log" in sweep.tags, None, kind, {})
    values = tuple(_plain(value) for value in override.sweep_iterator())
    return _choice(key, values, {})


def read_zip(spec: Mapping[str, Any], where: str = "sweep.zip") -> tuple[list[Params], list[Mistake]]:
    """The rows of lists that move together: {a: [1, 2], b: [3, 4]} gives [{a: 1, b: 3}, {a: 2, b: 4}]."""
    if not spec:
        return [], []
    lengths = {key: len(values) if isinstance(values, list | tuple) else -1 for key, values in spec.items()}
    bad = [key for key, length in lengths.items() if length < 1]
    if bad:
        return [], [Mistake(f"{where}.{key}", spec[key], "needs a list of at least one value") for key in bad]
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        return [], [Mistake(where, text, "lists that move together need the same length")]
    return [dict(zip(spec, row, strict=True)) for row in zip(*spec.values(), strict=True)], []


def read_stages(specs: Sequence[Any]) -> tuple[list[Stage], list[Mistake]]:
    """The stages of a staged sweep; shares that are not given are split evenly over what is left."""
    stages: list[Stage] = []
    mistakes: list[Mistake] = []
    for index, spec in enumerate(specs):
        where = f"sweep.stages[{index}]"
        if not isinstance(spec, Mapping):
            mistakes.append(Mistake(where, spec, f"a stage is a mapping of {', '.join(STAGE_KEYS)}"))
            continue
        unknown = [key for key in spec if key not in STAGE_KEYS]
        mistakes += [
            Mistake(f"{where}.{key}", spec[key], f"unknown; a stage has {', '.join(STAGE_KEYS)}") for key in unknown
        ]
        name = str(spec.get("name") or f"stage{index + 1}")
        entries, wrong = read_space(spec.get("space") or {}, f"{where}.space")
        mistakes += wrong
        zipped, wrong = read_zip(spec.get("zip") or {}, f"{where}.zip")
        mistakes += wrong
        arms = {}
        for arm, texts in (spec.get("arms") or {}).items():
            try:
                arms[str(arm)] = ov.as_list(texts)
            except ValueError as error:
                mistakes.append(Mistake(f"{where}.arms.{arm}", texts, str(error)))
        stage = Stage(
            name=name, space=tuple(entries), zipped=tuple(zipped), arms=arms,
            sampler=str(spec.get("sampler", "grid")), trials=int(spec.get("trials") or 0),
            share=float(spec.get("share") or 0.0),
        )  # fmt: skip
        stages.append(stage)
        mistakes += _stage_mistakes(stage, where)
    names = [stage.name for stage in stages]
    mistakes += [
        Mistake("sweep.stages", name, "two stages have this name")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    return _shared(stages, mistakes), mistakes


def cells(entries: Sequence[SpaceEntry], zipped: Sequence[Params] = ()) -> list[Params]:
    """Every cell of the grid: conditions prune it, zipped rows are one axis; ValueError without a step."""
    rows: list[Params] = [{}]
    for entry in entries:
        grown: list[Params] = []
        for row in rows:
            if entry.active(row):
                grown += [{**row, entry.key: value} for value in entry.grid()]
            else:
                grown.append(row)
        rows = grown
    if zipped:
        rows = [{**row, **extra} for row, extra in itertools.product(rows, zipped)]
    return rows


def stage_cells(stage: Stage) -> list[Params] | None:
    """The configurations an enumerated stage compares; None when a sampler suggests them."""
    if stage.sampler not in ("grid", "none"):
        return None
    return cells(stage.space, stage.zipped) if stage.space or stage.zipped else []


def _shared(stages: list[Stage], mistakes: list[Mistake]) -> list[Stage]:
    for stage in stages:
        if not 0 <= stage.share <= 1:
            mistakes.append(Mistake(f"sweep.stages.{stage.name}.share", stage.share, "a share of the budget, 0 to 1"))
    given = sum(stage.share for stage in stages)
    open_stages = [stage for stage in stages if stage.share == 0]
    if given > 1 + 1e-9 or (not open_stages and stages and abs(given - 1) > 1e-6):
        mistakes.append(Mistake("sweep.stages", f"shares add up to {given:g}", "they must add up to 1"))
        return stages
    each = (1 - given) / len(open_stages) if open_stages else 0.0
    return [Stage(**{**vars(stage), "share": stage.share or each}) for stage in stages]


def _stage_mistakes(stage: Stage, where: str) -> list[Mistake]:
    from sweeps.config import SAMPLERS

    mistakes = []
    if stage.sampler not in SAMPLERS:
        mistakes.append(Mistake(f"{where}.sampler", stage.sampler, f"unknown; choose {', '.join(SAMPLERS)}"))
    if not (stage.space or stage.zipped or stage.arms):
        mistakes.append(Mistake(where, stage.name, "a stage needs a space, a zip list or arms"))
    if stage.sampler not in ("grid", "none"):
        if stage.trials < 1:
            mistakes.append(Mistake(f"{where}.trials", stage.trials, f"sampler {stage.sampler} needs trials"))
        if stage.arms or stage.zipped:
            mistakes.append(
                Mistake(
                    f"{where}.sampler",
                    stage.sampler,
                    "arms and zip lists are enumerated",
                    "Use sampler: grid.",
                )
            )
    else:
        for entry in stage.space:
            try:
                entry.grid()
            except ValueError as error:
                mistakes.append(Mistake(f"{where}.space.{entry.key}", "interval", str(error)))
    return mistakes


def _read_entry(key: str, value: Any) -> SpaceEntry:
    if isinstance(value, str):
        try:
            override = ov.parse(f"{key}={value}")
        except Exception as error:
            raise ValueError(f"cannot be read; {FORMS}") from error
        if not override.is_sweep_override():
            raise ValueError(f"is one value, not a range; {FORMS}")
        return from_override(override)
    if isinstance(value, list | tuple):
        return _choice(key, tuple(value), {})
    if not isinstance(value, Mapping):
        raise ValueError(FORMS)
    unknown = [name for name in value if name not in ENTRY_KEYS]
    if unknown:
        raise ValueError(f"unknown entry {', '.join(map(str, unknown))}; choose {', '.join(ENTRY_KEYS)}")
    when = {
        str(name): tuple(allowed) if isinstance(allowed, list | tuple) else (allowed,)
        for name, allowed in (value.get("when") or {}).items()
    }
    if "choices" in value:
        return _choice(key, tuple(value["choices"]), when)
    if value.get("low") is None or value.get("high") is None:
        raise ValueError(f"needs low and high, or choices; {FORMS}")
    low, high, step = value["low"], value["high"], value.get("step")
    whole = all(isinstance(number, int) for number in (low, high, 1 if step is None else step))
    kind = str(value.get("type") or ("int" if whole else "float"))
    if kind not in ("int", "float"):
        raise ValueError(f"type {kind} is unknown; choose int or float")
    return _interval(key, low, high, bool(value.get("log", False)), step, kind, when)


def _choice(key: str, values: tuple[Any, ...], when: dict[str, tuple[Any, ...]]) -> SpaceEntry:
    if len(values) < 1:
        raise ValueError("needs at least one choice")
    if len(set(map(repr, values))) < len(values):
        raise ValueError(f"lists a choice twice: {list(values)}")
    return SpaceEntry(key, "choice", choices=values, when=when)


def _interval(
    key: str, low: Any, high: Any, log: bool, step: Any, kind: str, when: dict[str, tuple[Any, ...]]
) -> SpaceEntry:
    numbers = [low, high] + ([] if step is None else [step])
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ValueError(f"low, high and step must be numbers, got {numbers}")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"low, high and step must be finite, got {numbers}")
    if not low < high:
        raise ValueError(f"low {low} must be below high {high}")
    if log and low <= 0:
        raise ValueError(f"a log interval needs low above 0, got {low}")
    if step is not None and (step <= 0 or step > high - low):
        raise ValueError(f"step {step} must be above 0 and fit between {low} and {high}")
    if log and step is not None:
        raise ValueError("log and step exclude each other")
    return SpaceEntry(key, kind, low=low, high=high, log=log, step=step, when=when)


def _plain(value: Any) -> Any:
    text = getattr(value, "text", None)  # a quoted string of Hydra's parser
    return value if text is None else text


def _circle(key: str, known: Mapping[str, SpaceEntry]) -> list[str]:
    def walk(current: str, path: list[str]) -> list[str]:
        for parent in known[current].when if current in known else ():
            if parent == key and parent != current:
                return [*path, parent]
            if parent not in path and (found := walk(parent, [*path, parent])):
                return found
        return []

    return walk(key, [key])


def _depth(entry: SpaceEntry, known: Mapping[str, SpaceEntry], seen: tuple[str, ...] = ()) -> int:
    parents = [known[key] for key in entry.when if key in known and key not in seen and key != entry.key]
    return 1 + max((_depth(parent, known, (*seen, entry.key)) for parent in parents), default=-1)
