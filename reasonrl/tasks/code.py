"""Problems whose answer is a Python program, judged by running its tests in the sandbox.

A row has a question and tests in one of the usual forms: assert statements (MBPP), code that defines
`check(candidate)` with an `entry_point` (HumanEval), {"input", "output"} pairs for a whole program, {"args",
"expected"} pairs for one function, or APPS' {"inputs", "outputs", "fn_name"}. All tests must pass.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reasonrl.errors import ConfigError, Mistake, VerifierError
from reasonrl.sandbox import Limits, Outcome, run_tests, walls
from reasonrl.tasks import TaskConfig
from reasonrl.tasks.records import RecordsTask, lookup, mistakes
from reasonrl.types import Problem, Verdict
from reasonrl.verifiers.extract import after_thinking

REASONS = {"passed": "correct", "timeout": "timeout", "unusable": "undecided"}  # all else is wrong
ENTRY_KEYS = ("entry_point", "fn_name", "function_name", "function")
SETUP_KEYS = ("test_setup_code", "test_imports", "setup")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_LOOKS_LIKE_CODE = re.compile(r"^(?:def |class |import |from \w+ import |print\(|for |while |\w+ = )", re.MULTILINE)


def program_of(text: str) -> str | None:
    """Return the last fenced block in Python (or in no named language), or a text that is itself code, or None."""
    text = after_thinking(text)
    blocks = [(language.lower(), body) for language, body in _BLOCK.findall(text)]
    python = [body for language, body in blocks if language in ("python", "py", "python3", "")]
    if python:
        return python[-1]
    return text if not blocks and _LOOKS_LIKE_CODE.search(text) else None


def parse_tests(value: Any, entry: str | None) -> tuple[str, list[Any], str | None] | str:
    """Return (mode, tests, entry) for `run_tests`, or why the tests cannot be used."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return "not JSON"
    if isinstance(value, str) and value.strip():
        value = [value]
    if isinstance(value, dict) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        if len(value["inputs"]) != len(value["outputs"]):
            return f"{len(value['inputs'])} inputs but {len(value['outputs'])} outputs"
        entry = value.get("fn_name") or entry
        names = ("args", "expected") if entry else ("input", "output")
        value = [dict(zip(names, pair, strict=True)) for pair in zip(value["inputs"], value["outputs"], strict=True)]
    if not isinstance(value, list) or not value:
        return "none"
    if all(isinstance(item, str) for item in value):
        for place, item in enumerate(value):
            try:
                ast.parse(item)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return f"test {place + 1} is not Python"
        return "asserts", value, entry
    if all(isinstance(item, dict) and {"input", "output"} <= item.keys() for item in value):
        return "stdio", value, None
    if all(isinstance(item, dict) and "expected" in item and isinstance(item.get("args", []), list) for item in value):
        return ("calls", value, entry) if entry else f"no function to call (name it under {ENTRY_KEYS[0]!r})"
    return "their form is not known here"


class CodeTask(RecordsTask):
    """Records whose verdict comes from running a program."""

    def __init__(self, config: TaskConfig) -> None:
        kind, reason = ("none", "") if config.unsafe else walls()
        if kind is None:
            allowed = f"programs written by a model need walls, and this machine offers none ({reason})"
            cure = "Install bubblewrap or allow user namespaces; true runs them with your own rights."
            raise ConfigError([Mistake("task.unsafe", False, allowed, cure), *mistakes(config)])
        seconds = config.timeout_s
        self.limits = Limits(cpu_s=seconds, wall_s=2 * seconds + 2, memory_mb=config.memory_mb)
        super().__init__(config)
        if config.unsafe:
            self.notes.append(
                "Programs run with limits but without walls (task.unsafe=true): they can reach your files."
            )

    def _make(self, values: dict[str, Any], place: str) -> str | Problem:
        entry = next((values[key] for key in ENTRY_KEYS if isinstance(values.get(key), str)), None)
        parsed = parse_tests(lookup(values, self.config.tests_key), entry)
        if isinstance(parsed, str):
            return f"has no usable tests under {self.config.tests_key!r}: {parsed}"
        mode, tests, entry = parsed
        if mode == "asserts":
            setup = [values[key] for key in SETUP_KEYS if values.get(key)]
            lines = [line for item in setup for line in (item if isinstance(item, list) else [item])]
            tests = ["\n".join(map(str, lines)), *tests] if lines else tests
        return Problem(place, "", f"{len(tests)} tests", meta={"mode": mode, "tests": tests, "entry": entry})

    def answer(self, text: str) -> str | None:
        """Return the program in a completion, or None."""
        return program_of(text)

    def score_many(self, rows: Sequence[tuple[Problem, str, str]]) -> list[Verdict]:
        """Run each different program once, as many at a time as there are processors."""
        programs = [program_of(text) for _, text, _ in rows]
        jobs = {(p.id, program): p for (p, _, _), program in zip(rows, programs, strict=True) if program is not None}
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as threads:
            outcomes = dict(zip(jobs, threads.map(lambda job: self._run(jobs[job], job[1]), jobs), strict=True))
        verdicts = []
        for (problem, _, _), program in zip(rows, programs, strict=True):
            if program is None:
                verdicts.append(Verdict(0.0, "not_extracted"))
                continue
            reason = REASONS.get(outcomes[problem.id, program].status, "wrong")
            verdicts.append(Verdict(1.0 if reason == "correct" else 0.0, reason))
        return verdicts

    def _run(self, problem: Problem, program: str) -> Outcome:
        """Run one program; a sandbox that cannot be made (out of processes for a moment) is tried once more."""
        arguments = (program, problem.meta["mode"], problem.meta["tests"], problem.meta["entry"])
        try:
            return run_tests(*arguments, self.limits, self.config.unsafe)
        except (VerifierError, OSError):
            return run_tests(*arguments, self.limits, self.config.unsafe)


def build(config: TaskConfig, seed: int) -> CodeTask:
    """Return the task; the seed changes nothing here."""
    return CodeTask(config)
