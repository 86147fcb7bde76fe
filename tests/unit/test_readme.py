"""What the documentation shows works: its commands, its code, its options, its links."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from nobiru.cli import options
from nobiru.cli.app import make_app
from nobiru.config import EngineConfig, ServerConfig
from nobiru.metrics import AutoscalerMetrics, Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, Any] = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str, pages: list[Path] = PAGES) -> list[Block]:
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.name, line, match[1], match[2]))
    return [block for block in found if block.language == language]


def shell_lines(block: Block) -> Iterator[str]:
    yield from block.text.replace("\\\n", " ").splitlines()


def nobiru_commands() -> list[tuple[str, list[str]]]:
    """Every `nobiru …` in a shell block, as words."""
    found = []
    for block in blocks("bash"):
        for line in shell_lines(block):
            words = shlex.split(line.rpartition("| ")[2], comments=True)
            if words and words[0] == "nobiru":
                found.append((f"{block}", words[1:]))
    return found


@pytest.mark.parametrize(("where", "words"), nobiru_commands(), ids=lambda value: str(value)[:40])
def test_commands_parse(where: str, words: list[str]) -> None:
    command: Any = COMMANDS[words.pop(0)]
    while commands := getattr(command, "commands", None):
        command = commands[words.pop(0)]
    command.make_context("nobiru", words)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_code_compiles(block: Block) -> None:
    ast.parse(block.text, block.page)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    assert json.loads(block.text)


def test_scripts_exist_and_can_be_run() -> None:
    named = {word for block in blocks("bash") for word in re.findall(r"(?:scripts|\.ci)/\w+", block.text)}
    assert {"scripts/quickstart", "scripts/test", "scripts/check"} <= named
    for name in named:
        assert os.access(ROOT / name, os.X_OK), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_the_table_of_options_is_complete_and_right() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert {name.replace("-", "_") for name in rows} == {option.name for option in options.SERVE_OPTIONS} - {"model"}
    for option in options.SERVE_OPTIONS:
        if option.name != "model":
            shown = rows[option.name.replace("_", "-")].strip("` ")
            config: Any = EngineConfig(model="m") if option.config is EngineConfig else ServerConfig()
            default = getattr(config, option.field)
            if default not in (None, ()):
                switch = {"False": "off", "True": "on"}
                assert shown == switch.get(f"{default}", f"{default}".removesuffix(".0")), option.name


def test_variables_of_the_kubernetes_example_are_options() -> None:
    known = {option.for_environment().variable for option in options.SERVE_OPTIONS}
    (block,) = blocks("yaml", [ROOT / "docs" / "operations.md"])
    (container,) = yaml.safe_load(block.text)["spec"]["template"]["spec"]["containers"]
    named = {each["name"] for each in container["env"]}
    assert {name for name in named if name.startswith("NOBIRU_")} <= known
    assert container["command"][:2] == ["nobiru", "serve"]
    COMMANDS["serve"].make_context("serve", container["command"][2:])


def test_every_metric_is_described() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(nobiru_\w+?)(?:_total)?(?:\{[^`]*\})?`", page))
    metrics = Metrics()
    AutoscalerMetrics(metrics.registry)
    body, _ = metrics.render()
    types = re.findall(r"^# TYPE (nobiru_\w+)", body.decode(), re.MULTILINE)
    exported = {name.removesuffix("_total") for name in types}
    exported = {name for name in exported if not name.endswith("_created")}
    assert described == exported
