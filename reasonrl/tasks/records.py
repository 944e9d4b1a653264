"""Problems from a data file: one row is one question with a gold answer, checked by a verifier.

Gold answers are reduced to their final answer once, when the file is read; a row whose question or gold cannot be
read is left out, counted and named, never scored.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl.errors import ConfigError, DataError, Mistake
from reasonrl.rewards import think_format
from reasonrl.tasks import TaskConfig
from reasonrl.tasks.filters import compile_filter
from reasonrl.tasks.loading import Row, missing, read_rows
from reasonrl.types import Problem, Verdict
from reasonrl.verifiers import VERIFIERS, Options, Verifier

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")
_MISSING = object()
_USUAL_KEYS = {
    "task.question_key": ("question", "problem", "prompt", "input", "query", "instruction"),
    "task.answer_key": ("answer", "solution", "final_answer", "target", "gold", "label", "output", "response"),
    "task.tests_key": ("tests", "test", "test_list", "test_cases", "input_output"),
}
NAMED = 5  # left-out rows that a note names; the rest is counted


def mistakes(config: TaskConfig) -> list[Mistake]:
    """Return what is wrong with the settings alone, before any file is opened."""
    found = []
    if not config.path:
        found.append(Mistake("task.path", config.path, "is not set", "Give a file or folder: task.path=data.jsonl."))
    for name in ("path", "heldout_path"):
        value = getattr(config, name)
        if value and (reason := missing(value)):
            found.append(Mistake(f"task.{name}", value, reason.removesuffix(".")))
    if config.filter:
        try:
            compile_filter(config.filter)
        except ConfigError as error:
            found += error.mistakes
    if config.verifier not in VERIFIERS:
        found.append(Mistake("task.verifier", config.verifier, f"choose one of {', '.join(VERIFIERS)}"))
    if config.percent and config.verifier != "numeric":
        found.append(
            Mistake("task.percent", True, f"has no effect with task.verifier={config.verifier}", "Set it to false.")
        )
    if not 0 < config.heldout_fraction < 1:
        found.append(Mistake("task.heldout_fraction", config.heldout_fraction, "must lie between 0 and 1"))
    if config.limit is not None and config.limit < 1:
        found.append(Mistake("task.limit", config.limit, "must be at least 1, or null for all rows"))
    if not config.timeout_s > 0:
        found.append(Mistake("task.timeout_s", config.timeout_s, "must be more than 0 seconds"))
    return found + _template_mistakes(config)


def _template_mistakes(config: TaskConfig) -> list[Mistake]:
    found = []
    names = placeholders(config.prompt)
    if not {"question", config.question_key} & names:
        cure = "For example task.prompt='{question}'."
        found.append(Mistake("task.prompt", repr(config.prompt), "must contain {question}", cure))
    for name in sorted(names & {config.answer_key, "answer"} - {"question", config.question_key}):
        allowed = f"must not show the gold answer, and {{{name}}} is replaced by it"
        found.append(Mistake("task.prompt", repr(config.prompt), allowed, f"For literal braces write {{{{{name}}}}}."))
    if "choices" in names and config.choices_key is None:
        found.append(Mistake("task.prompt", repr(config.prompt), "{choices} needs task.choices_key"))
    return found


def placeholders(template: str) -> set[str]:
    """Return the names in single braces; `{{` and `}}` are literal braces, and `{}` is left as it is."""
    return {match.group(1) for match in _PLACEHOLDER.finditer(template) if match.group(1)}


def render(template: str, values: dict[str, Any]) -> str:
    """Fill `template` with `values`; anything that is no placeholder, such as an empty box, stays as written."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return str(values[name]) if name else match.group()[0]

    return _PLACEHOLDER.sub(fill, template)


def lookup(values: dict[str, Any], key: str) -> Any:
    """Return `values[key]`, following dots into nested rows (`reward_model.ground_truth`); _MISSING if absent."""
    if key in values:
        return values[key]
    value: Any = values
    for part in key.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.lstrip("-").isdigit() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            return _MISSING
    return value


@dataclass
class Loaded:
    """Usable problems of one file, the rows left out with the reason, and the keys seen."""

    problems: list[Problem] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_filtered: int = 0
    keys: dict[str, None] = field(default_factory=dict)

    def note(self, path: str) -> str | None:
        """Return one sentence on the rows left out, or None when every row is used."""
        if not self.left_out:
            return None
        named = "; ".join(self.left_out[:NAMED])
        more = f"; and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
        return f"{len(self.left_out)} of {self.num_rows} rows of {path} were left out: {named}{more}."


class RecordReader:
    """Turns rows into problems by the keys, template, filter and verifier of the configuration."""

    def __init__(self, config: TaskConfig, make: Callable[[dict[str, Any], str], str | Problem]) -> None:
        self.config = config
        self.make = make
        self.keep: Callable[[dict[str, Any]], bool] | None = None
        self.filter_names: set[str] = set()
        if config.filter:
            self.keep, self.filter_names = compile_filter(config.filter)

    def needed(self) -> dict[str, str]:
        """Return configuration key -> data key for every data key that rows must have."""
        names = placeholders(self.config.prompt) - {"question", "choices"}
        needed = {"task.question_key": self.config.question_key}
        needed |= {f"task.{name}": key for name, key in self._optional().items() if key}
        needed |= {f"task.prompt ({{{name}}})": name for name in sorted(names)}
        return needed | {f"task.filter ({name})": name for name in sorted(self.filter_names)}

    def _optional(self) -> dict[str, str | None]:
        answer = self.config.tests_key if self.config.kind == "code" else self.config.answer_key
        name = "tests_key" if self.config.kind == "code" else "answer_key"
        return {name: answer, "domain_key": self.config.domain_key, "choices_key": self.config.choices_key}

    def read(self, path: str, split: str | None, key: str) -> Loaded:
        """Read a file; raises ConfigError when a needed key is in no row, DataError when no row is usable."""
        loaded = Loaded()
        seen: set[str] = set()
        needed = self.needed()
        for row in read_rows(path, split, key):
            loaded.num_rows += 1
            if row.values is not None:
                loaded.keys |= dict.fromkeys(row.values)
                seen |= {
                    name for name in needed.values() if name not in seen and lookup(row.values, name) is not _MISSING
                }
            result = self._problem(row, split)
            if isinstance(result, Problem):
                loaded.problems.append(result)
            elif result is None:
                loaded.num_filtered += 1
            else:
                loaded.left_out.append(f"{row.place} {result}")
        absent = {name: value for name, value in needed.items() if value not in seen}
        if absent and loaded.keys:
            raise ConfigError([_absent(name, value, list(loaded.keys), path) for name, value in absent.items()])
        if not loaded.problems:
            raise DataError(self._nothing(loaded, path, key))
        return loaded

    def _nothing(self, loaded: Loaded, path: str, key: str) -> str:
        if not loaded.num_rows:
            return f"{key}={path}: the file holds no rows."
        if loaded.num_filtered and not loaded.left_out:
            dropped = f"task.filter={self.config.filter}" if self.config.filter else key.replace("path", "split")
            return f"{dropped}: keeps none of the {loaded.num_rows} rows of {path}."
        return f"{key}={path}: no row can be used. {loaded.note(path)}"

    def _problem(self, row: Row, split: str | None) -> Problem | str | None:
        """Return the problem, a reason why the row cannot be used, or None when filter or split drop it."""
        if row.values is None:
            return row.fault
        if split is not None and isinstance(row.values.get("split"), str) and row.values["split"] != split:
            return None
        if self.keep is not None:
            try:
                if not self.keep(row.values):
                    return None
            except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
                return f"cannot be filtered ({type(error).__name__}: {error})"
        question = question_text(lookup(row.values, self.config.question_key))
        if question is None:
            return f"has no question text under {self.config.question_key!r}"
        values = {name: lookup(row.values, name) for name in placeholders(self.config.prompt)}
        values |= {"question": question, self.config.question_key: question}
        choices = lookup(row.values, self.config.choices_key) if self.config.choices_key else None
        if self.config.choices_key:
            if not isinstance(choices, list) or not choices:
                return f"has no list of choices under {self.config.choices_key!r}"
            values["choices"] = "\n".join(f"{chr(65 + place)}. {choice}" for place, choice in enumerate(choices))
        if missing := [name for name, value in values.items() if value is _MISSING or value is None]:
            return f"has no {missing[0]!r} for the prompt"
        made = self.make(row.values, row.place)
        if isinstance(made, str):
            return made
        domain = lookup(row.values, self.config.domain_key) if self.config.domain_key else "default"
        domain = "default" if domain is _MISSING or domain is None else str(domain)
        meta = {**made.meta, "question": question}
        return Problem(row.place, render(self.config.prompt, values), made.gold, domain, meta)


def question_text(value: Any) -> str | None:
    """Return a question given as text or as chat messages (its last user message); None when it is neither."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "content" in item for item in value):
        users = [item["content"] for item in value if item.get("role", "user") == "user"]
        value = users[-1] if users else None
    return value if isinstance(value, str) and value.strip() else None


def gold_text(value: Any) -> str | None:
    """Return a gold answer given as text, number or list of one; None for anything else."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or value is None or value is _MISSING:
        return None
    if isinstance(value, float):
        return (str(int(value)) if value.is_integer() else repr(value)) if math.isfinite(value) else None
    return str(value).strip() or None if isinstance(value, (str, int)) else None


def _absent(name: str, value: str, keys: list[str], path: str) -> Mistake:
    usual = [key for key in keys if key in _USUAL_KEYS.get(name, ())]
    near = usual or difflib.get_close_matches(value, keys, 1, 0.8)
    cure = f"Did you mean {near[0]}?" if near else f"Set {name.split()[0]} to one of them."
    return Mistake(name, value, f"no row of {path} has this key; the keys found are {', '.join(keys[:20])}", cure)


def fixed_order(text: str) -> bytes:
    """Return a sort key that shuffles questions the same way in every run, whatever their order in the file."""
    return hashlib.blake2b(" ".join(text.split()).casefold().encode("utf-8", "replace"), digest_size=16).digest()


def split_heldout(problems: list[Problem], fraction: float) -> tuple[list[Problem], list[Problem]]:
    """Return (train in file order, held out): a fixed draw, the same for all seeds, equal questions on one side."""
    keys = sorted({fixed_order(problem.meta["question"]) for problem in problems})
    chosen = set(keys[: max(1, round(fraction * len(keys)))])
    train = [problem for problem in problems if fixed_order(problem.meta["question"]) not in chosen]
    held = [problem for problem in problems if fixed_order(problem.meta["question"]) in chosen]
    return train, sorted(held, key=lambda problem: fixed_order(problem.meta["question"]))


class RecordsTask:
    """Training and held-out problems of a data file with one verifier; `notes` says what was left out."""

    thinks = True  # the wanted form is `<think>...</think>` and an answer

    def __init__(self, config: TaskConfig, verifier: Verifier | None = None) -> None:
        self.config = config
        if wrong := mistakes(config):
            raise ConfigError(wrong)
        self.verifier = verifier or Verifier(config.verifier, Options(config.percent, config.timeout_s))
        self.notes: list[str] = []
        self.train, self.held = self._load()

    @property
    def size(self) -> int:
        """Number of training problems."""
        return len(self.train)

    def _load(self) -> tuple[list[Problem], list[Problem]]:
        config = self.config
        path = config.path or ""
        reader = RecordReader(config, self._make)
        files = [("task.path", path, config.split)]
        if config.heldout_path or config.heldout_split:
            files.append(("task.heldout_path", config.heldout_path or path, config.heldout_split))
        loaded: list[Loaded] = []
        errors: list[DataError | ConfigError] = []
        for key, file, split in files:
            if loaded and not config.heldout_path and Path(path).is_file() and "split" not in loaded[0].keys:
                break  # one file without a column of splits: a fraction is held out
            try:
                loaded.append(reader.read(file, split, key))
            except (DataError, ConfigError) as error:
                errors.append(error)
        if errors:
            raise _joined(errors)
        self.notes += [note for (_, file, _), part in zip(files, loaded, strict=False) if (note := part.note(file))]
        if len(loaded) == 1:
            train, held = split_heldout(loaded[0].problems, config.heldout_fraction)
        else:
            train, held = self._without_heldout(loaded[0].problems, loaded[1].problems)
        if not train:
            raise DataError(f"task.path={path}: no training row is left beside the {len(held)} held-out ones.")
        if config.limit is not None and config.limit < len(train):
            drawn = sorted(train, key=lambda problem: fixed_order(problem.meta["question"]))[: config.limit]
            ids = {problem.id for problem in drawn}
            train = [problem for problem in train if problem.id in ids]
        return train, held

    def _without_heldout(self, train: list[Problem], held: list[Problem]) -> tuple[list[Problem], list[Problem]]:
        """Take questions that are held out from the training rows, and say how many."""
        questions = {fixed_order(problem.meta["question"]) for problem in held}
        kept = [problem for problem in train if fixed_order(problem.meta["question"]) not in questions]
        if len(kept) < len(train):
            self.notes.append(f"{len(train) - len(kept)} training rows were left out: their question is held out too.")
        held = [Problem("heldout:" + p.id, p.prompt, p.gold, p.domain, p.meta) for p in held]
        return kept, sorted(held, key=lambda problem: fixed_order(problem.meta["question"]))

    def _make(self, values: dict[str, Any], place: str) -> str | Problem:
        """Return a problem that carries the reduced gold, or why it cannot be reduced."""
        value = lookup(values, self.config.answer_key)
        text = gold_text(value)
        if text is None:
            return f"has no answer under {self.config.answer_key!r}"
        gold = self.verifier.read_gold(text)
        if gold is None:
            shown = text if len(text) <= 40 else "..." + text[-40:]
            return f"has no {self.verifier.name} answer under {self.config.answer_key!r} ({shown!r})"
        return Problem(place, "", gold)

    def train_problem(self, index: int) -> Problem:
        """Return training problem `index` in file order, counted modulo their number."""
        return self.train[index % len(self.train)]

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems of a fixed shuffle, or all when there are fewer."""
        return self.held[:count]

    def drop_long_prompts(self, num_tokens: Callable[[Problem], int], limit: int) -> int:
        """Drop the problems whose prompt has more than `limit` tokens, note and return how many; none is cut.

        Raises DataError when no training or no held-out problem is left.
        """
        dropped = {}
        for name in ("train", "held"):
            problems: list[Problem] = getattr(self, name)
            kept = [problem for problem in problems if num_tokens(problem) <= limit]
            dropped[name] = len(problems) - len(kept)
            if not kept:
                raise DataError(f"task.max_prompt_tokens={limit}: all {len(problems)} {name} prompts are longer.")
            setattr(self, name, kept)
        total = sum(dropped.values())
        if total:
            counts = f"{dropped['train']} training and {dropped['held']} held-out"
            self.notes.append(f"{counts} problems were left out: their prompt is longer than {limit} tokens.")
        return total

    def answer(self, text: str) -> str | None:
        """Return the final answer stated in a completion, or None."""
        return self.verifier.answer(text)

    def score(self, problem: Problem, text: str, finish: str) -> Verdict:
        """Judge one completion."""
        return self.score_many([(problem, text, finish)])[0]

    def score_many(self, rows: Sequence[tuple[Problem, str, str]]) -> list[Verdict]:
        """Judge many completions at once; slow comparisons run side by side."""
        return self.verifier.check_many([(problem.gold, text, finish == "stop") for problem, text, finish in rows])

    def format_ok(self, text: str) -> bool:
        """Whether the completion is `<think>...</think>` and an answer, each once and in this order."""
        return think_format(text)


def _joined(errors: Iterable[DataError | ConfigError]) -> DataError | ConfigError:
    """Return one error that says all of it."""
    errors = list(errors)
    if all(isinstance(error, ConfigError) for error in errors):
        return ConfigError(
            dict.fromkeys(m for error in errors if isinstance(error, ConfigError) for m in error.mistakes)
        )
    return DataError("\n".join(dict.fromkeys(str(error) for error in errors)))


def build(config: TaskConfig, seed: int) -> RecordsTask:
    """Return the task; the seed changes nothing here, since all runs share problems and split."""
    return RecordsTask(config)
