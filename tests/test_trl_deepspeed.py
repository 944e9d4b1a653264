"""DeepSpeed under `trainer=trl`: what its configuration may say, and that its runs are those of plain TRL."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import launched, rows_of

from reasonrl import trl_deepspeed
from reasonrl.config import to_dict, validate

NEEDED = ("trl", "deepspeed")
needs_both = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="TRL or DeepSpeed is not installed"
)
ONE_STEP_EACH = """import json, pathlib, sys
from reasonrl.config import from_dict
from reasonrl.train import train
for number, config in enumerate(json.loads(sys.argv[1])):
    train(from_dict(config), pathlib.Path(sys.argv[2]) / str(number))
"""


def mistakes_of(make_config: Any, value: Any) -> dict[str, Any]:
    found = validate(make_config({"trl.options": {"deepspeed": value}}, trainer="trl"))
    return {mistake.key: mistake for mistake in found if "not installed" not in mistake.allowed}


def test_what_the_run_sets_itself_is_refused_in_deepspeeds_configuration(make_config, tmp_path):
    plain = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
    assert mistakes_of(make_config, plain) == {}
    (tmp_path / "zero.json").write_text(json.dumps(plain))
    assert mistakes_of(make_config, str(tmp_path / "zero.json")) == {}
    more = {"gradient_clipping": 0.5, "optimizer": {"type": "AdamW"}, "train_batch_size": 8}
    found = mistakes_of(make_config, {**plain, **more})
    assert sorted(found) == sorted(f"trl.options.deepspeed.{name}" for name in more)
    assert "optim.max_grad_norm" in found["trl.options.deepspeed.gradient_clipping"].allowed


@pytest.mark.parametrize("value", ["missing.json", [1, 2], 3])
def test_a_configuration_that_is_none_is_named(make_config, value):
    (mistake,) = mistakes_of(make_config, value).values()
    assert mistake.key == "trl.options.deepspeed" and "cannot be read" in mistake.allowed


def test_missing_deepspeed_is_said_before_anything_runs(make_config, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_config({"trl.options": {"deepspeed": {"zero_optimization": {"stage": 2}}}}, trainer="trl")
    assert any("pip install deepspeed" in str(mistake) for mistake in validate(config))


def test_what_the_run_sets_is_filled_in():
    found = trl_deepspeed.settings({"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}})
    assert found["gradient_clipping"] == found["train_batch_size"] == "auto"
    assert found["bf16"] == {"enabled": False} and found["fp16"] == {"enabled": "auto"}


def test_the_environment_is_that_of_before(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    before = dict(os.environ)
    with trl_deepspeed.own_environment(True):
        assert os.environ["WORLD_SIZE"] == "1"
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_MIXED_PRECISION="bf16")
    assert dict(os.environ) == before
    with trl_deepspeed.own_environment(False):
        assert "WORLD_SIZE" not in os.environ


def configured(make_config: Any, stage: int | None, **top: Any) -> Any:
    zero = {"deepspeed": {"zero_optimization": {"stage": stage}}}
    options = {} if stage is None else {"trl.options": zero}
    return make_config({**options, "optim.micro_batch_size": 2, "checkpoint.every": 2}, trainer="trl", **top)


def two(config: Any, run_dir: Path) -> None:
    launched(["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"], config, run_dir)


def state(run_dir: Path) -> list[bytes]:
    found = run_dir / "checkpoints" / "step_000004"
    return [(found / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")]


@needs_both
@pytest.mark.parametrize("stage", [2, 3])
def test_a_stage_makes_the_rows_of_plain_trl_and_goes_on_bit_for_bit(make_config, tmp_path, monkeypatch, stage):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    two(configured(make_config, None, steps=4), tmp_path / "plain")
    config = configured(make_config, stage, steps=4)
    two(config, tmp_path / "through")
    for one, other in zip(rows_of(tmp_path / "plain"), rows_of(tmp_path / "through"), strict=True):
        assert one[:2] == other[:2] and other[2] == pytest.approx(one[2], rel=1e-4, abs=1e-6)
    shutil.copytree(tmp_path / "through", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000004")
    log = tmp_path / "again" / "events.jsonl"
    kept = [line for line in log.read_text().splitlines() if json.loads(line).get("step", 0) <= 2]
    log.write_text("".join(f"{line}\n" for line in kept))
    two(config, tmp_path / "again")
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "through")
    assert state(tmp_path / "again") == state(tmp_path / "through")


@needs_both
def test_one_process_trains_with_deepspeed_and_without_it_afterwards(make_config, tmp_path, monkeypatch):
    configs = [to_dict(configured(make_config, stage, steps=2)) for stage in (None, 2, None)]
    (tmp_path / "script.py").write_text(ONE_STEP_EACH)
    command = [sys.executable, str(tmp_path / "script.py"), json.dumps(configs), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, with_deepspeed, after = (rows_of(tmp_path / str(number)) for number in range(3))
    assert after == before
    for one, other in zip(before, with_deepspeed, strict=True):
        assert other[2] == pytest.approx(one[2], rel=1e-4, abs=1e-6)
