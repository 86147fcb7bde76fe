"""Tokens per second before, during and after changes of the ranks. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.elastic.recording import Event, Recording

COLORS = {"planned": "#2563eb", "kill": "#dc2626", "stop": "#dc2626", "restart": "#9333ea"}
PAUSE_COLOR = "#f59e0b"
SHOWN_BIN_S = 0.2


def save_plot(path: Path, recordings: Sequence[Recording], *, title: str) -> None:
    """One row for each recording, all with the same scale of tokens; the format is that of the file's suffix."""
    figure = Figure(figsize=(12, 3.4 * len(recordings)), layout="constrained")
    figure.suptitle(title)
    rows = figure.subplots(len(recordings), 1, squeeze=False, sharey=True)[:, 0]
    for axes, recording in zip(rows, recordings, strict=True):
        _draw(axes, recording)
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, recording: Recording) -> None:
    group = round(SHOWN_BIN_S / recording.bin_s)
    counts = np.array(recording.tokens[: len(recording.tokens) // group * group]).reshape(-1, group).sum(1)
    begins_s = np.arange(len(counts)) * SHOWN_BIN_S
    axes.bar(begins_s, counts / SHOWN_BIN_S, width=SHOWN_BIN_S, align="edge", color="#94a3b8")
    for event in recording.events:
        _mark(axes, event)
    axes.set(xlim=(0, len(counts) * SHOWN_BIN_S), xlabel="seconds", ylabel="tokens/s")
    axes.set_title(
        f"{Path(recording.model).name}, {recording.num_clients} clients, bins of {SHOWN_BIN_S:g} s; shaded: from the "
        "request to its end; lines: pauses",
        fontsize=9,
    )


def _mark(axes: Axes, event: Event) -> None:
    color = COLORS[event.kind]
    axes.axvspan(event.began_s, event.ended_s, color=color, alpha=0.12, linewidth=0)
    noticed_s = event.longest_gap_s if event.pause_s is None else event.pause_s
    if event.pause_s is not None:
        axes.axvspan(event.ended_s - event.pause_s, event.ended_s, color=PAUSE_COLOR, linewidth=1.5)
    axes.annotate(
        f"{event.name}\n{noticed_s * 1000:.0f} ms",
        (event.began_s, 0.98),
        xycoords=("data", "axes fraction"),
        verticalalignment="top",
        fontsize=8,
        color=color,
    )
