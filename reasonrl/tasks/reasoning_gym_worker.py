"""The process that runs the scorers of Reasoning Gym; started by `verifiers/pool.py`."""

from __future__ import annotations

import base64
import functools
import json
import pickle
from typing import Any

from reasonrl.verifiers.serving import serve


@functools.lru_cache(maxsize=64)
def _dataset(name: str, settings: str) -> Any:
    from reasonrl.tasks.reasoning_gym import make_dataset

    return make_dataset(name, json.loads(settings))


def score(packed: str, said: str) -> str:
    """Return the mark (a number as text) that the dataset's scorer gives; `packed` comes from our own parent."""
    name, settings, entry = pickle.loads(base64.b64decode(packed))
    return repr(float(_dataset(name, json.dumps(settings)).score_answer(said, entry)))


def warm_up() -> None:
    """Import the library before the first clock runs."""
    import reasoning_gym  # noqa: F401


if __name__ == "__main__":
    serve(score, warm_up)
