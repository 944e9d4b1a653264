"""TRL's GRPOTrainer watched by the alert rules, on the built-in tiny model; about a minute on a CPU.

pip install trl
python examples/trl_alerts.py                      # healthy: ends by itself
python examples/trl_alerts.py --learning-rate 3e-2 # far too hot: the rules end it and say why
"""

from __future__ import annotations

import argparse

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from reasonrl.alerts import AlertsConfig
from reasonrl.callbacks import AlertCallback
from reasonrl.models import ModelConfig
from reasonrl.models.tiny import base_model_dir
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.tasks.arithmetic import answer_of, digits_of


def correctness(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
    """1 when the last letter before the end is the sum's letter."""
    pairs = zip(prompts, completions, strict=True)
    return [float(done.rstrip("$")[-1:] == answer_of(digits_of(prompt.lstrip("_")))) for prompt, done in pairs]


def main() -> None:
    """Train a few steps and print what the rules found."""
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer watched by the alert rules")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="results/trl_alerts")
    args = parser.parse_args()

    task = load_task(TaskConfig(guess_right=0.3))
    prompts = [task.train_problem(index).prompt.rjust(11, "_") for index in range(256)]
    model = str(base_model_dir(ModelConfig(), [4, 5, 6]))
    alerts = AlertCallback(AlertsConfig(warmup=5, window=5))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correctness,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            logging_steps=1,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=28,
            beta=0.0,
            report_to="none",
            save_steps=20,
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
        ),  # fmt: skip
        callbacks=[alerts],
    )
    trainer.train()
    print(f"step {trainer.state.global_step}, worst finding: {alerts.worst or 'none'}")
    print(f"ended by {alerts.stopped_by}" if alerts.stopped_by else "not stopped")
    print(f"not judged for missing inputs: {', '.join(alerts.monitor.skipped()) or 'nothing'}")


if __name__ == "__main__":
    main()
