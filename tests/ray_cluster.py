"""A Ray cluster of several nodes on this machine, for tests; skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Cluster = Any
HAVE_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAVE_RAY, reason="the extra [ray] is not installed")
SMALL = {"object_store_memory": 80 * 2**20}


@contextmanager
def two_nodes(cpus: int = 1, **resources: Any) -> Iterator[Cluster]:
    """A cluster of two nodes with `cpus` CPUs each (and `resources`, such as num_gpus), ended at the end."""
    from sweeps.engines.ray import _import_ray

    # A node's workers import the code from here, as they would from an installed package.
    root = str(Path(__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (root, before) if part)
    _import_ray()
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=cpus, include_dashboard=False, wait=False, **SMALL, **resources)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        assert "ray" in sys.modules
