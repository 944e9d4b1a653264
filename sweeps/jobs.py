"""What a worker is sent: the config of its run with what the coordinator decides, none of it part of the run's key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sweeps.state import RunState
from sweeps.types import Plan

ALL_CHECKPOINTS = 10_000  # an intervention goes back to the last healthy one, so none may be dropped


class Jobs:
    """Makes the jobs of the sweep `plan`; `say` hears once why tracking is not what was configured."""

    def __init__(self, plan: Plan, on_alert: str, say: Callable[[str], None]) -> None:
        self._plan, self._on_alert, self._say = plan, on_alert, say
        self._told_offline = False

    def make(self, run: RunState, folder: Path, lease_s: float | None) -> dict[str, Any]:
        """The message that starts `run` in `folder`; its worker ends `lease_s` seconds after its last news of us."""
        return {
            "type": "run", "key": run.key, "run_dir": str(folder.resolve()), "config": self.config(run),
            "pause_at": run.pause_at, "on_alert": self._on_alert, "lease_s": lease_s,
        }  # fmt: skip

    def config(self, run: RunState) -> dict[str, Any]:
        """The run's config as its worker gets it."""
        config = copy.deepcopy(run.spec.config)
        if run.micro_batch is not None:
            config.setdefault("optim", {})["micro_batch_size"] = run.micro_batch
        config["name"] = run.spec.name
        tracking = config.get("tracking")
        if tracking is not None:
            tracking["group"] = tracking.get("group") or self._plan.name
            tracking["job_type"] = tracking.get("job_type") or run.spec.arm
            tracking["mode"] = self._tracking_mode(tracking)
        if "alerts" in config:
            config["alerts"]["on_stop"] = "continue" if self._on_alert == "continue" else "stop"
        if self._on_alert == "intervene" and "checkpoint" in config:
            config["checkpoint"]["keep"] = ALL_CHECKPOINTS
        return config

    def _tracking_mode(self, tracking: Mapping[str, Any]) -> str:
        """The W&B mode a run really gets; why it differs from the configured one is said once per sweep."""
        from reasonrl.tracking import TrackingConfig, resolve_mode

        mode, note = resolve_mode(TrackingConfig(**tracking))
        if note and not self._told_offline:
            self._told_offline = True
            self._say(note)
        return mode
