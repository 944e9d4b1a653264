"""Checkpoints: whole or absent, checked on reading, damaged ones passed over with a word."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from reasonrl.checkpoint import fault_of, load_newest, save
from reasonrl.errors import CheckpointError

OPTIMIZER, WEIGHTS = "optimizer.safetensors", "weights.safetensors"


def write(root, step, keep=9, value=None):
    tensors = {WEIGHTS: {"0": torch.full((3,), float(step))}, OPTIMIZER: {"0.step": torch.tensor(float(step))}}
    return save(root, step, tensors, {"step": step, "value": value}, keep)


def newest(root):
    """Step of the newest sound checkpoint and what was said on the way."""
    said = []
    loaded = load_newest(root, said.append)
    return (loaded.step if loaded else None), said


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    odd = torch.tensor([0.1, -0.0, 1e-45, float("inf"), float("nan")])
    half = torch.tensor([0.1, 3.0], dtype=torch.bfloat16)
    state = {"alpha": 0.1 + 0.2, "metrics": {"x": 1e-300}, "nothing": None}
    save(tmp_path, 7, {WEIGHTS: {"0": odd, "1": half}, OPTIMIZER: {}}, state, 2)
    loaded = load_newest(tmp_path, pytest.fail)
    assert (loaded.step, loaded.state) == (7, state)
    assert torch.equal(loaded.tensors[WEIGHTS]["0"].view(torch.int32), odd.view(torch.int32))
    assert torch.equal(loaded.tensors[WEIGHTS]["1"], half)


def test_nothing_to_load_is_none(tmp_path):
    assert newest(tmp_path / "absent") == (None, [])


def test_newest_ones_are_kept_counted_in_steps_not_in_letters(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1000000", "step_999999"]
    assert newest(tmp_path) == (1_000_000, [])


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, "state.json"])
def test_a_changed_byte_is_noticed_and_the_one_before_is_used(tmp_path, name):
    write(tmp_path, 10)
    file = write(tmp_path, 20) / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    step, said = newest(tmp_path)
    assert step == 10
    assert len(said) == 1
    assert "step_000020" in said[0] and name in said[0]


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, "state.json", "manifest.json"])
def test_a_missing_or_cut_file_is_noticed(tmp_path, name):
    write(tmp_path, 10)
    file = write(tmp_path, 20) / name
    file.write_bytes(file.read_bytes()[:-5])
    assert newest(tmp_path)[0] == 10
    file.unlink()
    step, said = newest(tmp_path)
    assert (step, len(said)) == (10, 1)


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"sha256": []}', '{"sha256": {}}', "null", "\x00"])
def test_a_senseless_manifest_is_a_damaged_checkpoint(tmp_path, manifest):
    folder = write(tmp_path, 20)
    (folder / "manifest.json").write_text(manifest)
    assert fault_of(folder)
    assert newest(tmp_path)[0] is None


def test_all_damaged_means_none_and_every_one_is_named(tmp_path):
    for step in (10, 20):
        (write(tmp_path, step) / WEIGHTS).write_bytes(b"")
    step, said = newest(tmp_path)
    assert step is None
    assert ["step_000020" in said[0], "step_000010" in said[1]] == [True, True]


def test_foreign_folders_and_files_are_left_alone(tmp_path):
    (tmp_path / "step_best").mkdir()
    (tmp_path / "step_12.tmp").mkdir()
    (tmp_path / "step_000005").write_text("a file")
    folder = write(tmp_path, 3, keep=1)
    (folder / "pickle.bin").write_bytes(b"\x80\x04.")
    (folder / "extra.safetensors").write_bytes(b"not safetensors")
    assert newest(tmp_path) == (3, [])
    assert {path.name for path in tmp_path.iterdir()} == {"step_best", "step_12.tmp", "step_000005", "step_000003"}


def test_a_killed_write_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, 10)
    monkeypatch.setattr("pathlib.Path.rename", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 20)  # everything is on disk but the last rename
    monkeypatch.undo()
    assert newest(tmp_path) == (10, [])
    write(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000030"]


def test_a_full_disk_is_one_clear_error_and_keeps_the_one_before(tmp_path, monkeypatch):
    write(tmp_path, 10, keep=1)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="step 20 could not be written.*No space left"):
        write(tmp_path, 20, keep=1)
    assert newest(tmp_path) == (10, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010"]


def test_going_back_before_damaged_ones_keeps_what_is_written_next(tmp_path):
    write(tmp_path, 10, keep=1)
    shutil.copytree(tmp_path / "step_000010", tmp_path / "step_000020")
    (tmp_path / "step_000020" / "state.json").write_text("{}")
    assert newest(tmp_path)[0] == 10
    write(tmp_path, 15, keep=1)
    assert newest(tmp_path) == (15, [])


def test_writing_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, value="first")
    write(tmp_path, 10, value="second")
    assert json.loads((tmp_path / "step_000010" / "state.json").read_text())["value"] == "second"


def test_a_checkpoint_with_an_objection_is_passed_over_and_named_with_the_reason(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step)
    said = []
    loaded = load_newest(tmp_path, said.append, lambda step, state: "too late" if step > 25 else None)
    assert loaded.step == 20 and said == ["Checkpoint step_000030 is not used: too late."]
