"""The report as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nobiru.bench.statistics import LATENCIES, Summary

BUSY_CLIENT_SHARE = 0.9
LATE_S = 0.02
MAX_ERRORS_SHOWN = 5


def render(summary: Summary, setting: Mapping[str, str]) -> RenderableType:
    """`setting` is shown above the numbers: what was sent to whom."""
    table = Table(title="Serving Benchmark Result", show_header=False, title_style="bold", min_width=60)
    table.add_column()
    table.add_column(justify="right")
    for name, value in setting.items():
        table.add_row(name, value)
    table.add_section()
    for name, value in _counts(summary):
        table.add_row(name, value)
    for key, latency in summary.latencies.items():
        table.add_section()
        table.add_row(Text(LATENCIES[key], style="bold"), "")
        label = key.upper()
        table.add_row(f"Mean {label} (ms)", f"{latency.mean:,.2f}")
        table.add_row(f"Median {label} (ms)", f"{latency.median:,.2f}")
        for number, value_ms in latency.percentiles.items():
            if number == 50:
                continue  # the median, which is there
            table.add_row(f"P{number:g} {label} (ms)", f"{value_ms:,.2f}")
    errors = list(summary.errors.items())
    lines = [Text(f"{count} failed: {error}", style="red") for error, count in errors[:MAX_ERRORS_SHOWN]]
    if len(errors) > MAX_ERRORS_SHOWN:
        lines.append(Text(f"and {len(errors) - MAX_ERRORS_SHOWN} more kinds of failures", style="red"))
    return Group(table, *lines)


def _counts(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("Successful requests", f"{summary.successful:,}"),
        ("Failed requests", f"{summary.failed:,}"),
        ("Benchmark duration (s)", f"{summary.duration_s:,.2f}"),
        ("Total input tokens", f"{summary.input_tokens:,}"),
    ]
    streamed = "ttft" in summary.latencies
    if streamed:
        rows.append(("Total generated tokens", f"{summary.output_tokens:,}"))
    rows.append(("Request throughput (req/s)", f"{summary.request_throughput:,.2f}"))
    if summary.goodput is not None:
        rows.append(("Request goodput (req/s)", f"{summary.goodput:,.2f}"))
    if streamed:
        rows.append(("Output token throughput (tok/s)", f"{summary.output_throughput:,.2f}"))
        rows.append(("Peak output token throughput (tok/s)", f"{summary.peak_output_throughput:,.2f}"))
    rows.append(("Total token throughput (tok/s)", f"{summary.total_token_throughput:,.2f}"))
    rows.append(("Peak concurrent requests", f"{summary.peak_concurrency:,}"))
    return rows


def warnings(summary: Summary, *, client_cpu_share: float, late_s: float, is_limited: bool) -> list[str]:
    """What makes the numbers doubtful, as sentences. `is_limited`: a concurrency limit may hold requests back."""
    found = []
    if client_cpu_share > BUSY_CLIENT_SHARE:
        found.append(f"the client itself took {client_cpu_share:.0%} of a core: it may be the limit, not the server")
    if late_s > LATE_S and not is_limited:
        found.append(f"requests were sent up to {late_s * 1000:,.0f} ms late (P99): the client could not keep the pace")
    if summary.successful and not summary.input_tokens:
        found.append("the server reports no usage: input tokens are unknown, output tokens are pieces of the stream")
    return found
