"""The environment gives options, and never a crash."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobiru import env
from nobiru.config import EngineConfig, ServerConfig
from nobiru.env import Option

OPTIONS = (
    Option(name="port", type=int, check=lambda value: ServerConfig(port=value)),
    Option(name="max_num_seqs", type=int, check=lambda value: EngineConfig(model="m", max_num_seqs=value)),
    Option(name="shutdown_timeout", type=float),
    Option(name="auto_truncate", type=bool),
    Option(name="dtype", type=Literal["auto", "float32"]),
    Option(name="served_model_name", type=tuple[str, ...]),
    Option(name="api_key", type=tuple[str, ...], secret=True),
)
KUBERNETES = {
    "NOBIRU_PORT": "tcp://10.0.0.1:80",
    "NOBIRU_SERVICE_HOST": "10.0.0.1",
    "NOBIRU_SERVICE_PORT": "80",
    "NOBIRU_SERVICE_PORT_HTTP": "80",
    "NOBIRU_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "NOBIRU_PORT_8000_TCP_ADDR": "10.0.0.1",
    "NOBIRU_PORT_8000_TCP_PORT": "8000",
    "NOBIRU_PORT_8000_TCP_PROTO": "tcp",
    "NOBIRU_EMBED_V2_PORT": "udp://10.0.0.1:53",
    "NOBIRU_EMBED_V2_SERVICE_HOST": "10.0.0.1",
}


def read(environ: dict[str, str], **more: object) -> env.EnvironmentOptions:
    return env.read_options(OPTIONS, environ=environ, **more)  # type: ignore[arg-type]


def test_every_type_is_read() -> None:
    found = read(
        {
            "NOBIRU_PORT": " 9000 ",
            "NOBIRU_SHUTDOWN_TIMEOUT": "2.5",
            "NOBIRU_AUTO_TRUNCATE": "Yes",
            "NOBIRU_DTYPE": "float32",
            "NOBIRU_SERVED_MODEL_NAME": "a, b,",
            "NOBIRU_API_KEY": "k1,k2",
            "PATH": "/bin",
        }
    )
    assert found.values == {
        "port": 9000,
        "shutdown_timeout": 2.5,
        "auto_truncate": True,
        "dtype": "float32",
        "served_model_name": ("a", "b"),
        "api_key": ("k1", "k2"),
    }
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("NOBIRU_PORT", "eighty", "an integer"),
        ("NOBIRU_PORT", "8000.5", "an integer"),
        ("NOBIRU_PORT", "70000", "65535"),
        ("NOBIRU_MAX_NUM_SEQS", "0", "at least 1"),
        ("NOBIRU_SHUTDOWN_TIMEOUT", "soon", "a number"),
        ("NOBIRU_AUTO_TRUNCATE", "maybe", "true"),
        ("NOBIRU_DTYPE", "int8", "auto, float32"),
        ("NOBIRU_SERVED_MODEL_NAME", " , ", "commas"),
    ],
)
def test_an_unusable_value_is_explained_and_ignored(variable: str, text: str, reason: str) -> None:
    found = read({variable: text})
    assert found.values == {}
    (warning,) = found.warnings
    assert variable in warning and "ignored" in warning and reason in warning and text.strip() in warning


def test_an_unknown_variable_is_explained_with_near_names() -> None:
    found = read({"NOBIRU_MAX_NUM_SEQ": "3", "NOBIRU_ZZZ": "1"})
    assert found.values == {}
    assert "did you mean NOBIRU_MAX_NUM_SEQS?" in found.warnings[0]
    assert "NOBIRU_ZZZ ignored" in found.warnings[1] and "did you mean" not in found.warnings[1]


def test_kubernetes_service_links_are_one_explanation() -> None:
    found = read(KUBERNETES)
    assert found.values == {}
    (warning,) = found.warnings
    assert "Kubernetes" in warning and "enableServiceLinks" in warning
    assert all(name in warning for name in KUBERNETES)


def test_options_of_other_commands_and_fault_injection_are_known() -> None:
    found = read({"NOBIRU_PROMPT_NAME": "query", "NOBIRU_FAULT_INJECTION": "exit"}, other_names=("prompt_name",))
    assert found == env.EnvironmentOptions(values={}, warnings=())
    (warning,) = read({"NOBIRU_FAULT_INJECTIO": "x"}).warnings
    assert "did you mean" not in warning, "a hook for tests is suggested to nobody"


def test_empty_means_absent_but_an_empty_secret_is_mentioned() -> None:
    found = read({"NOBIRU_PORT": "", "NOBIRU_API_KEY": ""})
    assert found.values == {}
    (warning,) = found.warnings
    assert "NOBIRU_API_KEY is empty" in warning


def test_a_secret_appears_in_no_warning() -> None:
    def refuse(value: object) -> object:
        raise env.ConfigError("too weak")

    option = Option(name="api_key", type=tuple[str, ...], check=refuse, secret=True)
    found = env.read_options([option], environ={"NOBIRU_API_KEY": "hunter2"})
    (warning,) = found.warnings
    assert "too weak" in warning and "hunter2" not in warning


@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from([option.variable for option in OPTIONS]), st.text().map(lambda tail: "NOBIRU_" + tail)
        ),
        st.text(),
        max_size=8,
    )
)
def test_nothing_in_the_environment_raises(environ: dict[str, str]) -> None:
    found = read(environ)
    assert set(found.values) <= {option.name for option in OPTIONS}
    mentioned = " ".join(found.warnings)
    used = {"NOBIRU_" + name.upper() for name in found.values}
    for variable, text in environ.items():
        assert variable in used or variable in mentioned or not text.strip() or variable == env.FAULT_INJECTION


def test_explicit_beats_environment_beats_default() -> None:
    assert env.resolve({"port": 1, "host": None}, {"port": 2, "host": "h", "dtype": "auto"}) == {
        "port": 1,
        "host": "h",
        "dtype": "auto",
    }
    assert env.resolve({"auto_truncate": False}, {"auto_truncate": True}) == {"auto_truncate": False}


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("ON", True), ("true", True), ("0", False), ("", False)])
@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_hub_offline(monkeypatch: pytest.MonkeyPatch, name: str, value: str, offline: bool) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert env.hub_offline() is False
    monkeypatch.setenv(name, value)
    assert env.hub_offline() is offline


def test_fault_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.FAULT_INJECTION, raising=False)
    assert env.fault_injection() is None
    monkeypatch.setenv(env.FAULT_INJECTION, "exit-at-step=3")
    assert env.fault_injection() == "exit-at-step=3"


def test_nothing_else_reads_the_environment() -> None:
    package = Path(env.__file__).parent
    readers = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_access = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
            if is_access and node.attr in {"environ", "environb", "getenv", "putenv"}:
                readers.append(path.relative_to(package).as_posix())
    assert set(readers) == {"env.py"}
