"""`nobiru serve` turns options into configs and mistakes into one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nobiru import __version__
from nobiru.cli.main import main
from nobiru.cli.serve import served_name, server_and_engine
from nobiru.config import EngineConfig, ServerConfig


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NOBIRU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, EngineConfig]]:
    """What the server would be started with."""
    calls: list[tuple[ServerConfig, EngineConfig]] = []
    module: Any = ModuleType("nobiru.serving.start")

    def start(server: ServerConfig, engine: EngineConfig) -> int:
        calls.append((server, engine))
        return 7

    module.start = start
    monkeypatch.setitem(sys.modules, "nobiru.serving.start", module)
    return calls


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_options_become_configs(tmp_path: Path, started: list[tuple[ServerConfig, EngineConfig]]) -> None:
    code = run(
        "serve",
        str(tmp_path),
        *("--port", "9001", "--host", "0.0.0.0", "--served-model-name", "a", "--served-model-name", "b"),
        *("--max-num-batched-tokens", "4096", "--max-num-seqs", "64", "--max-model-len", "128", "--dtype", "float32"),
        *("--api-key", "k1", "--api-key", "k2", "--scheduling-policy", "fcfs", "--num-threads", "3", "--device", "cpu"),
        *("--max-queued-tokens", "5", "--max-body-bytes", "6", "--auto-truncate", "--shutdown-timeout", "1.5"),
        *("--rank-timeout-s", "2.5", "--access-log", "--log-format", "json", "--log-level", "debug"),
    )
    assert code == 7, "the server's exit code is the command's"
    assert started == [
        (
            ServerConfig(
                host="0.0.0.0",
                port=9001,
                served_model_names=("a", "b"),
                api_keys=("k1", "k2"),
                max_body_bytes=6,
                auto_truncate=True,
                max_queued_tokens=5,
                shutdown_timeout_s=1.5,
                rank_timeout_s=2.5,
                access_log=True,
                log_format="json",
                log_level="debug",
            ),
            EngineConfig(
                model=str(tmp_path),
                dtype="float32",
                device="cpu",
                max_num_batched_tokens=4096,
                max_num_seqs=64,
                max_model_len=128,
                scheduling_policy="fcfs",
                num_threads=3,
            ),
        )
    ]


def test_defaults(tmp_path: Path, started: list[tuple[ServerConfig, EngineConfig]]) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    run("serve", str(model))
    assert started == [(ServerConfig(served_model_names=("my-model",)), EngineConfig(model=str(model)))]


def test_the_environment_gives_the_model(
    tmp_path: Path, started: list[tuple[ServerConfig, EngineConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOBIRU_MODEL", str(tmp_path))
    monkeypatch.setenv("NOBIRU_ACCESS_LOG", "1")
    run("serve", "--no-access-log")
    ((server, engine),) = started
    assert engine.model == str(tmp_path)
    assert server.access_log is False


def test_foreign_variables_are_explained_and_change_nothing(
    tmp_path: Path,
    started: list[tuple[ServerConfig, EngineConfig]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NOBIRU_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("NOBIRU_PRT", "1")
    run("serve", str(tmp_path))
    assert started[0][0].port == 8000
    errors = capsys.readouterr().err.splitlines()
    assert any("NOBIRU_PRT" in line and "NOBIRU_PORT" in line for line in errors)
    assert any("Kubernetes" in line for line in errors)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], ["port", "70000", "65535"]),
        (["--dtype", "int3"], ["dtype", "int3", "bfloat16"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "0", "at least 1"]),
        (["--log-format", "xml"], ["log_format", "xml", "json"]),
        (["--shutdown-timeout", "0"], ["shutdown_timeout", "above 0"]),
    ],
)
def test_a_bad_option_is_one_line(
    tmp_path: Path, started: list[object], capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert run("serve", str(tmp_path), *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nobiru: ")
    assert all(word in line for word in words)
    assert started == []


def test_a_missing_model_is_one_line(started: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "/no/such/folder/anywhere") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/no/such/folder/anywhere" in line
    assert started == []


def test_a_bad_option_is_told_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "/no/such/folder/anywhere", "--max-model-len", "0") == 2
    assert "max_model_len" in capsys.readouterr().err


def test_unknown_options_and_mistyped_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--max-num-seq", "3") == 2
    assert "max-num-seqs" in capsys.readouterr().err
    assert run("serve", "--port", "http") == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "embed"])
def test_help_teaches(capsys: pytest.CaptureFixture[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"nobiru {command} " in text
    assert "NOBIRU_MAX_NUM_SEQS" in text


def test_the_packaged_model_is_announced(
    started: list[tuple[ServerConfig, EngineConfig]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NOBIRU_MODEL", raising=False)
    monkeypatch.setattr("nobiru.cli.serve.resolve_model", lambda name: Path("/packaged/model"))
    run("serve")
    assert "no model is given: serving all-MiniLM-L6-v2" in capsys.readouterr().err
    ((server, engine),) = started
    assert server.served_model_names == ("all-MiniLM-L6-v2",)
    assert engine.model == "/packaged/model"


def test_served_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "news").mkdir()
    monkeypatch.chdir(tmp_path / "news")
    assert served_name(".", Path()) == "news"
    assert served_name("org/model", tmp_path / "snapshots" / "0a1b") == "org/model"
    assert served_name(None, tmp_path) == "all-MiniLM-L6-v2"
    server, engine = server_and_engine({"model": str(tmp_path / "news"), "served_model_name": ["x"]})
    assert (server.served_model_names, engine.model) == (("x",), str(tmp_path / "news"))


def test_version_is_printed_without_loading_anything() -> None:
    code = (
        "import sys; sys.argv = ['nobiru', '--version']\n"
        "from nobiru.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as ended:\n"
        "    loaded = {'torch', 'transformers', 'typer', 'fastapi', 'numpy'} & set(sys.modules)\n"
        "    print(ended.code, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"nobiru {__version__}", "0 set()"]


def test_the_command_line_imports_neither_torch_nor_transformers_nor_the_web() -> None:
    code = (
        "import sys, nobiru, nobiru.cli.app\n"
        "nobiru.cli.app.make_app()\n"
        "print({'torch', 'transformers', 'fastapi', 'uvicorn', 'zmq', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_server_does_not_wait_for_other_commands() -> None:
    code = (
        "import sys; sys.argv = ['nobiru', 'serve', '--help']\n"
        "from nobiru.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print({'numpy', 'nobiru.cli.embed', 'nobiru.cli.bench', 'nobiru.cli.scale'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "nobiru", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == f"nobiru {__version__}\n"
