"""What the server measures about itself, in Prometheus' terms.

Owns names, units and buckets of every metric, in a registry of its own. Knows nothing of HTTP or of the engine: each
calls the method that says what happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, math.inf),
)
TOKENS_BUCKETS = (*(2.0**n for n in range(4, 16)), math.inf)
SEQUENCES_BUCKETS = (*(2.0**n for n in range(11)), math.inf)


class EngineCounts(Protocol):
    """What an engine with a KV cache says of itself after a step; the last three count since the step before."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def kv_usage(self) -> float: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...


class Metrics:
    """One server's metrics. All methods are cheap: they are called once a request, a step or a token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("requests", "HTTP requests answered; 499: the client left", "route", "status")
        self._rejections = self._counter("rejections", "Requests refused, by the code of the error", "reason")
        self._rank_restarts = self._counter("rank_restarts", "Rank processes started again")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of executed steps")
        self._sequences = self._counter("sequences", "Sequences of executed steps")
        self._request_s = self._histogram("request_seconds", "End to end, as the server sees it", ("route",))
        self._tokenize_s = self._histogram("tokenize_seconds", "Waiting for and doing a request's tokenization")
        self._queue_s = self._histogram("queue_seconds", "From arrival to the first step")
        self._compute_s = self._histogram("compute_seconds", "One step on the device")
        self._batch_tokens = self._histogram("batch_tokens", "Tokens in a step", buckets=TOKENS_BUCKETS)
        self._batch_sequences = self._histogram("batch_sequences", "Sequences in a step", buckets=SEQUENCES_BUCKETS)
        self._queued_requests = self._gauge("queued_requests", "Requests accepted and not yet answered by the engine")
        self._queued_tokens = self._gauge("queued_tokens", "Their tokens that have not been computed")
        self._estimated_wait_s = self._gauge("estimated_wait_seconds", "Queued tokens by measured tokens per second")
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to a first token"
        )
        self._inter_token_s = self._histogram("inter_token_seconds", "Between two arrivals of tokens of one text")
        self._per_token_s = self._histogram("time_per_output_token_seconds", "Mean of a text, without its first token")
        self._generated_tokens = self._counter("generated_tokens", "Tokens that texts got")
        self._finished = self._counter("request_success", "Texts that ended, by why they did", "finish_reason")
        self._preemptions = self._counter("preemptions", "Sequences that gave their KV blocks to others for a while")
        self._cache_hits = self._counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache")
        self._cache_queries = self._counter("prefix_cache_query_tokens", "Prompt tokens looked for in the prefix cache")
        self._kv_usage = self._gauge("kv_cache_usage_ratio", "Share of the KV blocks that sequences hold")
        self._running = self._gauge("running_sequences", "Sequences that hold KV blocks")
        self._waiting = self._gauge("waiting_sequences", "Sequences that wait for their first or next step")
        self._expert_tokens = self._counter("expert_tokens", "Tokens routed to an expert, of all MoE layers", "expert")
        self._expert_rank_tokens = self._counter(
            "expert_rank_tokens", "Tokens that a rank's experts computed, by its position", "position"
        )
        self._balancedness = self._gauge("expert_balancedness", "Mean over largest load of a rank, mean of MoE layers")
        self._expert_bytes_moved = self._counter("expert_bytes_moved", "Bytes of experts copied between ranks")
        self._expert_rebalances = self._counter("expert_rebalances", "Rebalances of experts")
        self._serving_ranks = self._gauge("serving_ranks", "Ranks that take requests")
        self._bound_requests: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """An answer was sent; `route` is a path as registered, never what a client wrote."""
        bound = self._bound_requests.get((route, status))
        if bound is None:
            bound = self._requests.labels(route=route, status=str(status)), self._request_s.labels(route=route)
            self._bound_requests[route, status] = bound
        bound[0].inc()
        bound[1].observe(seconds)

    def observe_tokenize(self, seconds: float) -> None:
        """One request's texts became token ids."""
        self._tokenize_s.observe(seconds)

    def observe_queue(self, seconds: float) -> None:
        """A sequence waited this long for its step."""
        self._queue_s.observe(seconds)

    def observe_step(self, num_tokens: int, num_sequences: int, compute_s: float) -> None:
        """A rank executed a step."""
        self._prompt_tokens.inc(num_tokens)
        self._sequences.inc(num_sequences)
        self._batch_tokens.observe(num_tokens)
        self._batch_sequences.observe(num_sequences)
        self._compute_s.observe(compute_s)

    def observe_engine(self, state: EngineCounts) -> None:
        """A rank with a KV cache, as it is after a step, and what it did since the step before."""
        self._running.set(state.num_running)
        self._waiting.set(state.num_waiting)
        self._kv_usage.set(state.kv_usage)
        self._preemptions.inc(state.num_preemptions)
        self._cache_hits.inc(state.num_cached_tokens)
        self._cache_queries.inc(state.num_prompt_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """A text got its first token, this long after its request had come."""
        self._first_token_s.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        """A text got a further token, or several at once, this long after the last one."""
        self._inter_token_s.observe(seconds)

    def count_generated_tokens(self, num_tokens: int) -> None:
        """A text got tokens."""
        self._generated_tokens.inc(num_tokens)

    def observe_generation(self, *, finish_reason: str, seconds_per_token: float | None) -> None:
        """A text ended; `seconds_per_token` is the mean behind the first token, None if there was no other."""
        self._finished.labels(finish_reason=finish_reason).inc()
        if seconds_per_token is not None:
            self._per_token_s.observe(seconds_per_token)

    def observe_experts(self, *, by_expert: Mapping[int, int], by_rank: Mapping[int, int], balance: float) -> None:
        """Tokens that went to experts, summed over layers, and to ranks; `balance` is mean over largest rank load."""
        for expert, num_tokens in by_expert.items():
            self._expert_tokens.labels(expert=str(expert)).inc(num_tokens)
        for position, num_tokens in by_rank.items():
            self._expert_rank_tokens.labels(position=str(position)).inc(num_tokens)
        self._balancedness.set(balance)

    def experts_moved(self, *, num_bytes: int, num_rebalances: int) -> None:
        """Experts were copied to other ranks, or a plan to rebalance has begun to serve."""
        self._expert_bytes_moved.inc(num_bytes)
        self._expert_rebalances.inc(num_rebalances)

    def rejected(self, reason: str) -> None:
        """A request was refused."""
        self._rejections.labels(reason=reason).inc()

    def rank_restarted(self) -> None:
        """A rank process was started again."""
        self._rank_restarts.inc()

    def set_queue(self, *, num_requests: int, num_tokens: int, estimated_wait_s: float, num_ranks: int) -> None:
        """The queue as it is now, and the ranks that serve."""
        self._queued_requests.set(num_requests)
        self._queued_tokens.set(num_tokens)
        self._estimated_wait_s.set(estimated_wait_s)
        self._serving_ranks.set(num_ranks)

    def render(self) -> tuple[bytes, str]:
        """All metrics as text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"nobiru_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"nobiru_{name}", help_text, registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = SECONDS_BUCKETS
    ) -> Histogram:
        return Histogram(f"nobiru_{name}", help_text, labels, registry=self.registry, buckets=buckets)


class AutoscalerMetrics:
    """Those of a server with an autoscaler, beside its others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "nobiru_autoscaler_decisions",
            "Changes of the ranks that the autoscaler decided, in a dry run too",
            ("action",),
            registry=registry,
        )
        self._undone = Counter("nobiru_autoscaler_undone", "Those that were refused or undone", registry=registry)
        self._load = Gauge(
            "nobiru_autoscaler_load_ratio", "Share of what the ranks can do that is in use", registry=registry
        )
        for action in ("grow", "shrink"):
            self._decisions.labels(action=action)

    def decided(self, action: str) -> None:
        """To grow or to shrink."""
        self._decisions.labels(action=action).inc()

    def undone(self) -> None:
        """A decision came to nothing."""
        self._undone.inc()

    def set_load(self, load: float) -> None:
        """As it is measured now."""
        self._load.set(load)
