"""Metrics and logs: names, units, formats."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nobiru.engine.messages import EngineState
from nobiru.errors import ConfigError
from nobiru.metrics import Metrics
from nobiru.serving.logs import configure_logging


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    text = metrics.render()[0].decode()
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_happened_can_be_read_back() -> None:
    metrics = Metrics()
    metrics.observe_request("/v1/embeddings", 200, 0.0007)
    metrics.observe_request("/v1/embeddings", 200, 0.2)
    metrics.observe_request("/v1/embeddings", 429, 0.001)
    metrics.observe_tokenize(0.003)
    metrics.observe_queue(0.03)
    metrics.observe_step(100, 3, 0.02)
    metrics.observe_step(60, 1, 0.01)
    metrics.rejected("queue_full")
    metrics.rank_restarted()
    metrics.set_queue(num_requests=4, num_tokens=500, estimated_wait_s=2.5, num_ranks=3)
    found = samples(metrics)
    route = "route=/v1/embeddings"
    assert found["nobiru_requests_total", route, "status=200"] == 2
    assert found["nobiru_requests_total", route, "status=429"] == 1
    assert found["nobiru_request_seconds_bucket", "le=0.001", route] == 2
    assert found["nobiru_request_seconds_count", route] == 3
    assert found["nobiru_tokenize_seconds_bucket", "le=0.005"] == 1
    assert found["nobiru_queue_seconds_sum",] == pytest.approx(0.03)
    assert found["nobiru_compute_seconds_count",] == 2
    assert found["nobiru_batch_tokens_sum",] == found["nobiru_prompt_tokens_total",] == 160
    assert found["nobiru_batch_sequences_sum",] == found["nobiru_sequences_total",] == 4
    assert found["nobiru_rejections_total", "reason=queue_full"] == 1
    assert found["nobiru_rank_restarts_total",] == 1
    assert found["nobiru_queued_requests",] == 4
    assert found["nobiru_queued_tokens",] == 500
    assert found["nobiru_estimated_wait_seconds",] == 2.5


def test_what_generation_measures() -> None:
    metrics = Metrics()
    metrics.observe_first_token(0.2)
    for _ in range(3):
        metrics.observe_inter_token(0.02)
    metrics.count_generated_tokens(3)
    metrics.count_generated_tokens(1)
    metrics.observe_generation(finish_reason="length", seconds_per_token=0.02)
    metrics.observe_generation(finish_reason="stop", seconds_per_token=None)
    for step in range(2):
        metrics.observe_engine(
            EngineState(
                num_running=3 - step,
                num_waiting=step,
                kv_usage=0.25,
                num_preemptions=1,
                num_cached_tokens=16,
                num_prompt_tokens=40,
            )
        )
    found = samples(metrics)
    assert found["nobiru_time_to_first_token_seconds_sum",] == pytest.approx(0.2)
    assert found["nobiru_inter_token_seconds_count",] == 3
    assert found["nobiru_time_per_output_token_seconds_count",] == 1
    assert found["nobiru_generated_tokens_total",] == 4
    assert found["nobiru_request_success_total", "finish_reason=length"] == 1
    assert found["nobiru_request_success_total", "finish_reason=stop"] == 1
    assert (found["nobiru_running_sequences",], found["nobiru_waiting_sequences",]) == (2, 1)
    assert found["nobiru_kv_cache_usage_ratio",] == 0.25
    assert found["nobiru_preemptions_total",] == 2
    assert found["nobiru_prefix_cache_hit_tokens_total",] == 32
    assert found["nobiru_prefix_cache_query_tokens_total",] == 80


def test_two_servers_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.rank_restarted()
    assert samples(second)["nobiru_rank_restarts_total",] == 0


@pytest.fixture
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger("nobiru")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.usefixtures("restored_logger")
def test_json_logs_have_fields_and_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(log_format="json", level="info")
    log = logging.getLogger("nobiru.anything")
    log.debug("not shown")
    log.info("hello %s", "you", extra={"fields": {"status": 200}})
    try:
        raise ValueError("a reason")
    except ValueError:
        log.exception("failed")
    hello, failed = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (hello["message"], hello["status"], hello["level"]) == ("hello you", 200, "info")
    assert "ValueError: a reason" in failed["exception"]


@pytest.mark.usefixtures("restored_logger")
def test_text_logs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(log_format="text", level="warning")
    logging.getLogger("nobiru.anything").info("quiet")
    logging.getLogger("nobiru.anything").warning("loud")
    [line] = capsys.readouterr().err.splitlines()
    assert "WARNING nobiru.anything: loud" in line


def test_an_unknown_level_is_explained() -> None:
    with pytest.raises(ConfigError, match="choose from debug, info"):
        configure_logging(log_format="text", level="loud")
