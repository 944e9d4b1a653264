"""Fixtures shared by the tests: a base model that costs seconds, and small runs on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: one thread makes numbers repeatable and lets tests fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

BASE = {"kind": "tiny", "base_steps": 12, "noise": 0.0, "device": "cpu"}


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Build base models on one thread: forking after a parallel region of OpenMP can hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reasonrl.models.tiny._every_core", contextlib.nullcontext)
        yield


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """End sweeps without writing their report."""
    from sweeps import summary

    monkeypatch.setattr(summary, "make_report", lambda sweep: None)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A PostgreSQL server of the module's own (`tests.database.Server`)."""
    from tests.database import running_server

    with running_server() as made:
        yield made


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model cache for all tests, with the base model of `BASE` in it."""
    from reasonrl.models import ModelConfig, load_policy

    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("REASONRL_CACHE")
    os.environ["REASONRL_CACHE"] = str(folder)
    try:
        load_policy(ModelConfig(**BASE), [4, 5, 6])
    finally:
        if before is None:
            del os.environ["REASONRL_CACHE"]
        else:
            os.environ["REASONRL_CACHE"] = before
    return folder


@pytest.fixture
def tiny(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the session's model cache in this test and in the processes it starts."""
    monkeypatch.setenv("REASONRL_CACHE", str(tiny_cache))
    return tiny_cache


@pytest.fixture
def policy(tiny: Path) -> Any:
    """The tiny policy, freshly loaded."""
    from reasonrl.models import ModelConfig, load_policy

    return load_policy(ModelConfig(**BASE), [4, 5, 6])


@pytest.fixture
def make_config(tiny: Path) -> Callable[..., Any]:
    """Build the configuration of a run that takes about a second: make_config({"optim.lr": 1e-4}, steps=2)."""
    from reasonrl.config import from_dict

    small = {
        "steps": 3,
        "quiet": True,
        "data.prompts_per_step": 4,
        "sampling.group_size": 4,
        "sampling.max_new_tokens": 8,
        "optim.minibatches": 2,
        "optim.inner_epochs": 1,
        "optim.lr": 1e-3,
        "optim.warmup_steps": 0,
        "reward.random": True,  # the base is too raw to be right now and then; a coin gives groups a signal
        "eval.problems": 4,
        "eval.samples": 2,
        "eval.every": 2,
        "checkpoint.every": 0,
        "alerts.profile": "off",
        **{f"model.{name}": value for name, value in BASE.items()},
    }

    def make(overrides: dict[str, Any] | None = None, **top: Any) -> Any:
        values: dict[str, Any] = {}
        for key, value in {**small, **(overrides or {}), **top}.items():
            *path, last = key.split(".")
            section = values
            for name in path:
                section = section.setdefault(name, {})
            section[last] = value
        return from_dict(values)

    return make
