"""Hydra finds plugins only below `hydra_plugins`; the sweep itself lives in `sweeps`."""
