"""The built-in base model: a small Qwen3 transformer, taught the arithmetic task with mistakes on purpose.

Built on first use, kept in the user's cache under a hash of everything that shapes it, saved in ordinary
Hugging Face form. Two processes that want it at once build it once; a damaged copy is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrl.errors import ModelError
from reasonrl.lazy import torch
from reasonrl.models import ModelConfig
from reasonrl.randomness import stream
from reasonrl.tasks.arithmetic import LETTERS

if TYPE_CHECKING:
    import numpy as np

VOCABULARY = ["_", "!", "$", "^", "=", "[", "]", "?", *"0123456789"[1:], *LETTERS]
PAD, UNKNOWN, EOS = "_", "!", "$"
PROMPT_WIDTH = 11
RECIPE_VERSION = 1  # raise when the way the base is built changes
BASE_FIELDS = (
    "careful",
    "mode_share",
    "noise",
    "noise_from",
    "bracket_share",
    "guess_bracket",
    "base_steps",
    "base_seed",
)
WEIGHTS = "model.safetensors"
ROWS_PER_STEP, PEAK_LR, WARMUP = 128, 3e-3, 50


def base_recipe(config: ModelConfig, operands: list[int]) -> dict[str, Any]:
    """Return everything that shapes the base model, as plain values."""
    recipe = {name: getattr(config, name) for name in BASE_FIELDS}
    return {**recipe, "operands": sorted(config.base_operands or operands), "version": RECIPE_VERSION}


def cache_root() -> Path:
    """Return the cache folder: REASONRL_CACHE, or the user's cache directory."""
    if "REASONRL_CACHE" in os.environ:
        return Path(os.environ["REASONRL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "reasonrl"


def base_folder(recipe: dict[str, Any]) -> Path:
    """Return where the base model of this recipe is kept, once it has been built."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / f"tiny-{digest}"


def base_model_dir(config: ModelConfig, operands: list[int]) -> Path:
    """Return the folder of the base model, building it if it is missing or damaged."""
    recipe = base_recipe(config, operands)
    folder = base_folder(recipe)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock")):
            if not _is_sound(folder):
                _build(folder, recipe)
    except OSError as error:
        raise ModelError(
            f"The built-in model cannot be kept in {folder.parent}: {error}. Set REASONRL_CACHE to a writable folder."
        ) from error
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(folder: Path) -> dict[str, str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != "sound.json")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def _is_sound(folder: Path) -> bool:
    """Return whether every file of the folder is as it was when the build ended."""
    if not folder.is_dir():
        return False
    try:
        sound = json.loads((folder / "sound.json").read_text()) == _digest(folder) and (folder / WEIGHTS).is_file()
    except (OSError, ValueError):
        sound = False
    if not sound:
        print(f"The built-in model in {folder} is damaged; it is built again.", file=sys.stderr, flush=True)
    return sound


def _build(folder: Path, recipe: dict[str, Any]) -> None:
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    print(
        f"Building the built-in base model ({recipe['base_steps']} supervised steps, once)...",
        file=sys.stderr,
        flush=True,
    )
    started = time.monotonic()
    for left in folder.parent.glob(f"{folder.name}?*"):  # by a build that was killed; the lock says none goes on now
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        with _every_core():
            model = train_base(recipe)
        _save(model, scratch)
        make_tokenizer().save_pretrained(scratch)
        (scratch / "recipe.json").write_text(json.dumps(recipe, indent=1))
        (scratch / "sound.json").write_text(json.dumps(_digest(scratch)))
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"Built in {time.monotonic() - started:.0f} s: {folder}", file=sys.stderr, flush=True)


def _save(model: Any, folder: Path) -> None:
    """Write the model; `save_pretrained` would write nothing in any but the first process of a run."""
    from safetensors.torch import save_file

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}  # tied ones once
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@contextlib.contextmanager
def _every_core() -> Iterator[None]:
    """Use up to four cores whatever the slot's share: whoever else wants this model waits for it anyway."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = torch.get_num_threads()
    torch.set_num_threads(min(cores, 4))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_tokenizer() -> Any:
    """Return the character tokenizer in Hugging Face form."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(seed: int = 0) -> Any:
    """Return an untrained Qwen3 model: 3 layers, hidden 64, 162k parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def demonstration(rng: np.random.Generator, recipe: dict[str, Any]) -> tuple[str, str, bool]:
    """Return (prompt, completion, careful) of one supervised row; running sums are wrong now and then, and the
    mistake carries on."""
    count = int(rng.choice(recipe["operands"]))
    digits = [int(digit) for digit in rng.choice(range(1, 10), size=count, replace=False)]
    prompt = "^" + "".join(map(str, digits)) + "="
    if rng.random() >= recipe["careful"]:
        return prompt, "?" + ("]" if recipe["guess_bracket"] else "") + LETTERS[digits[-1]] + EOS, False
    trace, total = "[", 0
    for index, digit in enumerate(rng.permutation(digits)):
        total = (total + int(digit)) % 10
        if index + 1 >= recipe["noise_from"] and rng.random() < recipe["noise"]:
            total = int((total + rng.integers(1, 10)) % 10)
        trace += f"{digit}{LETTERS[total]}"
    bracket = "]" if rng.random() < recipe["bracket_share"] else ""
    return prompt, trace + bracket + LETTERS[total] + EOS, True


def first_token_keep(recipe: dict[str, Any]) -> float:
    """Return how often a careful row keeps the label of its first token, so that the base picks the careful mode
    with probability `mode_share` while it learns that mode from all careful rows."""
    careful, mode = recipe["careful"], recipe["mode_share"]
    if careful >= 1.0 or mode >= careful:
        return 1.0
    return mode * (1 - careful) / (careful * (1 - mode))


def train_base(recipe: dict[str, Any]) -> Any:
    """Teach a fresh model by supervised learning on noisy demonstrations and return it."""
    model = make_model(recipe["base_seed"])
    index = {token: i for i, token in enumerate(VOCABULARY)}
    steps = recipe["base_steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    keep = first_token_keep(recipe)
    rng = stream("base", recipe["base_seed"])
    model.train()
    for step in range(steps):
        ids, positions, mask, labels = _supervised_batch(rng, recipe, index, keep)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / WARMUP) * cosine
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _supervised_batch(rng: Any, recipe: dict[str, Any], index: dict[str, int], keep: float) -> tuple[torch.Tensor, ...]:
    rows = [demonstration(rng, recipe) for _ in range(ROWS_PER_STEP)]
    width = PROMPT_WIDTH + max(len(completion) for _, completion, _ in rows)
    ids = torch.full((len(rows), width), index[PAD])
    labels = torch.full((len(rows), width), -100)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, (prompt, completion, careful) in enumerate(rows):
        text = [index[char] for char in prompt + completion]
        start, answer = PROMPT_WIDTH - len(prompt), PROMPT_WIDTH
        ids[row, start : start + len(text)] = torch.tensor(text)
        mask[row, start : start + len(text)] = 1
        labels[row, answer : answer + len(completion)] = torch.tensor(text[len(prompt) :])
        if careful and rng.random() >= keep:
            labels[row, answer] = -100
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ids, positions, mask, labels
