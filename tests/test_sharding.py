"""FSDP on two processes (Gloo on the CPU): the gradient, weights and rows of one process, from shards."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from batches import make_batch, make_settings
from processes import cases, gradients, launched, on_processes, rows_of, same_rows

from reasonrl import distributed, sharding
from reasonrl.config import Config, doubts, validate
from reasonrl.errors import ConfigError
from reasonrl.events import read_events
from reasonrl.optim import OptimConfig, Optimizer
from reasonrl.train import train
from reasonrl.update import update

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
FILE = """
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_port: 0
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer
"""


def sharded(policy, **more):
    """The sharded twin of a policy, in a process of its own that ends with the test."""
    os.environ.update({**FSDP, **more})
    return sharding.shard(policy)


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_shards_give_the_gradient_and_metrics_of_one_process(policy, tmp_path, reshard):
    policy.pack_tokens *= reshard == "true"  # rows packed into one, and side by side
    unequal = make_batch(policy)
    unequal.advantages_B[:11] = 0.0  # five rows left: two micro-batches of one process, three of the other
    work = [*cases(policy), *((unequal, make_settings(micro_batch_size=size, minibatches=2)) for size in (1, 4))]
    work.append((make_batch(policy), make_settings(micro_batch_size=4)))
    alone = gradients(policy, work)

    def split(rank):
        return gradients(sharded(policy, FSDP_RESHARD_AFTER_FORWARD=reshard).twin, work)

    for shared in on_processes(2, split, tmp_path):
        for (one, metrics), (two, joint) in zip(alone, shared, strict=True):
            assert len(one) == len(two)
            for single, double in zip(one, two, strict=True):
                assert (single - double).norm() <= 1e-5 * single.norm()
            assert joint == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert all(gradient.norm() > 1e-3 for one, _ in alone[:-3] for gradient in one)


def updated(policy, twin, optimizer, batch):
    for step in (1, 2):
        update(twin, optimizer, batch, make_settings(minibatches=2, micro_batch_size=3, step=step))
    return [distributed.whole(weight.detach()) for weight in twin.model.parameters()]


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_updated_weights_are_those_of_one_and_of_two_whole_copies(policy, tmp_path, clip):
    batch, config = make_batch(policy), OptimConfig(max_grad_norm=clip, weight_decay=0.1)

    def split(rank):
        both = sharded(policy)
        optimizer = Optimizer(both.twin.trainable(), config)
        held = sum(m.to_local().numel() for m in optimizer.masters) / sum(m.numel() for m in optimizer.masters)
        with both.training() as twin:
            assert all(weight.numel() == 0 for weight in policy.model.parameters())
            found = updated(policy, twin, optimizer, batch)
        assert all(torch.equal(a, b) for a, b in zip(found, policy.model.parameters(), strict=True))
        return found, held

    def copies(rank):
        return updated(policy, policy, Optimizer(policy.trainable(), config), batch)

    (shards, held), (twins, other) = on_processes(2, split, tmp_path)
    assert 0.49 < held < 0.51 and 0.49 < other < 0.51
    (tmp_path / "copies").mkdir()
    before = [weight.detach().clone() for weight in policy.model.parameters()]
    whole = on_processes(2, copies, tmp_path / "copies")[0]
    alone = updated(policy, policy, Optimizer(policy.trainable(), config), batch)
    assert all(torch.equal(a, b) for a, b in zip(shards, twins, strict=True))
    for old, one, two, split_up in zip(before, alone, whole, shards, strict=True):
        moved = (one - old).norm()  # Adam turns the rounding of gradients near zero into part of a whole step
        assert moved > 1e-3
        assert (split_up - one).norm() < 1e-3 * moved and (split_up - two).norm() < 1e-3 * moved


SETTINGS = {"data.kind": "dynamic_sampling", "data.prompts_per_step": 5, "kl.kind": "k3", "kl.coef": 0.01}


def test_a_sharded_adapter_with_checkpointing_makes_the_rows_of_one_process(make_config, tmp_path):
    pytest.importorskip("peft")
    adapter = {"model.lora.r": 4, "model.gradient_checkpointing": True, "entropy.kind": "bonus"}
    config = make_config({**SETTINGS, **adapter}, steps=2)
    train(config, tmp_path / "one")

    def work(rank):
        os.environ.update(FSDP)
        return train(config, tmp_path / "two").status

    assert on_processes(2, work, tmp_path) == ["finished", "finished"]
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))
    start = next(iter(read_events(tmp_path / "two" / "events.jsonl")))
    assert start["versions"]["sharding"] == "fsdp, reshard_after_forward=true"


def pause(event):
    return "pause" if event["type"] == "step" and event["step"] == 2 else None


def test_checkpoints_of_shards_go_on_bit_for_bit_and_with_any_number_of_processes(make_config, tmp_path):
    config = make_config(SETTINGS, steps=4)

    def run(folder, count, answer=lambda event: None):
        part = tmp_path / f"group-{len(list(tmp_path.iterdir()))}"
        part.mkdir()

        def work(rank):
            os.environ.update(FSDP)
            return train(config, tmp_path / folder, answer).status

        return on_processes(count, work, part)[0]

    def state(folder):
        found = tmp_path / folder / "checkpoints" / "step_000004"
        return [(found / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")]

    assert run("through", 2) == "finished"
    assert run("paused", 2, pause) == "paused"
    shutil.copytree(tmp_path / "paused", tmp_path / "fewer")
    assert [run("paused", 2), run("fewer", 1)] == ["finished", "finished"]
    same_rows(rows_of(tmp_path / "through"), rows_of(tmp_path / "fewer"))
    assert rows_of(tmp_path / "paused") == rows_of(tmp_path / "through")
    assert state("paused") == state("through")
    assert [run("more", 1, pause), run("more", 2)] == ["paused", "finished"]  # one process: no shards
    same_rows(rows_of(tmp_path / "through"), rows_of(tmp_path / "more"))


def test_bfloat16_shards_keep_fp32_masters_that_one_process_takes_over(make_config, tmp_path):
    config = make_config({"model.dtype": "bfloat16", "checkpoint.every": 1}, steps=2)

    def work(rank):
        os.environ.update({**FSDP, "ACCELERATE_MIXED_PRECISION": "bf16"})
        return train(config, tmp_path / "run", pause_at_one).status

    def pause_at_one(event):
        return "pause" if event["type"] == "step" and event["step"] == 1 else None

    assert on_processes(2, work, tmp_path) == ["paused", "paused"]
    assert train(config, tmp_path / "run").status == "finished"
    metrics = [row[2] for row in rows_of(tmp_path / "run") if row[0] == "step"]
    assert all(row["shift/first_ratio_error"] < 0.05 and row["optim/grad_norm"] > 1e-3 for row in metrics)


def test_a_precision_or_block_that_the_model_lacks_is_refused(policy, tmp_path):
    def refusal(**more):
        with pytest.raises(ConfigError) as caught:
            sharded(policy, **more)
        return str(caught.value)

    def work(rank):
        half = refusal(ACCELERATE_MIXED_PRECISION="bf16")
        return half, refusal(ACCELERATE_MIXED_PRECISION="no", FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer")

    half, block = on_processes(2, work, tmp_path)[0]
    assert "are float32" in half and "model.dtype=bfloat16" in half
    assert "LlamaDecoderLayer" in block and "Qwen3DecoderLayer" in block


def test_alone_nothing_is_sharded(policy, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding.shard(policy) is None


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "fsdp_activation_checkpointing"),
        ("FSDP_IGNORED_MODULES", "lm_head", "fsdp_ignored_modules"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "fsdp_auto_wrap_policy"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision"),
        ("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD", "fsdp_sharding_strategy"),
        ("FSDP_VERSION", "3", "fsdp_version"),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_name(monkeypatch, variable, value, key):
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv(variable, value)
    assert len(validate(Config())) == variable.startswith("ACCELERATE_")  # the others are FSDP's own
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    (mistake,) = validate(Config())
    assert (mistake.key, mistake.value) == (f"accelerate {key}", value)


def test_trl_is_not_given_weights_in_pieces(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    (refused,) = [mistake for mistake in validate(Config(trainer="trl")) if mistake.key == "accelerate"]
    assert "trainer=trl" in refused.allowed and "trainer=ours" in refused.cure


def test_fsdp_1_is_made_by_fsdp_2_and_said(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    assert validate(Config()) == [] and not sharding.reshards()
    (doubt,) = doubts(Config())
    assert "fsdp_reshard_after_forward=false" in doubt
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert doubts(Config()) == [] and sharding.reshards()


def test_a_file_of_accelerate_says_what_its_launcher_would(tmp_path):
    file = tmp_path / "fsdp.yaml"
    file.write_text(FILE.replace("reshard_after_forward: true", "reshard_after_forward: false"))
    found = sharding.environment_of(file)
    assert sharding.asked(found) and not sharding.reshards(found) and list(sharding.mistakes(found)) == []
    assert found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Qwen3DecoderLayer"
    file.write_text("distributed_type: FSDP\nfsdp_config: [1]\n")
    with pytest.raises(ValueError, match="no mapping"):
        sharding.environment_of(file)
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stge: 3}\n")
    with pytest.raises(ValueError, match="no key zero_stge"):
        sharding.environment_of(file)
    file.write_text("learning_rate: 1\n")
    with pytest.raises(ValueError, match="distributed_type"):
        sharding.environment_of(file)


def test_accelerate_starts_a_sharded_run_from_its_configuration_file(make_config, tmp_path):
    config = make_config(SETTINGS, steps=1)
    train(config, tmp_path / "one")
    (tmp_path / "fsdp.yaml").write_text(FILE)
    start = launched(["--config_file", str(tmp_path / "fsdp.yaml")], config, tmp_path / "two")
    same_rows(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"))
    assert start["versions"]["sharding"] == "fsdp, reshard_after_forward=true"
