"""The built-in base model: cached by what shapes it, built once, mended when damaged."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import on_processes

from reasonrl.models import ModelConfig, load_policy, tiny
from reasonrl.models.tiny import base_model_dir, demonstration, first_token_keep, make_tokenizer
from reasonrl.tasks.arithmetic import answer_of

ONE = ModelConfig(base_steps=1)
RECIPE = {
    "careful": 1.0,
    "noise": 0.0,
    "noise_from": 1,
    "bracket_share": 1.0,
    "guess_bracket": False,
    "operands": [4, 5],
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and training that costs nothing but is counted in `built`."""
    monkeypatch.setenv("REASONRL_CACHE", str(tmp_path))
    built = []
    monkeypatch.setattr(tiny, "train_base", lambda recipe: built.append(recipe) or tiny.make_model(recipe["base_seed"]))
    return built


def test_one_recipe_is_built_once_and_another_gets_its_own_folder(cache):
    first = base_model_dir(ONE, [4, 5])
    assert base_model_dir(ONE, [5, 4]) == first
    assert len(cache) == 1
    others = [replace(ONE, noise=0.3), replace(ONE, base_seed=1), replace(ONE, base_operands=[6])]
    folders = {base_model_dir(config, [4, 5]) for config in others}
    assert len(folders | {first}) == 4
    assert len(cache) == 4


def test_what_does_not_shape_the_base_shares_it(cache):
    assert base_model_dir(ONE, [4]) == base_model_dir(replace(ONE, dtype="bfloat16", device="cpu"), [4])
    assert base_model_dir(replace(ONE, base_operands=[4]), [7]) == base_model_dir(ONE, [4])
    assert len(cache) == 1


def flip_a_byte(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "a changed byte": flip_a_byte,
    "a missing tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a cut config": lambda folder: (folder / "config.json").write_text("{"),
    "no seal": lambda folder: (folder / "sound.json").unlink(),
    "a torn seal": lambda folder: (folder / "sound.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_base_is_built_again_with_a_word(cache, capsys, damage):
    folder = base_model_dir(ONE, [4])
    sound = (folder / "model.safetensors").read_bytes()
    damage(folder)
    assert base_model_dir(ONE, [4]) == folder
    assert len(cache) == 2
    assert "is damaged; it is built again" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == sound
    base_model_dir(ONE, [4])
    assert len(cache) == 2


def test_a_seal_of_a_folder_without_weights_is_no_seal(cache, capsys):
    # what earlier versions left when the second process of a run built the model
    folder = base_model_dir(ONE, [4])
    (folder / "model.safetensors").unlink()
    (folder / "sound.json").write_text(json.dumps(tiny._digest(folder)))
    base_model_dir(ONE, [4])
    assert "is damaged" in capsys.readouterr().err
    assert (folder / "model.safetensors").is_file()


def test_any_process_of_a_run_may_be_the_one_that_builds(cache, tmp_path):
    def work(rank):
        if rank == 1:
            base_model_dir(ONE, [4])
        return rank

    on_processes(2, work, tmp_path)
    policy = load_policy(ONE, [4])
    assert cache == []  # built over there
    assert all(
        torch.equal(one, other)
        for one, other in zip(policy.model.parameters(), tiny.make_model(0).parameters(), strict=True)
    )


def test_a_build_that_was_interrupted_leaves_nothing_behind(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "train_base", lambda recipe: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        base_model_dir(ONE, [4])
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_killed_build_left_is_swept_away_by_the_next(cache, tmp_path):
    left = base_model_dir(ONE, [4]).with_name(base_model_dir(ONE, [4]).name + "killed")
    left.mkdir()
    (base_model_dir(ONE, [4]) / "sound.json").unlink()
    base_model_dir(ONE, [4])
    assert not left.exists()


def _build_slowly(log):
    def slow(recipe):
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.5)
        return tiny.make_model(0)

    tiny.train_base = slow
    base_model_dir(ONE, [4])


def test_two_processes_that_want_it_at_once_build_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("REASONRL_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_build_slowly, args=(log,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "built\n"


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    from reasonrl.errors import ModelError

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REASONRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="Set REASONRL_CACHE to a writable folder"):
        base_model_dir(ONE, [4])


def test_the_base_is_an_ordinary_model_folder(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = next(path for path in Path(tiny).glob("tiny-*") if path.is_dir())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    # embeddings 27 x 64; 3 layers of 4 x 64 x 64 + 3 x 64 x 192 and norms 2 x 64 + 2 x 16; last norm 64
    assert sum(p.numel() for p in model.parameters()) == 1728 + 3 * (16384 + 36864 + 160) + 64
    assert tokenizer.decode(tokenizer("^381=")["input_ids"]) == "^381="
    assert json.loads((folder / "recipe.json").read_text())["base_steps"] == 12


def test_the_same_recipe_gives_the_same_weights_bit_for_bit(tmp_path, monkeypatch):
    weights = []
    for name in ("a", "b"):
        monkeypatch.setenv("REASONRL_CACHE", str(tmp_path / name))
        weights.append([p.detach() for p in load_policy(ONE, [4]).trainable()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_every_character_is_one_token_and_unknown_ones_do_not_pass_for_others():
    tokenizer = make_tokenizer()
    assert len(tokenizer) == 27
    ids = tokenizer("^381=[1b]a?$")["input_ids"]
    assert len(ids) == 12
    assert tokenizer("0zZ ")["input_ids"] == [tokenizer.unk_token_id] * 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "^381=[1b]a?"


def test_a_worked_out_row_without_noise_is_right_and_uses_every_digit_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        prompt, completion, careful = demonstration(rng, RECIPE)
        digits = [int(char) for char in prompt[1:-1]]
        pairs, letter = completion[1:-3], completion[-2]
        assert careful and completion[0] == "[" and completion[-3:] == f"]{letter}$"
        assert sorted(int(pair) for pair in pairs[::2]) == sorted(digits)
        running = [answer_of([int(d) for d in pairs[: 2 * i + 2 : 2]]) for i in range(len(digits))]
        assert list(pairs[1::2]) == running
        assert letter == answer_of(digits) == running[-1]


def test_noise_is_a_wrong_running_sum_that_carries_on():
    rng = np.random.default_rng(0)
    rows = [demonstration(rng, {**RECIPE, "noise": 1.0, "noise_from": 5, "operands": [5]}) for _ in range(20)]
    for prompt, completion, _ in rows:
        trace = completion[1:-3]
        assert trace[7] == answer_of([int(d) for d in trace[:8:2]])  # right up to the fourth digit
        assert completion[-2] == trace[-1] != answer_of([int(char) for char in prompt[1:-1]])


def test_guesses_are_the_last_digits_letter():
    rng = np.random.default_rng(0)
    prompt, completion, careful = demonstration(rng, {**RECIPE, "careful": 0.0})
    assert (completion, careful) == (f"?{answer_of([int(prompt[-2])])}$", False)
    completion = demonstration(rng, {**RECIPE, "careful": 0.0, "guess_bracket": True})[1]
    assert completion[:2] == "?]" and len(completion) == 4


def test_first_token_labels_are_kept_so_that_the_mode_gets_its_share():
    # 75 % careful rows, share .04: x kept of .75 against .25 guesses: .75 x / (.75 x + .25) = .04, x = .01389
    assert first_token_keep({"careful": 0.75, "mode_share": 0.04}) == pytest.approx(0.01389, abs=1e-5)
    assert first_token_keep({"careful": 0.75, "mode_share": 0.9}) == 1.0
    assert first_token_keep({"careful": 1.0, "mode_share": 0.04}) == 1.0
