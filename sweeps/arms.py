"""Arms of an ablation and the reasons to refuse them: broken, inert (changes nothing) or confounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reasonrl.config import inert, validate
from reasonrl.errors import Mistake
from sweeps import overrides as ov
from sweeps.choices import flatten, is_under, keys_set
from sweeps.compose import Composer, typed_config
from sweeps.config import SWEEP_SECTIONS
from sweeps.types import Params

# Above this many arms (grids), single overrides are no longer taken away one by one to find idle ones.
MAX_SINGLE_CHECKS = 64


@dataclass
class Arm:
    """One configuration of the plan; `crossed` are its overrides from swept keys or a grid cell."""

    name: str
    overrides: list[str]
    params: Params = field(default_factory=dict)
    crossed: list[str] = field(default_factory=list)
    named: str = ""  # its name in the sweep file, before swept keys were appended
    config: dict[str, Any] = field(default_factory=dict)
    effective: dict[str, Any] = field(default_factory=dict)  # canonical form, flat


def check_arms(arms: Sequence[Arm], sweep: Mapping[str, Any], composer: Composer) -> list[Mistake]:
    """Compose and judge all arms; fills in their configs and returns every mistake."""
    mistakes = _compose(arms, composer)
    if sweep["baseline"] and find_baseline(arms, sweep["baseline"]) is None:
        names = ", ".join(dict.fromkeys(arm.named or arm.name for arm in arms))
        mistakes.append(Mistake("sweep.baseline", sweep["baseline"], f"no such arm; the arms are {names}"))
    sound = [arm for arm in arms if arm.effective]
    if sound:
        mistakes += _unknown_factors(sound[0].config, sweep, composer)
    if mistakes or not sound:
        return mistakes
    mistakes += _set_by_all(sound, composer)
    mistakes += idle_values(composer.command, [arm.config for arm in sound])
    mistakes += (same := _inert(sound))
    if len(arms) <= MAX_SINGLE_CHECKS:
        known = {mistake.value for mistake in same}
        mistakes += [m for arm in sound if arm.name not in known for m in _idle_overrides(arm, composer)]
    return mistakes + _confounded(sound, sweep)


def find_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """The arm called `name`, or the first of those that a swept key made of it."""
    return next((arm for arm in arms if name and name in (arm.name, arm.named)), None)


def _compose(arms: Sequence[Arm], composer: Composer) -> list[Mistake]:
    found: dict[str, list[Mistake]] = {}
    for arm in arms:
        if found.setdefault(arm.name, not_of_a_run(arm.overrides)):
            continue
        try:
            arm.config = composer.apply(arm.overrides)
            typed = typed_config(arm.config)
            found[arm.name] = validate(typed)
        except Exception:
            found[arm.name] = composer.mistakes(arm.overrides)
            if not found[arm.name]:
                raise
        if not found[arm.name]:
            arm.effective = composer.canonical(arm.config)
    if not any(found.values()):
        return []
    shared = set.intersection(*(set(map(str, wrong)) for wrong in found.values()))
    mistakes = []
    for name, wrong in found.items():
        for mistake in wrong:
            own = str(mistake) not in shared and len(arms) > 1
            key = f"{name}: {mistake.key}" if own else mistake.key
            mistakes.append(Mistake(key, mistake.value, mistake.allowed, mistake.cure))
    return mistakes


def not_of_a_run(texts: Iterable[str]) -> list[Mistake]:
    """Overrides of the sweep, its engine or Hydra, and of the seed, where only those of a run mean something."""
    mistakes = []
    for text in texts:
        section = ov.key_of(text).split(".")[0].split("/")[0]
        if section in (*SWEEP_SECTIONS, "hydra", "seed"):
            cure = "Use sweep.seeds." if section == "seed" else "Set it for the whole sweep."
            mistakes.append(
                Mistake(ov.key_of(text), text.partition("=")[2], "cannot differ between the runs of a sweep", cure)
            )
    return mistakes


def _inert(arms: Sequence[Arm]) -> list[Mistake]:
    first: dict[str, Arm] = {}
    mistakes = []
    for arm in arms:
        form = repr(sorted(arm.effective.items()))
        if form in first:
            other = first[form]
            mistakes.append(
                Mistake(
                    "sweep.arms",
                    arm.name,
                    f"changes nothing against {other.name}: {_why_inert(arm, other)}",
                    "Remove the arm or change a setting that has an effect.",
                )
            )
        first.setdefault(form, arm)
    return mistakes


def _why_inert(arm: Arm, other: Arm) -> str:
    keys = differences(dict(flatten(arm.config)), dict(flatten(other.config)))
    if not keys:
        return "both set the same values"
    optim = arm.config.get("optim", {})
    if all(key.startswith("loss.") for key in keys) and optim.get("minibatches") == optim.get("inner_epochs") == 1:
        return (
            "with one update per rollout (optim.minibatches=1, optim.inner_epochs=1) the ratio is 1, "
            f"so {', '.join(keys)} cannot act"
        )
    return f"{', '.join(keys)} has no effect under the chosen kinds{_kinds(arm, keys)}"


def _kinds(arm: Arm, keys: Iterable[str]) -> str:
    sections = sorted({key.split(".")[0] for key in keys})
    kinds = [f"{name}.kind={arm.config[name]['kind']}" for name in sections
             if isinstance(arm.config.get(name), dict) and "kind" in arm.config[name]]  # fmt: skip
    return f" ({', '.join(kinds)})" if kinds else ""


def _idle_overrides(arm: Arm, composer: Composer) -> list[Mistake]:
    """Value overrides of an arm that change a value but could be left out without any effect."""
    if len(arm.overrides) < 2:
        return []  # then the whole arm would be inert
    mistakes = []
    for text in arm.overrides:
        if composer.choices.is_choice(text):
            continue
        try:
            without = composer.apply([other for other in arm.overrides if other != text])
            if validate(typed_config(without)):
                continue
        except Exception:  # noqa: S112 - the other overrides alone need not make a valid config
            continue
        if without != arm.config and composer.canonical(without) == arm.effective:
            key, _, value = text.lstrip("+").partition("=")
            allowed = f"has no effect in this arm{_kinds(arm, [ov.key_of(text)])}"
            mistakes.append(Mistake(f"{arm.name}: {key}", value, allowed, "Remove it."))
    return mistakes


def _set_by_all(arms: Sequence[Arm], composer: Composer) -> list[Mistake]:
    """Single values of the command that every arm sets over."""
    if len(arms) < 2 and not arms[0].overrides:
        return []
    own = [[ov.key_of(text) for text in arm.overrides if not composer.choices.is_choice(text)] for arm in arms]
    return lost_values(composer, own, "every arm sets it", "Change the arms instead.")


def lost_values(composer: Composer, sets: Sequence[Sequence[str]], why: str, cure: str) -> list[Mistake]:
    """Single values of the command under a key of each of `sets`, so that they would be lost without a word."""
    mistakes = []
    for text in composer.command:
        key = ov.key_of(text)
        if key == "sweep" or key.startswith("hydra") or composer.choices.is_choice(text):
            continue
        names = keys_set(text)
        if all(any(is_under(name, given) for given in keys) for name in names for keys in sets):
            value = text.partition("=")[2]
            mistakes.append(Mistake(key, value, f"has no effect: {why}", cure.format(key=names[0])))
    return mistakes


def idle_values(texts: Iterable[str], configs: Sequence[Mapping[str, Any]]) -> list[Mistake]:
    """Typed values that have no effect under the kinds that any of the configs has chosen."""
    idle = set.intersection(*(inert(typed_config(config)) for config in configs)) if configs else set()
    mistakes = []
    for text in texts:
        for key in keys_set(text):
            if key in idle:
                section = key.split(".")[0]
                kinds = sorted({str(config[section].get("kind")) for config in configs} - {"None"})
                allowed = f"has no effect with {section}.kind={' or '.join(kinds)}" if kinds else "has no effect here"
                mistakes.append(
                    Mistake(key, text.partition("=")[2], allowed, f"Leave it out, or choose another {section}.")
                )
    return mistakes


def _parts(sweep: Mapping[str, Any]) -> set[str]:
    return {part.strip() for factor in sweep["factors"] for part in factor.split("+")}


def _unknown_factors(config: Mapping[str, Any], sweep: Mapping[str, Any], composer: Composer) -> list[Mistake]:
    return [
        Mistake("sweep.factors", part, "is no key, section or config group")
        for part in sorted(_parts(sweep))
        if part not in config and not composer.choices.options(part) and not _is_key(part, config)
    ]


def _confounded(arms: Sequence[Arm], sweep: Mapping[str, Any]) -> list[Mistake]:
    """Arms that differ from the baseline in a key no factor covers, or in two factors unannounced."""
    # Crossed keys form a full factorial, which confounds nothing: judge the named arms within one cell of it.
    cell = [arm for arm in arms if arm.crossed == arms[0].crossed]
    baseline = find_baseline(cell, sweep["baseline"]) or cell[0]
    mistakes = []
    factors, parts = list(sweep["factors"]), _parts(sweep)
    for arm in cell:
        if arm is baseline:
            continue
        keys = differences(arm.effective, baseline.effective)
        changed = {ov.key_of(text) for text in set(arm.overrides) ^ set(baseline.overrides)}
        if factors:
            if any(_covers(factor, keys) or _covers(factor, changed) for factor in factors):
                continue
            outside = [key for key in keys if not any(is_under(key, part) for part in parts)]
            if outside:
                mistakes.append(
                    Mistake(
                        "sweep.arms",
                        arm.name,
                        f"is confounded: it differs from {baseline.name} in "
                        f"{', '.join(outside)}, which sweep.factors ({', '.join(factors)}) does not list",
                        "Set it in every arm, or list it.",
                    )
                )
                continue
        elif len({key.split(".")[0] for key in keys}) <= 1 or len(changed) == 1:
            continue
        hit = sorted({next((p for p in sorted(parts) if is_under(key, p)), key.split(".")[0]) for key in keys})
        mistakes.append(
            Mistake(
                "sweep.arms",
                arm.name,
                f"is confounded: it differs from {baseline.name} in {len(hit)} factors at once "
                f"({', '.join(hit)}), so an effect has no owner",
                f"Split the arm, or say so: sweep.factors=['{'+'.join(hit)}'].",
            )
        )
    return mistakes


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two flat configs differ, sorted."""
    missing = object()
    return sorted(key for key in {*one, *other} if one.get(key, missing) != other.get(key, missing))


def _covers(factor: str, keys: Iterable[str]) -> bool:
    parts = [part.strip() for part in factor.split("+")]
    return all(any(is_under(key, part) for part in parts) for key in keys)


def _is_key(part: str, config: Mapping[str, Any]) -> bool:
    return any(is_under(key, part) for key, _ in flatten(config))
