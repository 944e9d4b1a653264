"""One measured process of `benchmarks/trainer.py`: this trainer, TRL's GRPOTrainer, or the machine's own limits.

    python benchmarks/trainer_runs.py ours|trl|machine JOB.json RESULT.json

Runs under the interpreter of the trainer it measures; the parent writes the job and reads the result. A rollout
step is timed from the start of one to the start of the next, so everything between two steps counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

MATMUL_SIZE = 2048  # rows and columns; large enough that the product, not the call, is timed
PLAIN_ROWS, PLAIN_TOKENS = 8, 100


def digit_share(problems: list[Any], texts: list[str]) -> list[float]:
    """A reward that differs between almost any two completions: the share of characters that are digits."""
    return [sum(char.isdigit() for char in text) / max(len(text), 1) for text in texts]


def peak_mib() -> float:
    """Return the largest resident memory of this program so far (ru_maxrss would count the parent's before exec)."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


class Marks:
    """Times at which rollout steps begin, and the peak memory seen by then."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.peak_mib: list[float] = []

    def __call__(self) -> None:
        self.times.append(time.time())
        self.peak_mib.append(peak_mib())


def summary(job: dict[str, Any], marks: Marks, rows: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """Return the numbers of one run; the job's last step only ends the one before it."""
    steps = [after - before for before, after in zip(marks.times, marks.times[1:], strict=False)]
    first, last = job["warmup"], job["warmup"] + job["measured"]
    chosen = {name: values[first:last] for name, values in rows.items()}
    return {
        "startup_s": marks.times[0] - job["started"],
        "step_s": steps[first:last],
        "tokens_per_s": sum(chosen["tokens"]) / sum(steps[first:last]),
        "peak_mib": marks.peak_mib[last],
        "loaded_mib": marks.peak_mib[0],
        "reward": rows["reward"],
        **{name: chosen[name] for name in chosen if name != "reward"},
        **more,
    }


def run_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train with this project and return what was measured."""
    import torch

    import reasonrl.train as loop
    from reasonrl.config import from_dict
    from reasonrl.run import versions

    torch.set_num_threads(job["threads"])
    marks = Marks()
    rows: dict[str, list[float]] = {"tokens": [], "reward": [], "generate_s": [], "train_s": [], "flat": []}
    updates: list[float] = []
    last_call: list[Any] = []
    train_step, update = loop.train_step, loop.update

    def marked_step(*args: Any) -> None:
        marks()
        train_step(*args)

    def timed_update(*args: Any) -> dict[str, float]:
        began = time.perf_counter()
        out = update(*args)
        updates.append(time.perf_counter() - began)
        last_call[:] = args
        return out

    def on_event(event: dict[str, Any]) -> None:
        if event["type"] == "step":
            metrics = event["metrics"]
            rows["tokens"].append(metrics["data/generated_tokens"])
            rows["reward"].append(metrics["reward/total"])
            rows["generate_s"].append(metrics["time/generate"])
            rows["train_s"].append(metrics["time/train"])
            rows["flat"].append(metrics["groups/flat"])

    loop.train_step, loop.update = marked_step, timed_update  # type: ignore[assignment]
    loop.train(from_dict(job["config"]), Path(job["scratch"]), on_event)
    first, last = job["warmup"], job["warmup"] + job["measured"]
    seconds = statistics.median(updates[first:last])
    result = summary(job, marks, rows, update_s=seconds, versions=versions())
    result["prompt_tokens"] = sum(len(last_call[0].encode(problem)) for problem in _problems(job))
    if job["count_flops"]:
        policy, optimizer, *rest = last_call
        arguments = (policy, NoOptimizer(optimizer), *rest)
        update(*arguments)  # memory that the optimizer had used is touched again
        began = time.perf_counter()
        update(*arguments)
        again = time.perf_counter() - began
        result["pass"] = {"flop": count_flops(lambda: update(*arguments)), "seconds": again}
    return result


class NoOptimizer:
    """Takes the place of the optimizer in a training pass: forward and backward, no update."""

    def __init__(self, optimizer: Any) -> None:
        self.parameters, self.masters = optimizer.parameters, optimizer.masters

    def accumulate(self) -> None:
        """Leave gradients where backward put them."""

    def step(self, lr: float) -> float:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        return 0.0


def run_trl(job: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's GRPOTrainer and return what was measured."""
    import accelerate
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(job["threads"])
    marks = Marks()
    rows: dict[str, list[float]] = {"tokens": [], "reward": [], "generate_s": [], "train_s": [], "flat": []}
    per_rollout = job["updates"]

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % per_rollout == 0:
                marks()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                rows["reward"].append(logs["reward"])
                rows["flat"].append(logs["frac_reward_zero_std"])

    class Timed(trl.GRPOTrainer):
        def _generate(self, prompts: Any) -> Any:
            began = time.perf_counter()
            out = super()._generate(prompts)
            rows["generate_s"].append(time.perf_counter() - began)
            rows["tokens"].append(float(sum(len(ids) for ids in out[1])))
            return out

    chat = transformers.AutoTokenizer.from_pretrained(job["model"]).chat_template is not None
    prompts = [[{"role": "user", "content": p["prompt"]}] if chat else p["prompt"] for p in job["problems"]]
    data = datasets.Dataset.from_dict({"prompt": prompts, "index": list(range(len(prompts)))})
    dtype = job["dtype"]
    settings = trl.GRPOConfig(
        output_dir=job["scratch"],
        max_steps=job["steps"] * per_rollout,
        per_device_train_batch_size=job["rows"] // per_rollout,
        steps_per_generation=per_rollout,
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="bnpo",  # token mean over the minibatch, which is what `loss.aggregation=token_mean` is
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=job["gradient_checkpointing"],
        bf16=dtype == "autocast",
        model_init_kwargs={"dtype": "float32" if dtype == "autocast" else dtype},
        use_cpu=True,
        logging_steps=per_rollout,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )
    trainer = Timed(job["model"], trl_reward(job), settings, data, callbacks=[Watch()])
    trainer.train()
    versions = {m.__name__: m.__version__ for m in (torch, transformers, trl, accelerate)}
    steps = [after - before for before, after in zip(marks.times, marks.times[1:], strict=False)]
    rows["train_s"] = [whole - part for whole, part in zip(steps, rows["generate_s"], strict=False)]
    prompt_tokens = sum(len(ids) for ids in trainer._tokenize_prompts(prompts)[0])
    return summary(job, marks, rows, versions=versions, prompt_tokens=prompt_tokens)


def _problems(job: dict[str, Any]) -> list[Any]:
    from reasonrl.types import Problem

    return [Problem(**values) for values in job["problems"]]


def trl_reward(job: dict[str, Any]) -> Callable[..., list[float]]:
    """Return the job's reward as TRL calls it: this project's own scoring on TRL's completions."""
    from reasonrl.tasks import TaskConfig, load_task

    problems, ends = _problems(job), set(job["eos_ids"])
    task = None if job["reward"] == "digits" else load_task(TaskConfig(**job["config"]["task"]))

    def reward(completions: Any, completion_ids: Any, index: list[int], **kwargs: Any) -> list[float]:
        texts = [item if isinstance(item, str) else item[0]["content"] for item in completions]
        chosen = [problems[i] for i in index]
        if task is None:
            return digit_share(chosen, texts)
        finish = ["stop" if ids[-1] in ends else "length" for ids in completion_ids]
        return [task.score(*row).value for row in zip(chosen, texts, finish, strict=True)]

    return reward


def count_flops(call: Callable[[], Any]) -> float:
    """Return the floating-point operations of the matrix products in `call`, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


def run_machine(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the matrix-product peak per dtype, and what a plain forward and backward of the model reaches.

    The plain pass is left out in a dtype that is slower than float32 (a CPU that only emulates bfloat16).
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    out: dict[str, Any] = {"threads": job["threads"], "cpu": torch.backends.cpu.get_cpu_capability()}
    for name in ("float32", "bfloat16"):
        out[name] = {"peak_flop_per_s": matmul_peak(name)}
        if out[name]["peak_flop_per_s"] < out["float32"]["peak_flop_per_s"]:
            continue
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, name))
        ids = torch.arange(PLAIN_ROWS * PLAIN_TOKENS).view(PLAIN_ROWS, PLAIN_TOKENS) % model.config.vocab_size

        def plain(model: Any = model, ids: Any = ids) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        out[name]["plain_pass"] = {"flop": count_flops(plain), "seconds": best_time(plain)}
    return out


def matmul_peak(dtype: str) -> float:
    """Return the highest rate of a square matrix product, in operations per second.

    The size doubles up to MATMUL_SIZE as long as one product takes less than a second or so.
    """
    import torch

    size, best = 256, 0.0
    while size <= MATMUL_SIZE:
        a = torch.randn(size, size).to(getattr(torch, dtype))
        seconds = best_time(lambda a=a: a @ a, budget_s=3.0)
        best = max(best, 2 * size**3 / seconds)
        if seconds > 0.2:
            break
        size *= 2
    return best


def best_time(call: Callable[[], Any], budget_s: float = 10.0) -> float:
    """Return the shortest of the timings that fit into `budget_s` (at least one) after one warm-up, in seconds."""
    call()
    best, started = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - started < budget_s:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Run what argv names and write its result."""
    kind, job, target = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    result = {"ours": run_ours, "trl": run_trl, "machine": run_machine}[kind](job)
    target.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
