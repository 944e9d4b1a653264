#!/usr/bin/env python
"""The front door: `python sweep.py` trains once, `python sweep.py +sweep=clip_ablation -m` runs a sweep.

No logic of its own: sweeps/frontdoor.py puts the command line in order and reports mistakes, Hydra composes.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from sweeps import frontdoor
from sweeps.config import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    """One training run; with -m or a sweep file Hydra calls hydra_plugins/reasonrl_sweeper instead."""
    sys.exit(frontdoor.run_single(cfg))


if __name__ == "__main__":
    sys.exit(frontdoor.enter(main, sys.argv[1:]))
