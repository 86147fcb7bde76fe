"""What clients noticed, from the times at which tokens came. Pure; all seconds are of one clock."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from benchmarks.elastic.clients import Stream


def longest_gap_s(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest interval without any token that touches the window; `arrivals_s` are in order.

    The window itself where no token came before or after it.
    """
    first = max(0, bisect_left(arrivals_s, begin_s) - 1)
    last = bisect_right(arrivals_s, end_s) + 1
    inside = list(arrivals_s[first:last])
    points = [begin_s] * (not inside or inside[0] > begin_s) + inside + [end_s] * (not inside or inside[-1] < end_s)
    return max((later - earlier for earlier, later in itertools.pairwise(points)), default=0.0)


def recovery_s(streams: Sequence[Stream], killed_s: float, committed_s: float) -> float | None:
    """From a death to the first token on every stream that was in progress then, by the epoch of the survivors.

    That epoch was committed at `committed_s`; what a stream got before was computed before. Streams that had ended by
    then do not count. None when there was none.
    """
    waits_s = []
    for stream in streams:
        if stream.sent_s < killed_s and (stream.ended_s is None or stream.ended_s > committed_s):
            place = bisect_left(stream.arrivals_s, committed_s)
            if place < len(stream.arrivals_s):
                waits_s.append(stream.arrivals_s[place] - killed_s)
    return max(waits_s, default=None)


def tokens_per_bin(arrivals_s: Sequence[float], begin_s: float, end_s: float, bin_s: float) -> list[int]:
    """How many tokens came in each bin of the window."""
    counts = [0] * max(1, math.ceil((end_s - begin_s) / bin_s))
    for at_s in arrivals_s:
        place = int((at_s - begin_s) / bin_s)
        if at_s >= begin_s and place < len(counts):
            counts[place] += 1
    return counts


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Count, median, 95th percentile, least and largest."""
    return {
        "count": len(values),
        "min": round(min(values), 4),
        "p50": round(statistics.median(values), 4),
        "p95": round(percentile(values, 0.95), 4),
        "max": round(max(values), 4),
    }
