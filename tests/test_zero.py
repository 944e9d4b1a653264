"""DeepSpeed's stages in accelerate's configuration: the same split, made by FSDP 2; anything beyond it is refused."""

from __future__ import annotations

import json
import os

import pytest
from processes import on_processes, rows_of, same_rows

from reasonrl import sharding, zero
from reasonrl.config import Config, doubts, validate
from reasonrl.events import read_events
from reasonrl.train import train

FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


def environment(**more: str) -> dict[str, str]:
    return {zero.USE: "true", **{f"ACCELERATE_DEEPSPEED_{name}": value for name, value in more.items()}}


@pytest.mark.parametrize(("stage", "reshards"), [("1", "false"), ("3", "true")])
def test_a_stage_makes_the_rows_of_one_process(make_config, tmp_path, stage, reshards):
    config = make_config({"optim.micro_batch_size": 3}, steps=2)
    train(config, tmp_path / "one")

    def work(rank):
        os.environ.update(environment(ZERO_STAGE=stage))
        return train(config, tmp_path / "two").status

    assert on_processes(2, work, tmp_path) == ["finished", "finished"]
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))
    start = next(iter(read_events(tmp_path / "two" / "events.jsonl")))
    assert start["versions"]["sharding"] == f"fsdp, reshard_after_forward={reshards}"


def test_a_file_of_accelerate_says_what_its_launcher_would(tmp_path):
    file = tmp_path / "zero.yaml"
    file.write_text(FILE)
    found = sharding.environment_of(file)
    assert sharding.asked(found) and sharding.reshards(found) and list(sharding.mistakes(found)) == []
    assert zero.stage(found) == 3
    said = sharding.doubt(found)
    assert said and "not by DeepSpeed's engine" in said and "gradient_clipping and gradient_accumulation_steps" in said
    file.write_text(FILE.replace("zero_stage: 3", "zero_stage: 2"))
    assert not sharding.reshards(sharding.environment_of(file))
    file.write_text(FILE.replace("zero_stage: 3", "zero_stage: 0"))
    whole = sharding.environment_of(file)
    assert not sharding.asked(whole) and sharding.doubt(whole) is None and list(sharding.mistakes(whole)) == []


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ({"ZERO_STAGE": "four"}, "zero_stage", "four"),
        ({"ZERO_STAGE": "3", "OFFLOAD_PARAM_DEVICE": "cpu"}, "offload_param_device", "cpu"),
        ({"ZERO_STAGE": "2", "OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device", "nvme"),
    ],
)
def test_what_goes_beyond_the_split_is_refused_by_its_name(monkeypatch, more, key, value):
    for name, text in environment(**more).items():
        monkeypatch.setenv(name, text)
    (mistake,) = validate(Config())
    assert (mistake.key, mistake.value) == (f"accelerate {key}", value)


def test_deepspeeds_own_file_is_read_and_refused_where_it_asks_for_more(monkeypatch, tmp_path):
    file = tmp_path / "zero.json"
    for name, text in environment(CONFIG_FILE=str(file)).items():
        monkeypatch.setenv(name, text)
    (missing,) = validate(Config())
    assert missing.key == "accelerate deepspeed_config_file" and str(file) == missing.value
    plain = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "bf16": {"enabled": True}, "steps_per_print": 9}
    file.write_text(json.dumps({**plain, "gradient_clipping": "auto", "fp16": {"enabled": False}}))
    assert validate(Config()) == [] and sharding.reshards() and zero.is_half(os.environ)
    assert any("not by DeepSpeed's engine" in doubt for doubt in doubts(Config()))
    more = {"gradient_clipping": 0.5, "fp16": {"enabled": True}, "curriculum_learning": {}}
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({**plain, **more, "zero_optimization": offload}))
    found = {mistake.key.removeprefix("accelerate "): mistake for mistake in validate(Config())}
    own = [f"deepspeed_config_file: {name}" for name in more]
    assert sorted(found) == sorted([*own, "offload_optimizer_device"])
    assert "optim.max_grad_norm" in found["deepspeed_config_file: gradient_clipping"].allowed


@pytest.mark.parametrize(
    "content", ["[1]", '"auto"', '{"zero_optimization": null}', '{"zero_optimization": {"offload_param": "cpu"}}', "{"]
)
def test_a_file_that_is_not_deepspeeds_is_named(monkeypatch, tmp_path, content):
    (tmp_path / "zero.json").write_text(content)
    for name, text in environment(CONFIG_FILE=str(tmp_path / "zero.json")).items():
        monkeypatch.setenv(name, text)
    (mistake,) = validate(Config())
    assert mistake.key == "accelerate deepspeed_config_file" and "cannot be read" in mistake.allowed


def test_trl_is_not_given_weights_in_pieces(monkeypatch):
    monkeypatch.setenv(zero.USE, "true")
    (refused,) = [mistake for mistake in validate(Config(trainer="trl")) if mistake.key == "accelerate"]
    assert refused.value == "DeepSpeed" and "trainer=ours" in refused.cure
