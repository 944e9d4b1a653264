"""A sequence-classification model as one reward part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reasonrl.errors import ModelError
from reasonrl.lazy import torch
from reasonrl.types import Problem


@dataclass
class RewardModelConfig:
    """A Hugging Face model with one output (`AutoModelForSequenceClassification`), held frozen beside the policy."""

    path: str = ""  # folder or hub name
    revision: str | None = None
    device: str = "auto"  # auto, cpu, cuda, cuda:N; its own, beside the policy's model.device
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    batch_size: int = 16  # rows per forward pass
    trust_remote_code: bool = False


class RewardModel:
    """Scores (problem, completion) pairs with the model's single logit; call it with B problems and B texts."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.window = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30)

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float | None]:
        """Return one score per pair; None where prompt and completion exceed the model's window (never cut)."""
        rows = [self._encode(problem.prompt, text) for problem, text in zip(problems, texts, strict=True)]
        scores: list[float | None] = [None] * len(rows)
        fitting = [index for index, ids in enumerate(rows) if 0 < len(ids) <= self.window]
        fitting.sort(key=lambda index: len(rows[index]))  # rows of like length share a batch: little padding
        for start in range(0, len(fitting), self.batch_size):
            chosen = fitting[start : start + self.batch_size]
            for index, score in zip(chosen, self._forward([rows[index] for index in chosen]), strict=True):
                scores[index] = score if math.isfinite(score) else None
        return scores

    def _encode(self, prompt: str, text: str) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None) is None:
            return self.tokenizer(prompt, text)["input_ids"]
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        return self.tokenizer.apply_chat_template(turns, return_dict=False)

    def _forward(self, rows: list[list[int]]) -> list[float]:
        padded = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.model.device)
        with torch.inference_mode():
            return self.model(**padded).logits[:, 0].float().tolist()


def load_reward_model(config: RewardModelConfig, key: str) -> RewardModel:
    """Load the model of the reward part at config key `key`.

    Raises ModelError, naming the key, where it cannot be loaded, has another number of outputs than one, or lacks
    the trained head (a causal LM would be given a random one).
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    from reasonrl.models.policy import choose_device, choose_dtype

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = choose_device(config.device, f"{key}.device")
    common: dict[str, Any] = {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **common)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            config.path, dtype=choose_dtype(config.dtype, device), output_loading_info=True, **common
        )
    except Exception as error:  # transformers raises many kinds; each ends here as one readable message
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"{key}.path={config.path} could not be loaded: {type(error).__name__}: {first}") from error
    if model.config.num_labels != 1:
        raise ModelError(f"{key}.path={config.path} has {model.config.num_labels} outputs; a reward model has one.")
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{key}.path={config.path} is no reward model: it has no weights for {', '.join(missing)}.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # decoders find a row's last token by it
    return RewardModel(model.to(device).eval().requires_grad_(False), tokenizer, config.batch_size)
