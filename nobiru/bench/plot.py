"""The plot of a run: distributions of latencies, tokens and requests over time. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nobiru.bench.statistics import LATENCIES, RequestRecord, concurrency, tokens_per_second

COLORS = {"ttft": "#2563eb", "tpot": "#0d9488", "itl": "#0d9488", "e2el": "#9333ea", "requests": "#d97706"}
_PAGE = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n<body>{svg}</body></html>\n'


def save_plot(path: Path, records: Sequence[RequestRecord], *, title: str) -> None:
    """Write the plot in the format of the file's suffix."""
    figure = draw(records, title)
    if path.suffix.lower() == ".html":
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
        image = svg.getvalue()
        path.write_text(_PAGE.format(title=html.escape(title), svg=image[image.index("<svg") :]), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


def draw(records: Sequence[RequestRecord], title: str) -> Figure:
    """Two distributions in the upper row (one for embeddings), two timelines below."""
    done = [record for record in records if record.error is None]
    streamed = any(record.arrivals_s for record in done)
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    end_to_end = [record.e2el_s for record in done]
    if streamed:
        _cumulative(axes[0, 0], [value for each in done if (value := each.ttft_s) is not None], "ttft")
        _histogram(axes[0, 1], [gap for record in done for gap in record.itl_s], "itl")
        _bars(axes[1, 0], tokens_per_second(done), "output tokens/s")
    else:
        _cumulative(axes[0, 0], end_to_end, "e2el")
        _histogram(axes[0, 1], end_to_end, "e2el")
        _bars(axes[1, 0], np.bincount([int(record.end_s) for record in done]).tolist() if done else [], "requests/s")
    _running(axes[1, 1], records)
    return figure


def _cumulative(axes: Axes, values_s: Sequence[float], name: str) -> None:
    milliseconds = np.sort(values_s) * 1000
    axes.step(milliseconds, np.arange(1, len(milliseconds) + 1) / max(1, len(milliseconds)), color=COLORS[name])
    axes.set(title=f"{LATENCIES[name]}: share of requests", xlabel="ms", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _histogram(axes: Axes, values_s: Sequence[float], name: str) -> None:
    milliseconds = np.asarray(values_s) * 1000
    if len(milliseconds):
        # A single pause would squeeze all others into the first bar.
        most = np.percentile(milliseconds, 99.5)
        axes.hist(np.minimum(milliseconds, most), bins=50, color=COLORS[name])
        axes.axvline(np.median(milliseconds), color="black", linestyle=":", label="median")
        axes.axvline(np.percentile(milliseconds, 99), color="black", linestyle="--", label="P99")
        axes.legend()
    axes.set(title=f"{LATENCIES[name]}: histogram, above P99.5 in the last bar", xlabel="ms", ylabel="count")


def _bars(axes: Axes, per_second: Sequence[float], label: str) -> None:
    axes.bar(np.arange(len(per_second)) + 0.5, per_second, width=0.9, color=COLORS["tpot"])
    axes.set(title=label, xlabel="seconds since the start", xlim=(0, None), ylim=(0, None))


def _running(axes: Axes, records: Sequence[RequestRecord]) -> None:
    points = concurrency(records)
    axes.step([second for second, _ in points], [count for _, count in points], where="post", color=COLORS["requests"])
    for failed in (record for record in records if record.error is not None):
        axes.axvline(failed.end_s, color="red", alpha=0.4, linewidth=0.8)
    axes.set(title="requests on their way (red: a failure)", xlabel="seconds since the start", ylim=(0, None))
    axes.grid(alpha=0.3)
