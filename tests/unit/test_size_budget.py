"""The size budgets find what is too large, and exceptions need a reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def size_budget() -> ModuleType:
    spec = importlib.util.spec_from_file_location("size_budget", ROOT / "scripts" / "size_budget.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, source: str, exceptions: str = "") -> Path:
    (root / "nobiru").mkdir()
    (root / "docs").mkdir()
    (root / "nobiru" / "a.py").write_text(source)
    (root / "docs" / "size-exceptions.md").write_text(exceptions)
    return root


def function(num_lines: int, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    pass\n" * (num_lines - 1)


def test_at_the_limits_all_is_well(size_budget: ModuleType, tmp_path: Path) -> None:
    methods = "class C:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(15)) + "    def _private(self): ...\n"
    source = function(60) + methods
    source += "#\n" * (500 - source.count("\n"))
    assert size_budget.check(write(tmp_path, source)) == []


@pytest.mark.parametrize(
    ("source", "name", "what"),
    [
        ("#\n" * 501, "nobiru/a.py", "501 lines"),
        (function(61), "nobiru/a.py::f", "61 lines"),
        ("class C:\n" + function(61, "    "), "nobiru/a.py::C.f", "61 lines"),
        ("if True:\n" + function(61, "    "), "nobiru/a.py::f", "61 lines"),
        ("class C:\n" + "".join(f"    async def m{n}(self): ...\n" for n in range(16)), "nobiru/a.py::C", "16 public"),
    ],
)
def test_one_more_is_too_much(size_budget: ModuleType, tmp_path: Path, source: str, name: str, what: str) -> None:
    root = write(tmp_path, source)
    (problem,) = size_budget.check(root)
    assert problem.startswith(f"{name}: {what}")
    listing = root / "docs" / "size-exceptions.md"
    listing.write_text(f"| what | reason |\n|---|---|\n| `{name}` | it is one table |\n")
    assert size_budget.check(root) == []
    listing.write_text(f"| `{name}` | |\n")
    assert size_budget.check(root) == [f"docs/size-exceptions.md: {name} has no reason"]


def test_an_exception_that_is_not_needed_fails(size_budget: ModuleType, tmp_path: Path) -> None:
    (problem,) = size_budget.check(write(tmp_path, "", "| `nobiru/a.py::f` | once it was long |\n"))
    assert "remove the row" in problem
