"""What `nobiru bench` sends and when, and how it reads a stream."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobiru.bench.sse import EventDecoder
from nobiru.bench.workload import Prompt, due_times, random_prompts, read_prompts
from nobiru.errors import ConfigError


def test_random_prompts_have_the_lengths_asked_for() -> None:
    prompts = random_prompts(200, input_len=50, output_len=20, range_ratio=0.2)
    words = [len(prompt.text().split()) for prompt in prompts]
    outputs = [prompt.output_len for prompt in prompts]
    assert min(words) == 40 and max(words) == 60 and abs(sum(words) / 200 - 50) < 2
    assert min(outputs) == 16 and max(outputs) == 24
    assert {len(each.text().split()) for each in random_prompts(5, input_len=7, output_len=1)} == {7}


def test_random_prompts_depend_on_the_seed_alone() -> None:
    first, again, other = (random_prompts(3, input_len=30, output_len=5, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert len({prompt.text() for prompt in first}) == 3


def test_a_prefix_is_shared_and_comes_on_top() -> None:
    prompts = random_prompts(4, input_len=5, output_len=1, prefix_len=20)
    assert len({tuple(prompt.text().split()[:20]) for prompt in prompts}) == 1
    assert {len(prompt.text().split()) for prompt in prompts} == {25}
    assert len({prompt.text() for prompt in prompts}) == 4


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one"\n\n{"prompt": "two", "output_len": 7}\n{"text": "three"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 3}\n'
    )
    prompts = read_prompts(path, 6, output_len=9)
    assert [prompt.text() for prompt in prompts] == ["one", "two", "three", "s\nu", "one", "two"]
    assert [prompt.output_len for prompt in prompts] == [9, 7, 9, 3, 9, 7]
    assert prompts[0].messages() == [{"role": "user", "content": "one"}]
    assert prompts[3].messages()[0]["role"] == "system"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompt"),
        ('"fine"\n{"prompt": ', "x.jsonl:2 is not JSON"),
        ('{"question": "?"}', "x.jsonl:1 must be a text or an object"),
        ('{"messages": []}', "must be a text or an object"),
        ("5", "must be a text or an object"),
        ('{"prompt": "p", "output_len": 0}', "no number of tokens"),
        ('{"prompt": "p", "output_len": true}', "no number of tokens"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(path, 5, output_len=1)
    assert caught.value.param == "dataset_path"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "nothing", 1, output_len=1)


def test_due_times() -> None:
    assert due_times(3, math.inf) == [0.0, 0.0, 0.0]
    times = due_times(4000, 50.0, seed=3)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.1), "the rate"
    assert deviation == pytest.approx(mean, rel=0.1), "exponential gaps deviate by their mean"
    assert times == due_times(4000, 50.0, seed=3) != due_times(4000, 50.0, seed=4)


def test_a_prompt_is_sent_as_what_the_endpoint_wants() -> None:
    assert Prompt(content="x", output_len=1).messages() == [{"role": "user", "content": "x"}]


STREAM = (
    ': comment\r\ndata: {"a": 1}\r\n\r\n'  # CRLF, with a comment before
    "event: message\ndata: two\ndata: lines\n\n"
    "data:no blank\r\r"
    "retry: 5\n\n"  # no data: no event
    "data: ünïcode 日本\n\ndata: [DONE]\n\ndata: unfinished"
)
EVENTS = ['{"a": 1}', "two\nlines", "no blank", "ünïcode 日本", "[DONE]"]


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_were_cut(cuts: list[int]) -> None:
    data = STREAM.encode()
    edges = [0, *sorted(cuts), len(data)]
    decoder = EventDecoder()
    found = [event for start, end in itertools.pairwise(edges) for event in decoder.feed(data[start:end])]
    assert found == EVENTS


def test_an_event_comes_with_the_byte_that_completes_it() -> None:
    decoder = EventDecoder()
    assert list(decoder.feed(b"data: x\n")) == []
    assert list(decoder.feed(b"\n")) == ["x"]
