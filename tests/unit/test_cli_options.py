"""Every option exists on the command line and in the environment under the same name."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import typer.main

from nobiru.cli import options
from nobiru.cli.app import make_app
from nobiru.config import EngineConfig, ServerConfig
from nobiru.errors import ConfigError

COMMANDS: dict[str, Any] = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NOBIRU_")]:
        monkeypatch.delenv(name)


def parameters(command: str) -> dict[str, Any]:
    return {parameter.name: parameter for parameter in COMMANDS[command].params if parameter.name != "help"}


def test_serve_has_the_options_of_the_table() -> None:
    assert set(parameters("serve")) == {option.name for option in options.SERVE_OPTIONS}


def test_embed_has_the_options_of_the_tables() -> None:
    without = {"scheduling_policy"}  # one request, nothing to order
    expected = {option.name for option in (*options.ENGINE_OPTIONS, *options.EMBED_OPTIONS)}
    assert set(parameters("embed")) == (expected | {"input"}) - without


@pytest.mark.parametrize("command", ["serve", "embed"])
def test_flags_are_the_options_names(command: str) -> None:
    for name, parameter in parameters(command).items():
        if parameter.param_type_name == "option":
            assert "--" + name.replace("_", "-") in parameter.opts
            assert parameter.help
            assert parameter.envvar is None, "the environment is read by nobiru.env, which explains what it ignores"


def test_every_config_option_names_a_field() -> None:
    for option in options.SERVE_OPTIONS:
        assert option.field in option.config.__struct_fields__
        assert option.for_environment().type is not type(None)


def test_defaults_in_help_are_those_of_the_config() -> None:
    server = ServerConfig()
    for name, field in {"port": "port", "shutdown_timeout": "shutdown_timeout_s", "dtype": "dtype"}.items():
        default = getattr(EngineConfig(model="m") if name == "dtype" else server, field)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert f"Default: {shown}." in parameters("serve")[name].help


def test_explicit_options_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOBIRU_PORT", "9000")
    monkeypatch.setenv("NOBIRU_HOST", "0.0.0.0")
    monkeypatch.setenv("NOBIRU_API_KEY", "a,b")
    values, warnings = options.with_environment({"port": 1234, "host": None, "api_key": []}, options.SERVE_OPTIONS)
    assert warnings == ()
    fields = options.fields_of(ServerConfig, values)
    assert fields == {"port": 1234, "host": "0.0.0.0", "api_keys": ("a", "b")}
    assert ServerConfig(**fields).max_queued_tokens == 1_000_000


def test_options_of_the_other_command_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOBIRU_PROMPT_NAME", "query")
    monkeypatch.setenv("NOBIRU_BATCH_ROWS", "7")
    values, warnings = options.with_environment({}, options.SERVE_OPTIONS)
    assert "prompt_name" not in values
    assert warnings == ()


def test_values_out_of_range_in_the_environment_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOBIRU_MAX_NUM_SEQS", "0")
    monkeypatch.setenv("NOBIRU_LOG_LEVEL", "loud")
    monkeypatch.setenv("NOBIRU_SHUTDOWN_TIMEOUT", "-1")
    values, warnings = options.with_environment({}, options.SERVE_OPTIONS)
    assert values == {}
    assert [warning.split("=")[0] for warning in warnings] == [
        "NOBIRU_LOG_LEVEL",
        "NOBIRU_MAX_NUM_SEQS",
        "NOBIRU_SHUTDOWN_TIMEOUT",
    ]
    assert "debug, info" in warnings[0]


def test_fields_go_to_their_config() -> None:
    values = {"dtype": "float32", "served_model_name": ["a"], "port": None}
    assert options.fields_of(EngineConfig, values) == {"dtype": "float32"}
    assert options.fields_of(ServerConfig, values) == {"served_model_names": ("a",)}
    with pytest.raises(ConfigError, match="dtype"):
        EngineConfig(model="m", **options.fields_of(EngineConfig, {"dtype": "int3"}))


def test_warnings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    options.say("so and so")
    options.say("so and so", as_json=True)
    plain, as_json = capsys.readouterr().err.splitlines()
    assert plain == "nobiru: so and so"
    assert json.loads(as_json) == {"level": "warning", "message": "so and so"}
