"""The random numbers of sampling: one for each token of each text, whatever else is computed beside it."""

from __future__ import annotations

import struct
from hashlib import blake2b


def uniform(seed: int, child: int, index: int) -> float:
    """A number in [0, 1) that depends on nothing but a request's seed, the child and the output index.

    A counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) whose mixing function
    is BLAKE2b. `seed` and the others are signed 64-bit integers.
    """
    digest = blake2b(struct.pack("<qqq", seed, child, index), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
