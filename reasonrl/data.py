"""The stream of training problems, the difficulty gate, and dynamic sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from reasonrl.errors import TrainingError
from reasonrl.lazy import torch
from reasonrl.randomness import stream
from reasonrl.tasks import Task
from reasonrl.types import Problem


@dataclass
class DataConfig:
    """Which problems a rollout step trains on."""

    kind: str = "plain"  # plain, or dynamic_sampling (DAPO: refill until every group has a signal)
    prompts_per_step: int = 32  # P
    max_rounds: int = 10  # dynamic sampling: generation rounds per step
    patience: int = 5  # dynamic sampling: steps in a row without any usable group before the run fails
    difficulty_gate: int = 0  # drop a problem that was flat in its last k visits; 0 = off


@dataclass
class ProblemStream:
    """Problems in an order fixed by the seed: epochs of a shuffled finite task, or an endless generated one."""

    task: Task
    seed: int
    gate: int = 0
    position: int = 0
    flat_visits: dict[str, int] = field(default_factory=dict)
    gated: int = 0
    _epoch: int = -1
    _order: list[int] = field(default_factory=list)

    def take(self, count: int) -> list[Problem]:
        """Return the next `count` problems, passing over those the difficulty gate holds back.

        After two epochs of gated problems in a row the gate stands open: a task without others is used as it is.
        """
        taken: list[Problem] = []
        in_a_row = 0
        limit = 2 * self.task.size if self.task.size is not None else 20 * count
        while len(taken) < count:
            problem = self.task.train_problem(self._index())
            self.position += 1
            gated = self._is_gated(problem)
            if gated and in_a_row < limit:
                in_a_row += 1
                self.gated += 1
                continue
            in_a_row = in_a_row if gated else 0
            taken.append(problem)
        return taken

    def record(self, problem: Problem, flat: bool) -> None:
        """Tell the gate whether a visited problem was all right or all wrong."""
        if self.gate:
            self.flat_visits[problem.id] = self.flat_visits.get(problem.id, 0) + 1 if flat else 0

    def _is_gated(self, problem: Problem) -> bool:
        return bool(self.gate) and self.flat_visits.get(problem.id, 0) >= self.gate

    def _index(self) -> int:
        if self.task.size is None:
            return int(stream("problem", self.seed, self.position).integers(2**62))
        epoch, offset = divmod(self.position, self.task.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = stream("epoch", self.seed, epoch).permutation(self.task.size).tolist()
        return self._order[offset]

    def state(self) -> dict:
        """Return what a checkpoint needs to continue the stream."""
        return {"position": self.position, "flat_visits": self.flat_visits, "gated": self.gated}

    def load_state(self, state: dict) -> None:
        """Continue from a checkpoint's state."""
        self.position, self.gated = state["position"], state["gated"]
        self.flat_visits = dict(state["flat_visits"])


def is_flat(values_PG: torch.Tensor, tolerance: float = 1e-6) -> torch.Tensor:
    """Return (P,) bool: the group's spread max - min is below `tolerance`, or fewer than 2 rows are valid.

    Decided on raw rewards, never on advantages (spec of the field: an eps in the std hides real flatness).
    """
    valid = ~values_PG.isnan()
    high = values_PG.nan_to_num(nan=-math.inf).amax(-1)
    low = values_PG.nan_to_num(nan=math.inf).amin(-1)
    return ((high - low) < tolerance) | (valid.sum(-1) < 2)


@dataclass
class Collected:
    """Groups chosen for one step: which rounds they came from is counted, what they cost is kept."""

    rounds: int
    groups: list  # of (problem, group) in generation order
    generated_tokens: int
    num_groups_seen: int
    all_right: float
    all_wrong: float
    flat: float


def collect(
    config: DataConfig, problems: ProblemStream, generate: Callable[[list[Problem], int], list], step: int, starved: int
) -> Collected:
    """Generate groups until P are usable (dynamic sampling), or once (plain).

    DAPO section 3.2: groups flat in correctness are dropped and refilled. `generate(problems, offset)` returns
    one group per problem with `.correct_G`, `.num_tokens`; `offset` numbers the draws inside the step. We stop
    after `max_rounds` and train on what there is; later rounds ask only for about as many problems as are
    missing, judged by the share kept so far. Raises TrainingError after `patience` empty steps in a row.
    """
    wanted = config.prompts_per_step
    dynamic = config.kind == "dynamic_sampling"
    seen: list = []
    kept: list = []
    ask, rounds = wanted, 0
    while ask > 0 and rounds < (config.max_rounds if dynamic else 1):
        groups = generate(problems.take(ask), len(seen))
        rounds += 1
        flags = is_flat(torch.stack([group.correct_G for group in groups])).tolist()
        for group, flat in zip(groups, flags, strict=True):
            problems.record(group.problem, flat)
            group.flat = flat
        seen += groups
        kept += [group for group in groups if not (dynamic and group.flat)]
        share = max(len(kept) / len(seen), 1 / wanted)
        ask = min(wanted, math.ceil((wanted - len(kept)) / share)) if dynamic else 0
    if not kept and starved + 1 >= config.patience:
        raise TrainingError(
            f"No group had both right and wrong answers in {config.patience} steps (step {step}, "
            f"{config.max_rounds} rounds each). The data are too hard or too easy for this model: change the task, "
            "raise sampling.group_size, or set data=plain to see the rewards."
        )
    means = torch.stack([group.correct_G for group in seen]).nanmean(-1)  # NaN where no row could be scored
    flat = torch.tensor([group.flat for group in seen])
    return Collected(
        rounds=rounds,
        groups=kept[:wanted],
        generated_tokens=sum(group.num_tokens for group in seen),
        num_groups_seen=len(seen),
        all_right=(flat & (means > 0.5)).double().mean().item(),
        all_wrong=(flat & (means <= 0.5)).double().mean().item(),
        flat=flat.double().mean().item(),
    )
