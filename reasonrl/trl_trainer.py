"""`trainer=trl`: TRL's GRPOTrainer does sampling and updates; events, scores, alerts, stops and checkpoints are ours.

Prompts come in the order of our own stream, rewards from our own tasks and parts, held-out accuracy from our own
evaluation. Random numbers are set anew at every rollout step, so a continued run repeats its draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrl import distributed, trl_deepspeed
from reasonrl.config import Config
from reasonrl.data import ProblemStream, is_flat
from reasonrl.errors import ConfigError, Mistake, TrainingError
from reasonrl.events import Event
from reasonrl.lazy import torch
from reasonrl.models import load_policy
from reasonrl.models.policy import Policy, choose_device, choose_dtype
from reasonrl.optim import learning_rate
from reasonrl.randomness import stream
from reasonrl.rewards import format_check, reward_parts
from reasonrl.run import Run, open_run
from reasonrl.tasks import score_all
from reasonrl.train import reward_metrics, rollout_metrics
from reasonrl.trl_options import DIFFERENCES, grpo_arguments, reward_weights
from reasonrl.types import Completions, Problem, Rollouts, Summary

# TRL's name -> ours; all are means over the updates of the step
NAMES = {
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "grad_norm": "optim/grad_norm",
    "entropy": "entropy/mean",
    "entropy_coef": "entropy/bonus_coef",
    "kl": "kl/ref",
    "clip_ratio/low_mean": "clip/low",
    "clip_ratio/high_mean": "clip/high",
    "clip_ratio/region_mean": "clip/fraction",
    "cispo_clip_ratio": "clip/fraction",
}


def train_with_trl(config: Config, run_dir: Path, on_event: Callable[[Event], str | None]) -> Summary:
    """Train one policy with TRL and return how it ended; the counterpart of `reasonrl.train.train`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(trl_deepspeed.own_environment(config.trl.options.get("deepspeed") is not None))
        stack.enter_context(distributed.process_group())
        run = stack.enter_context(open_run(config, run_dir, on_event, load=_load))
        run.warn_once(DIFFERENCES)
        run.begin()
        if run.goes_on():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TRL and transformers talk of each other's deprecations
                trainer = make_trainer(run)
                trainer.train()
            stack.enter_context(trl_deepspeed.whole_weights(trainer))
        run.policy.model.eval()
        return run.finish()


def _load(config: Config) -> Policy:
    """Load fp32 weights: TRL has no master copies, so lower precision is left to autocast."""
    model = dataclasses.replace(config.model, dtype="float32", gradient_checkpointing=False)
    return load_policy(model, config.task.operands)


def make_trainer(run: Run) -> Any:
    """Build the GRPOTrainer for the rest of the run."""
    import datasets
    import trl
    from transformers import PrinterCallback

    config, policy = run.config, run.policy
    steps = config.steps - run.step
    ahead = ProblemStream(run.task, config.seed)
    ahead.load_state(run.problems.state())
    problems = ahead.take(steps * config.data.prompts_per_step)
    data = datasets.Dataset.from_dict({"prompt": [_prompt(policy, p) for p in problems], "index": range(len(problems))})
    arguments = grpo_arguments(config, steps, distributed.size())
    scores = Scores(run, problems)
    first = run.step + 1

    def factor(update: int) -> float:
        """The learning rate is our own schedule's: constant within a rollout step."""
        step = min(first + update // config.optim.updates_per_rollout, config.steps)
        return learning_rate(config.optim, step, config.steps) / config.optim.lr

    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer.adam, factor)
    trainer = _trainer_class()(
        model=policy.model,
        reward_funcs=scores.functions(),
        args=_settings(trl.GRPOConfig, run, arguments),
        train_dataset=data,
        processing_class=policy.tokenizer,
    )
    trainer.own_optimizer, trainer.own_schedule = run.optimizer.adam, schedule
    trainer.remove_callback(PrinterCallback)
    trainer.scores, trainer.first_step = scores, first
    trainer.add_callback(make_recorder(run, trainer))
    return trainer


def _settings(kind: Any, run: Run, arguments: dict[str, Any]) -> Any:
    """Return the GRPOConfig; raises ConfigError for options it does not know or does not accept."""
    options = {"ddp_find_unused_parameters": False, **run.config.trl.options}
    if options.get("deepspeed") is not None:
        options["deepspeed"] = trl_deepspeed.settings(options["deepspeed"])
        trl_deepspeed.join()
    known = {one.name for one in dataclasses.fields(kind)}
    unknown = [
        Mistake(f"trl.options.{n}", v, "is no field of GRPOConfig") for n, v in options.items() if n not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    device = choose_device(run.config.model.device)
    dtype = run.config.model.dtype
    half = dtype if run.config.model.kind == "hf" or dtype != "auto" else "float32"
    autocast = choose_dtype(half, device)
    try:
        return kind(
            output_dir=str(run.run_dir / "trl"),
            seed=run.config.seed,
            use_cpu=device.type == "cpu",
            bf16=autocast == torch.bfloat16,
            fp16=autocast == torch.float16,
            **arguments,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError([Mistake("trl.options", options, f"are not accepted by TRL: {error}")]) from error


def _prompt(policy: Policy, problem: Problem) -> Any:
    if not policy.chat:
        return problem.prompt
    system = [{"role": "system", "content": policy.system}] if policy.system else []
    return [*system, {"role": "user", "content": problem.prompt}]


def _trainer_class() -> Any:
    import trl

    class Trainer(trl.GRPOTrainer):
        """GRPOTrainer that draws by (seed, step) and hands over what it made of the rewards."""

        scores: Scores
        first_step: int
        own_optimizer: Any
        own_schedule: Any

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            self.optimizer = self.own_optimizer  # given to the constructor, it would be replaced under DeepSpeed
            return self.optimizer

        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            self.lr_scheduler = self.own_schedule
            return self.lr_scheduler

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            step = self.first_step + self.state.global_step // self.scores.updates
            keys = ("trl", self.args.seed, step, self.accelerator.process_index)
            torch.manual_seed(int(stream(*keys).integers(2**62)))
            out = super()._generate_and_score_completions(inputs)
            self.scores.advantages = distributed.gather(out["advantages"].tolist())
            self.scores.seconds = time.perf_counter() - began
            return out

    return Trainer


@dataclass
class Row:
    """One completion: its problem's place in the data, its ids, its reward parts and the verifier's value."""

    index: int
    ids: list[int]
    parts: list[float]
    correct: float


class Scores:
    """Our rewards as TRL's reward functions, one per part, and the metrics of the step's rollouts."""

    def __init__(self, run: Run, problems: list[Problem]) -> None:
        self.run = run
        self.problems = problems
        self.updates = run.config.optim.updates_per_rollout
        self.names = [*run.config.reward.parts, *(["overlong_soft"] if run.config.overlong.kind == "soft" else [])]
        self.rows: list[Row] = []  # of this process
        self.advantages: list[float] = []  # of all processes, as TRL made them
        self.seconds = 0.0

    def functions(self) -> list[Callable[..., list[float | None]]]:
        """Return one function per part, named after it; the first one scores all parts."""
        return [self._function(place, name) for place, name in enumerate(self.names)]

    def _function(self, place: int, name: str) -> Callable[..., list[float | None]]:
        def part(completion_ids: list[list[int]], index: list[int], **kwargs: Any) -> list[float | None]:
            if place == 0:
                self.rows = self._scored(index, completion_ids)
            # TRL's word for a missing reward is None, in every part or it would count the others
            return [None if any(map(math.isnan, row.parts)) else row.parts[place] for row in self.rows]

        part.__name__ = name
        return part

    def _scored(self, index: list[int], completion_ids: list[list[int]]) -> list[Row]:
        run, config, size = self.run, self.run.config, self.run.config.sampling.group_size
        finish = self._finish(completion_ids)
        texts = [run.policy.decode(ids) for ids in completion_ids]
        verdicts = score_all(run.task, list(zip([self.problems[i] for i in index], texts, finish, strict=True)))
        correct = torch.tensor([verdict.value for verdict in verdicts]).view(-1, size)
        if config.reward.random:
            for group, first in enumerate(index[::size]):
                keys = (config.seed, run.step + 1, self.problems[first].id, first % config.data.prompts_per_step)
                correct[group] = torch.from_numpy(stream("coin", *keys).integers(0, 2, size)).float()
        rollouts = self._rollouts(index, completion_ids, correct, texts)
        well_formed = format_check(run.policy, run.task)
        limit = config.sampling.max_new_tokens
        parts = reward_parts(config.reward, config.overlong, rollouts, limit, well_formed, run.scorers)
        values = torch.stack([parts[name].flatten() for name in self.names], -1).tolist()
        return [Row(*row) for row in zip(index, completion_ids, values, correct.flatten().tolist(), strict=True)]

    def _finish(self, completion_ids: list[list[int]]) -> list[str]:
        ends = self.run.policy.eos_ids
        return ["stop" if ids and ids[-1] in ends else "length" for ids in completion_ids]

    def _rollouts(self, index: list[int], rows: list[list[int]], correct: torch.Tensor, texts: list[str]) -> Rollouts:
        width = max(max(map(len, rows)), 1)
        ids = torch.tensor([row + [self.run.policy.pad_id] * (width - len(row)) for row in rows])
        mask = (torch.arange(width) < torch.tensor([[len(row)] for row in rows])).long()
        zeros = torch.zeros(ids.shape)
        done = Completions(ids, mask, zeros, zeros, zeros + 1, self._finish(rows))
        problems = [self.problems[i] for i in index[:: self.run.config.sampling.group_size]]
        prompts = [self.run.policy.encode(problem) for problem in problems]
        return Rollouts(problems, prompts, done, texts, {}, correct, [""] * len(rows))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step's rollouts over all processes, by the definitions of our own trainer."""
        config, size = self.run.config, self.run.config.sampling.group_size
        rows = distributed.gather(self.rows)
        correct = torch.tensor([row.correct for row in rows]).view(-1, size)
        rollouts = self._rollouts([row.index for row in rows], [row.ids for row in rows], correct, [""] * len(rows))
        parts_PGJ = torch.tensor([row.parts for row in rows]).view(len(correct), size, -1)
        weights = torch.tensor(reward_weights(config))
        valid_PG = parts_PGJ.isfinite().all(-1)
        flat, right = is_flat(correct), correct.nanmean(-1) > 0.5
        return {
            **reward_metrics(parts_PGJ, weights, self.names, torch.tensor(self.advantages).view(-1, size), valid_PG),
            **rollout_metrics(rollouts, config.reward.ngram),
            "groups/flat": flat.double().mean().item(),
            "groups/all_right": (flat & right).double().mean().item(),
            "groups/all_wrong": (flat & ~right).double().mean().item(),
            "data/rounds": 1.0,
            "data/kept": float(len(correct)),
            "data/dropped": 0.0,
            "data/short": 0.0,
            "data/generated_tokens": float(rollouts.completions.lengths_B.sum()),
        }


def make_recorder(run: Run, trainer: Any) -> Any:
    """Return the callback that turns TRL's logs into our rows and our stops into TRL's."""
    from transformers import TrainerCallback

    scores: Scores = trainer.scores
    before = trl_deepspeed.held(run) if trainer.is_deepspeed_enabled else {}

    class Recorder(TrainerCallback):
        """Collects the logs of a rollout step's updates and records the step after the last one."""

        def __init__(self) -> None:
            self.logs: list[dict[str, Any]] = []
            self.began = time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer.is_deepspeed_enabled:
                trl_deepspeed.take_over(run, trainer.model_wrapped, before)
                before.clear()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not logs or "loss" not in logs:
                return
            self.logs.append(logs)
            if state.global_step % scores.updates == 0:
                self.record(control)

        def record(self, control: Any) -> None:
            metrics = self.metrics()
            run.gradient_steps += scores.updates
            metrics["optim/gradient_steps"] = float(run.gradient_steps)
            run.problems.take(run.config.data.prompts_per_step)
            with trl_deepspeed.whole_weights(trainer):
                self.record_step(metrics)
            self.logs, self.began = [], time.perf_counter()
            control.should_training_stop = not run.goes_on()

        def record_step(self, metrics: dict[str, float]) -> None:
            if not all(bool(weight.isfinite().all()) for weight in run.policy.trainable()):
                run.emit("step", step=run.step + 1, metrics=metrics)
                raise TrainingError(
                    f"The weights became non-finite in step {run.step + 1}: TRL applies non-finite updates. "
                    "Lower optim.lr, or use trainer=ours, which skips them."
                )
            run.policy.model.eval()
            run.record_step(metrics)
            run.policy.model.train()

        def metrics(self) -> dict[str, float]:
            metrics = scores.metrics()
            for theirs, ours in NAMES.items():
                values = [float(logs[theirs]) for logs in self.logs if logs.get(theirs) is not None]
                if values:
                    metrics[ours] = sum(values) / len(values)
            seconds = time.perf_counter() - self.began
            return {
                **metrics,
                "optim/lr": learning_rate(run.config.optim, run.step + 1, run.config.steps),
                "optim/updates": float(len(self.logs)),
                "time/step": seconds,
                "time/generate": scores.seconds,
                "time/train": seconds - scores.seconds,
                "speed/tokens_per_s": metrics["data/generated_tokens"] / max(seconds, 1e-9),
            }

    return Recorder()
