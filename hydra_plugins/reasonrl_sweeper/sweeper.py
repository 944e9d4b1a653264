"""The sweeper `hydra/sweeper=reasonrl`: hands the command to `sweeps.plan`, the plan to the runner."""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# A plain mapping: Hydra runs this module before it is in sys.modules, where a dataclass would look itself up.
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="reasonrl",
    node={"_target_": "hydra_plugins.reasonrl_sweeper.sweeper.ReasonRLSweeper"},
    provider="reasonrl",
)


class ReasonRLSweeper(Sweeper):
    """Plans arms, seeds and search spaces, then runs them (or prints the plan with `plan=true`)."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra hands over; the launcher is not used, slots belong to `engine`."""
        self.hydra_context = hydra_context
        self.config = config

    def sweep(self, arguments: list[str]) -> Any:
        """Plan and run; leaves the process with the runner's exit code when it is not 0."""
        from sweeps.frontdoor import run_sweep

        assert self.config is not None and self.hydra_context is not None
        code = run_sweep(self.config, self.hydra_context.config_loader, arguments)
        if code:
            sys.exit(code)
        return code
