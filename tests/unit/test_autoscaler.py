"""What carries the policy's decisions out: requests, what is told of them, refusals, shutting down."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nobiru.config import AutoscaleConfig, EngineConfig, ServerConfig
from nobiru.elastic.autoscale import Usage
from nobiru.errors import ConfigError, InvalidRequestError
from nobiru.metrics import AutoscalerMetrics
from nobiru.serving import autoscaler as module
from nobiru.serving.admission import Admission
from nobiru.serving.autoscaler import Autoscaler

CONFIG = AutoscaleConfig(min_size=1, max_size=4, up_after_s=1.0, up_cooldown_s=5.0)


class Ranks:
    """An engine whose queue is as long as it is told to be, and whose operations end when they are told to."""

    def __init__(self) -> None:
        self.queued_tokens = 0
        self.tokens_per_s = 100.0
        self.size = 1
        self.phase = "done"
        self.error: str | None = None
        self.refusal: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.operations = SimpleNamespace(request=self.request, document=self.document)

    def usage(self) -> Usage:
        is_changing = self.phase not in ("done", "rolled_back")
        return Usage(size=self.size, is_changing=is_changing, num_served_tokens=0, compute_s=0.0, occupancy=0.0)

    def request(self, **asked: Any) -> dict[str, Any]:
        if self.refusal is not None:
            raise InvalidRequestError(self.refusal)
        self.asked.append(asked)
        self.phase = "preparing"
        return self.document("op-1")

    def document(self, operation_id: str) -> dict[str, Any]:
        return {"operation_id": operation_id, "phase": self.phase, "error": self.error}


class Scene:
    def __init__(self, config: AutoscaleConfig = CONFIG) -> None:
        self.ranks: Any = Ranks()
        self.now_s = 1000.0
        self.registry = CollectorRegistry()
        self.admission = Admission(self.ranks, max_queued_tokens=10**9)
        self.autoscaler = Autoscaler(
            config,
            self.ranks,
            self.admission,
            AutoscalerMetrics(self.registry),
            drain_timeout_s=7.0,
            clock=lambda: self.now_s,
        )

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.autoscaler.look()

    def last(self) -> Any:
        return self.autoscaler.status()["last_decision"]


def test_a_decision_becomes_an_operation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.ranks.queued_tokens = 350
    scene.run(6)
    assert scene.ranks.asked == [{"size": 2, "drain_timeout_s": 7.0, "origin": "autoscaler"}]
    assert (scene.last()["phase"], scene.last()["operation_id"]) == ("preparing", "op-1")
    assert scene.last()["numbers"]["estimated_wait_s"] == 3.5
    assert "grow to 2 ranks from 1: the wait, 3.50 s, is above target_wait_s = 2" in caplog.text
    scene.run(60)
    assert len(scene.ranks.asked) == 1, "never while another runs"
    scene.ranks.size, scene.ranks.phase = 2, "done"
    scene.run(1)
    assert scene.last()["phase"] == "done"
    status = scene.autoscaler.status()
    assert (status["min"], status["max"], status["target_wait_s"], status["dry_run"]) == (1, 4, 2.0, False)
    assert status["now"]["action"] == "hold"
    assert status["not_before"]["shrink"] - status["not_before"]["grow"] == pytest.approx(55, abs=0.1)
    assert scene.registry.get_sample_value("nobiru_autoscaler_decisions_total", {"action": "grow"}) == 1


def test_what_is_refused_or_undone_is_told_and_backs_off(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.ranks.queued_tokens = 350
    scene.ranks.refusal = "there is no memory for 2 ranks"
    scene.run(7)
    assert scene.last()["error"] == "there is no memory for 2 ranks"
    assert scene.autoscaler.status()["num_undone"] == 1
    assert "was refused: there is no memory for 2 ranks" in caplog.text
    scene.ranks.refusal = None
    scene.run(8)
    assert scene.ranks.asked == [], "twice the cool-down"
    scene.run(2)
    assert len(scene.ranks.asked) == 1
    scene.ranks.phase, scene.ranks.error = "rolled_back", "the new rank r1 died"
    scene.run(1)
    assert (scene.last()["phase"], scene.last()["error"]) == ("rolled_back", "the new rank r1 died")
    assert "was undone: the new rank r1 died" in caplog.text
    assert scene.autoscaler.status()["num_undone"] == 2
    assert scene.registry.get_sample_value("nobiru_autoscaler_undone_total") == 2


def test_a_dry_run_asks_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(AutoscaleConfig(min_size=1, max_size=4, dry_run=True))
    scene.ranks.queued_tokens = 350
    scene.run(13)
    assert scene.ranks.asked == []
    assert "would grow to 2 ranks from 1: the wait" in caplog.text
    assert scene.last()["operation_id"] is None


def test_a_server_that_shuts_down_stays_as_it_is() -> None:
    scene = Scene()
    scene.ranks.queued_tokens = 350
    scene.admission.draining = True
    scene.run(60)
    assert scene.ranks.asked == []


def test_it_looks_by_itself_and_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    scene = Scene()

    async def main() -> None:
        async with scene.autoscaler.running():
            async with asyncio.timeout(10):
                while scene.autoscaler.status()["now"] is None:
                    await asyncio.sleep(0.01)
                assert scene.autoscaler.status()["error"] is None
                scene.ranks.usage = None
                while scene.autoscaler.status()["error"] is None:
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert "TypeError" in scene.autoscaler.status()["error"]
    assert "the autoscaler has ended" in caplog.text


# ---- the option ------------------------------------------------------------------------------------------------------


def test_the_option_is_read() -> None:
    assert AutoscaleConfig.parse("min=1, max=8") == AutoscaleConfig(min_size=1, max_size=8)
    text = "max=3,min=2,target_wait_s=0.5,up_after_s=1,down_after_s=2,up_cooldown_s=3,down_cooldown_s=4.5,dry_run=true"
    assert ServerConfig(autoscale=text).autoscaling == AutoscaleConfig(
        min_size=2,
        max_size=3,
        target_wait_s=0.5,
        up_after_s=1.0,
        down_after_s=2.0,
        up_cooldown_s=3.0,
        down_cooldown_s=4.5,
        dry_run=True,
    )
    assert ServerConfig().autoscaling is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["min and max must be given"]),
        ("min=1", ["max must be given"]),
        ("min=3,max=2", ["min is 3", "at most max = 2"]),
        ("min=0,max=2", ["min is 0", "at least 1"]),
        ("min=one,max=2", ["min is 'one'", "an integer"]),
        ("min=1.5,max=2", ["min is '1.5'", "an integer"]),
        ("min=1,max=2,max=3", ["max is given twice"]),
        ("min=1,max=2,wait=3", ["'wait=3' is none of min=…", "target_wait_s=…"]),
        ("min=1,max", ["'max' is none of"]),
        ("min=1,max=2,target_wait_s=0", ["target_wait_s is 0", "above 0"]),
        ("min=1,max=2,target_wait_s=inf", ["target_wait_s is inf", "finite"]),
        ("min=1,max=2,target_wait_s=nan", ["target_wait_s is nan", "finite"]),
        ("min=1,max=2,up_cooldown_s=-1", ["up_cooldown_s is -1", "at least 0"]),
        ("min=1,max=2,down_after_s=soon", ["down_after_s is 'soon'", "a number"]),
        ("min=1,max=2,dry_run=perhaps", ["dry_run is 'perhaps'", "true or false"]),
    ],
)
def test_bad_values_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(autoscale=text)
    assert refused.value.message.startswith("autoscale: ")
    for word in words:
        assert word in refused.value.message


@pytest.mark.parametrize(
    ("text", "engine", "words"),
    [
        ("min=1,max=9", {}, ["max is 9", "max_data_parallel_size = 8"]),
        ("min=1,max=4", {"max_data_parallel_size": 3}, ["max is 4", "max_data_parallel_size = 3"]),
        ("min=1,max=4", {"min_survivable_size": 2}, ["min is 1", "min_survivable_size = 2"]),
        ("min=2,max=4", {}, ["data_parallel_size", "is 1", "min = 2"]),
        ("min=1,max=2", {"data_parallel_size": 3}, ["data_parallel_size", "is 3", "max = 2"]),
    ],
)
def test_sizes_that_the_ranks_cannot_have_are_refused(text: str, engine: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        AutoscaleConfig.parse(text).check_with(EngineConfig(model="-", **engine))  # type: ignore[arg-type]
    for word in words:
        assert word in refused.value.message


def test_sizes_that_they_can_have_are_taken() -> None:
    AutoscaleConfig.parse("min=1,max=8").check_with(EngineConfig(model="-"))
    AutoscaleConfig.parse("min=2,max=16").check_with(
        EngineConfig(model="-", data_parallel_size=2, max_data_parallel_size=16, min_survivable_size=2)
    )
