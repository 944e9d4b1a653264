"""Every file in conf/ composes, says how to run it, and every sweep file makes a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from reasonrl.config import validate
from sweeps.compose import make_loader, resolve, typed_config
from sweeps.config import CONF, ENGINES, SAMPLERS, run_section
from sweeps.plan import make_plan
from sweeps.show import num_runs

FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
SWEEPS = [path.stem for path in FILES if path.parent == Path("sweep")]
OPTIONS = [path for path in FILES if path.parent not in (Path("."), Path("sweep"), Path("hydra/help"))]


def beside(group: str, name: str, data: Path) -> list[str]:
    """What a choice cannot work without, and what a user would give beside it."""
    model = ["model=hf", "model.path=some/model"]
    if group == "task" and name != "arithmetic":
        return [*model, "+task.datasets={basic_arithmetic:1}" if name == "reasoning_gym" else f"task.path={data}"]
    if (group, name) == ("model", "hf"):
        return model[1:]
    if (group, name) == ("reward", "reward_model"):
        return ["reward.parts.judge.model.path=some/model"]
    return ["reward=correctness_format"] if (group, name) == ("advantage", "gdpo") else []


@pytest.fixture(scope="module")
def loader():
    return make_loader()


@pytest.mark.parametrize("path", OPTIONS, ids=str)
def test_every_choice_composes_and_is_valid(path, loader, tmp_path):
    data = tmp_path / "problems.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    group, name = path.parent.as_posix(), path.stem
    overrides = [f"{group}={name}", *beside(group, name, data)]
    cfg = resolve(loader.load_configuration("config", overrides, run_mode=RunMode.RUN))
    assert validate(typed_config(run_section(cfg))) == []
    assert cfg["engine"]["kind"] in ENGINES and cfg["study"]["sampler"] in SAMPLERS


@pytest.mark.parametrize("path", OPTIONS, ids=str)
def test_every_choice_changes_what_it_names_and_opens_with_a_word_about_it(path):
    text = (CONF / path).read_text()
    content = OmegaConf.create(text)
    assert "@package _global_" in text or content, f"{path} sets nothing"


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_file_makes_a_plan_and_opens_with_its_command(name, loader):
    lines = (CONF / "sweep" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# python sweep.py +sweep={name} -m"
    overrides = [f"+sweep={name}"]
    cfg = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
    assert str(cfg.hydra.mode).endswith("MULTIRUN"), "works without -m"
    plan = make_plan(cfg, loader, overrides, cfg.hydra)
    assert plan.name == name and plan.question.endswith("?")
    assert num_runs(plan) >= 4
    assert not plan.warnings
    if plan.runs:
        assert plan.baseline in plan.arms and plan.sweep["factors"], "what the arms may differ in is said"


def test_the_sweeps_that_were_promised_are_there():
    promised = (
        "clip_ablation clip_random_reward overlong_ablation dynamic_sampling_ablation gspo_vs_grpo gdpo_vs_grpo "
        "kl_ablation loss_aggregation entropy_mask temperature group_size lr_search kl_lr_search sampling_search "
        "dapo_ladder priority sick_run"
    )
    assert set(promised.split()) <= set(SWEEPS)


def test_defaults_leave_no_trace_of_hydra(loader):
    cfg = loader.load_configuration("config", [], run_mode=RunMode.RUN)
    assert cfg.hydra.output_subdir is None and cfg.hydra.run.dir == "." and cfg.hydra.job.chdir is False
    assert "file" not in (cfg.hydra.job_logging.get("handlers") or {})
    assert cfg.hydra.sweeper._target_ == "hydra_plugins.reasonrl_sweeper.sweeper.ReasonRLSweeper"
