"""Common random numbers: every draw is a pure function of what it is for.

Arms that share a seed see the same problems and the same sampling noise, and a resumed run repeats the draws
it would have made, because nothing depends on how many draws came before.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def stream(*keys: int | str) -> np.random.Generator:
    """Return the random generator belonging to `keys`, for instance ("rollout", seed, step, position)."""
    import numpy as np

    digest = hashlib.blake2b(repr(keys).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def uniforms(num_rows: int, num_tokens: int, *keys: int | str) -> np.ndarray:
    """Return uniforms in [0, 1) of shape (num_rows, num_tokens), float32.

    Row r does not depend on `num_rows` or `num_tokens` being larger, so a longer limit keeps earlier draws.
    """
    import numpy as np

    return np.stack([stream(*keys, row).random(num_tokens, dtype=np.float32) for row in range(num_rows)])
