"""What `sweep.py` does around Hydra: order of the command line, mistakes on one screen, the two ways in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from reasonrl.distributed import launched_rank, launched_size
from reasonrl.errors import ConfigError, EngineError, Mistake, ReasonRLError
from sweeps import overrides as ov
from sweeps.config import register

_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn",
               "--config-dir", "-cd", "--experimental-rerun"}  # fmt: skip
_INFO = {"--info", "-i"}
_INFO_VALUES = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
_SHOW = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_CONFIG_DIR = {"--config-dir", "-cd"}
_MULTIRUN = {"-m", "--multirun"}
BAD_INPUT = 2


def enter(main: Callable[[], Any], argv: Sequence[str]) -> int:
    """Run Hydra's `main` on `argv`; returns the exit code (2 for mistakes, printed without traceback)."""
    sys.argv = [sys.argv[0], *normalise(argv)]
    if "COMP_LINE" in os.environ:
        os.environ["COMP_LINE"] = normalise_completion(os.environ["COMP_LINE"])
    register()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints its own message and leaves with code 1
    try:
        main()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if wants_traceback or not _expected(error):
            raise
        return report(error, *_split(sys.argv[1:]))
    return 0


def report(error: BaseException, overrides: Sequence[str], flags: Sequence[str] = ()) -> int:
    """Print every mistake behind `error` to stderr and return the exit code for bad input."""
    if not isinstance(error, ReasonRLError):
        error = _all_mistakes(error, overrides, flags)
    print(error, file=sys.stderr)
    return BAD_INPUT


def normalise(argv: Sequence[str]) -> list[str]:
    """The command line with its overrides first and its flags after them.

    argparse refuses overrides on both sides of `-m`. Hydra refuses `-m` together with a flag that only shows
    something (`--cfg job`), so it is dropped there, and of a swept value the first is shown.
    """
    overrides, flags = _split(argv)
    overrides = [_plus_sweep(word) for word in overrides]
    if any(flag.split("=")[0] in _SHOW for flag in flags):
        flags = [flag for flag in flags if flag not in _MULTIRUN]
        overrides = _as_run([_first_value(word) for word in overrides], flags)
    return overrides + flags


def normalise_completion(line: str) -> str:
    """A line being completed, with its flags first: Hydra's completion parses it with argparse too."""
    head, _, last = line.rpartition(" ")
    words = head.split()
    if len(words) < 2 and not head.startswith("python"):
        return line
    start = 2 if words[0].endswith("python") or words[0].startswith("python") else 1
    flags = [word for word in words[start:] if word in _MULTIRUN]
    others = [word for word in words[start:] if not word.startswith("-")]
    return " ".join([*words[:start], *flags, *others, last])


def run_sweep(cfg: DictConfig, loader: Any, arguments: Sequence[str]) -> int:
    """Plan the sweep of a composed Hydra config; print the plan (`plan=true`) or run it; exit code."""
    from sweeps.plan import make_plan

    if launched_size() > 1:
        if launched_rank() > 0:
            return BAD_INPUT  # the first process speaks for all
        raise EngineError(
            f"A sweep starts its own processes, and a launcher (accelerate, torchrun) has started {launched_size()} of "
            "it: call python sweep.py without the launcher. Runs on several GPUs each: engine.per_trial_gpus=2."
        )
    plan = make_plan(cfg, loader, arguments, cfg.hydra)
    if cfg.plan:
        from sweeps.show import print_plan

        print_plan(plan, results=Path(cfg.results))
        return 0
    from sweeps.runner import run

    return int(run(plan) or 0)


def run_single(cfg: DictConfig) -> int:
    """Train once with a composed Hydra config, or print the plan of that one run. Returns the exit code."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from sweeps.plan import make_plan

    try:
        hydra = HydraConfig.get()
        texts = list(hydra.overrides.task)
        loader = GlobalHydra.instance().config_loader()
        if chosen := ov.chosen_sweep(texts):
            make_plan(cfg, loader, texts, hydra)  # refuses a file that asks nothing, and any other mistake in it
            what = "is a sweep, and its file lacks the line `hydra: {mode: MULTIRUN}`"
            raise ConfigError([Mistake("sweep", chosen, what, "Add it to the file, or -m to the command.")])
        if not cfg.plan:
            from sweeps.single import train_once

            return train_once(cfg, texts)
        from sweeps.show import print_plan

        plan = make_plan(cfg, loader, texts, hydra, single=True)
        print_plan(plan, results=Path(cfg.results))
        return 0
    except ReasonRLError as error:
        # Here and not in `enter`: Hydra prints a line of its own about an exception that passes through it.
        return report(error, [])


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides and flags (with their values) of a command line, each in order."""
    overrides: list[str] = []
    flags: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            continue
        if not word.startswith("-") or word == "-":
            overrides.append(word)
            continue
        flags.append(word)
        takes_value = word in _WITH_VALUE or (word in _INFO and words[:1] and words[0] in _INFO_VALUES)
        if takes_value and words:
            flags.append(words.pop(0))
    return overrides, flags


def _expected(error: BaseException) -> bool:
    from hydra.errors import HydraException
    from yaml import YAMLError

    known = ReasonRLError | HydraException | OmegaConfBaseException | YAMLError
    return isinstance(error, known) or _argument_error(error) or _null_choice(error)


def _argument_error(error: BaseException) -> bool:
    """Hydra raises a bare ValueError for flags that exclude each other."""
    return isinstance(error, ValueError) and ("can only be used" in str(error) or "Only one of --" in str(error))


def _null_choice(error: BaseException) -> bool:
    """And another one for `loss=null`."""
    return isinstance(error, ValueError) and str(error).startswith("Config group override must be")


def _all_mistakes(error: BaseException, overrides: Sequence[str], flags: Sequence[str]) -> BaseException:
    from sweeps.compose import make_loader
    from sweeps.explain import broken, explain, judge
    from sweeps.plan import make_plan

    if _argument_error(error):
        return error
    loader = make_loader(extra=_config_dir(flags))
    multirun = any(flag in _MULTIRUN for flag in flags)
    mistakes, sound = judge(loader, overrides, multirun=multirun)
    if sound is not None and not (multirun or ov.chosen_sweep(sound)):
        mistakes += explain(loader, sound)
    elif sound is not None:
        try:
            make_plan(None, loader, sound)
        except ConfigError as wrong:
            mistakes += wrong.mistakes
        except Exception as wrong:
            mistakes.append(broken(wrong, None))
    return ConfigError(mistakes) if mistakes else error


def _as_run(overrides: list[str], flags: Sequence[str]) -> list[str]:
    """The overrides with which Hydra shows what a run really gets: typed choices beat the sweep file."""
    if not any(ov.key_of(word) == "sweep" for word in overrides) or len(overrides) < 2:
        return overrides
    from sweeps.choices import shown
    from sweeps.compose import make_loader

    try:
        return shown(make_loader(extra=_config_dir(flags)), overrides)
    except Exception:
        return overrides  # Hydra will say what is wrong with them


def _config_dir(flags: Sequence[str]) -> str | None:
    return next((value for flag, value in zip(flags, flags[1:], strict=False) if flag in _CONFIG_DIR), None)


def _plus_sweep(word: str) -> str:
    """`sweep=NAME` means `+sweep=NAME`: no sweep file is chosen by default, so Hydra wants it appended."""
    key, _, value = word.partition("=")
    return f"+{word}" if key == "sweep" and value and value[0] not in "{[" else word


def _first_value(word: str) -> str:
    try:
        override = ov.parse(word)
        if not override.is_sweep_override():
            return word
        if override.is_interval_sweep():
            sweep: Any = override.value()
            return f"{override.get_key_element()}={sweep.start}"
        return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
    except Exception:
        return word  # Hydra will say what is wrong with it
