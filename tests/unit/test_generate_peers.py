"""`benchmarks/generate_peers.py`: its arithmetic, and a whole run of transformers against itself."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import generate_peers
from benchmarks.generate_peers import EngineResult, Prompts, agreement, judge, make_repeats, ratios_to_best_other

ROOT = Path(__file__).resolve().parents[2]


def result(batch: float, *, outputs: list[list[int]] | None = None) -> EngineResult:
    rates = {"batch": [batch, batch, 10 * batch], "prefill": [2 * batch], "single": [1.0], "decode": []}
    return EngineResult(rates=rates, outputs=outputs or [[1, 2, 3]], startup_s=[1.0])


def test_no_two_prompts_are_the_same() -> None:
    prompts = Prompts(list(range(5000)), mean=100, spread=0.2, seed=0)
    repeats = make_repeats(prompts, num_prompts=32, num_repeats=5)
    taken = [
        prompt
        for repeat in repeats
        for prompt in [*repeat["batch"], *repeat["prefill"], repeat["single"], repeat["first"]]
    ]
    assert len({prompt[0] for prompt in taken}) == len(taken) == 5 * 66, "so no prefix cache serves one"
    assert all(prompt == list(range(prompt[0], prompt[0] + len(prompt))) for prompt in taken), "runs of the source"
    lengths = [len(prompt) for repeat in repeats for prompt in repeat["batch"]]
    assert 80 <= min(lengths) < 90 and 110 < max(lengths) <= 120
    with pytest.raises(ValueError, match="too few"):
        prompts.take(5000)


def test_prompts_depend_on_the_seed_alone() -> None:
    first, again, other = (Prompts(list(range(500)), mean=10, spread=0.0, seed=seed).take(5) for seed in (1, 1, 2))
    assert first == again != other
    assert {len(prompt) for prompt in first} == {10}


def test_ratios_are_of_medians_to_the_best_of_another_kind() -> None:
    results = {"nobiru": result(20), "vllm": result(10), "hf": result(5), "vllm:eager": result(40)}
    ratios = ratios_to_best_other(results)
    assert ratios["nobiru"] == {"batch": 0.5, "prefill": 0.5, "single": 1.0}, "no decode, since none was measured"
    assert ratios["vllm"]["batch"] == 0.5, "another label of vllm is no other engine"
    assert ratios_to_best_other({"nobiru": result(1)}) == {"nobiru": {}}


def test_agreement() -> None:
    left, right = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 0, 8]]
    assert agreement(left, right) == {"same_texts": 0.5, "common_prefix": 0.75}


@pytest.mark.parametrize(("ratio", "held"), [(0.5, True), (0.9, False)])
def test_judge(ratio: float, held: bool) -> None:
    args = argparse.Namespace(output_tokens=3, min_ratio=ratio, subject="nobiru")
    checks = judge(args, {"nobiru": result(20), "vllm": result(40)}, [])
    assert [value for name, value in checks.items() if "batch" in name] == [held]
    assert checks["nobiru: 3 tokens for every prompt"]


def test_judge_sees_short_outputs_missing_engines_and_failed_starts() -> None:
    args = argparse.Namespace(output_tokens=3, min_ratio=0.1, subject="nobiru")
    checks = judge(args, {"vllm": result(40, outputs=[[1, 2]])}, ["nobiru: start 1 ran"])
    assert not any(checks.values()) and len(checks) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "tgi=/bin/sh"], "with a name of nobiru, vllm, hf"),
        (["--engine", "hf"], "NAME=PYTHON"),
        (["--engine", "hf=/no/python"], "no interpreter"),
        (["--engine", "hf=/bin/sh", "--engine", "hf=/bin/sh"], "given twice"),
        (["--engine", "hf=/bin/sh", "--option", "vllm.a=1"], "ENGINE.KEY=VALUE"),
        (["--engine", "hf=/bin/sh", "--rounds", "0"], "--rounds must be at least 1"),
        (["--engine", "hf=/bin/sh", "--min-ratio", "1"], "--min-ratio needs"),
    ],
)
def test_wrong_command_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(sys, "argv", ["generate_peers", "--model", str(tmp_path), *arguments])
    assert generate_peers.main() == 2
    assert message in capsys.readouterr().err


def make_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"[UNK]": 0} | {chr(code): code - 31 for code in range(33, 127)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def fake_start(tokens: int, seconds: float) -> dict[str, object]:
    timing = {"batch_s": seconds, "prefill_s": seconds, "single_s": seconds, "first_s": seconds / 2}
    repeat = {"outputs": [[1] * tokens] * 3, **timing}
    return {"repeats": [repeat, repeat], "startup_s": 1.0, "peak_rss_bytes": 2**30, "cores_used": 1.5}


@pytest.mark.parametrize(("ratio", "code"), [("1.9", 0), ("2.1", 1)])
def test_engines_take_turns_and_the_ratio_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ratio: str, code: int
) -> None:
    make_model(tmp_path)
    starts: list[tuple[str, dict[str, object]]] = []

    def run_engine(name: str, python: str, job: dict[str, object], **more: object) -> dict[str, object]:
        starts.append((name, job))
        return fake_start(5, 1.0 if name == "nobiru" else 2.0)

    monkeypatch.setattr(generate_peers, "run_engine", run_engine)
    command = ["generate_peers", "--model", str(tmp_path), "--engine", "nobiru=/bin/sh", "--engine", "vllm=/bin/sh"]
    command += ["--prompts", "2", "--output-tokens", "5", "--repeats", "2", "--min-ratio", ratio]
    monkeypatch.setattr(sys, "argv", [*command, "--option", "vllm.enforce_eager=true"])
    assert generate_peers.main() == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [name for name, _ in starts] == ["nobiru", "vllm", "nobiru", "vllm"]
    assert starts[0][1]["repeats"] == starts[1][1]["repeats"] == starts[2][1]["repeats"], "the same for all"
    assert starts[1][1]["options"] == {"enforce_eager": True} and starts[0][1]["options"] == {}
    assert found["engines"]["nobiru"]["rates"]["batch"] == [10.0] * 4
    assert found["engines"]["vllm"]["medians"]["single"] == 2.5
    assert found["engines"]["vllm"]["medians"]["decode"] == 4.0, "four tokens in the second after the first"
    assert found["ratios_to_best_other"]["nobiru"]["batch"] == 2.0
    assert found["ok"] == (code == 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run(tmp_path: Path) -> None:
    """Two labels of one engine, for real."""
    make_model(tmp_path)
    shape = ["--prompts", "3", "--prompt-tokens", "12", "--output-tokens", "4", "--repeats", "2"]
    shape += ["--dtype", "float32", "--rounds", "1"]
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "generate_peers.py"), "--model", str(tmp_path), *shape),
        *("--engine", f"hf={sys.executable}", "--engine", f"hf:eager={sys.executable}"),
        *("--option", "hf:eager.attn_implementation=eager", "--work-dir", str(tmp_path / "logs")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "COLUMNS": "140"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["checks"] == {
        "hf: 4 tokens for every prompt": True,
        "hf:eager: 4 tokens for every prompt": True,
    }
    assert found["agreement"] == {"hf and hf:eager": {"same_texts": 1.0, "common_prefix": 1.0}}
    for engine in found["engines"].values():
        assert [len(engine["rates"][name]) for name in ("batch", "prefill", "single")] == [2, 2, 2]
        assert len(engine["startup_s"]) == 1 and min(engine["peak_rss_mib"]) > 50


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    make_model(tmp_path)
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "generate_peers.py"), "--model", str(tmp_path), "--rounds", "1"),
        *("--engine", f"hf={sys.executable}", "--option", "hf.attn_implementation=none", "--prompts", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["checks"] == {"hf: start 1 ran": False}
    assert "exit code 1" in done.stderr and "none" in done.stderr, "the end of its log"
