"""Keeps rooms small: a file over 500 lines, a function over 60, a class with more than 15 public methods fails.

An exception is a table row in `docs/size-exceptions.md`, ``| `path.py[::Name.method]` | reason |``, that is needed.

    python scripts/size_budget.py [ROOT]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("nobiru", "scripts", "benchmarks", "examples", "tests")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 15
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
EXCEPTIONS = "docs/size-exceptions.md"
_ROW = re.compile(r"\|\s*`(\S+\.py\S*)`\s*\|\s*(.*?)\s*\|\s*")


def excesses(path: str, source: str) -> Iterator[tuple[str, str]]:
    """What in one file is too large: `path[::Name]` and a sentence about it."""
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield path, f"{num_lines} lines, at most {MAX_FILE_LINES}"
    yield from _in_body(f"{path}::", ast.parse(source, path))


def _in_body(prefix: str, parent: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            num_public = sum(isinstance(child, FUNCTION) and not child.name.startswith("_") for child in node.body)
            if num_public > MAX_PUBLIC_METHODS:
                yield prefix + node.name, f"{num_public} public methods, at most {MAX_PUBLIC_METHODS}"
            yield from _in_body(f"{prefix}{node.name}.", node)
        elif isinstance(node, FUNCTION):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield prefix + node.name, f"{num_lines} lines, at most {MAX_FUNCTION_LINES}"
            yield from _in_body(f"{prefix}{node.name}.", node)
        else:
            yield from _in_body(prefix, node)


def read_exceptions(text: str) -> dict[str, str]:
    """Name → reason, from the rows of the table."""
    matches = [match for line in text.splitlines() if (match := _ROW.fullmatch(line))]
    return {match[1]: match[2] for match in matches}


def check(root: Path) -> list[str]:
    """All that is wrong under `root`, one line each."""
    listing = root / EXCEPTIONS
    exceptions = read_exceptions(listing.read_text(encoding="utf-8")) if listing.is_file() else {}
    problems = [f"{EXCEPTIONS}: {name} has no reason" for name, reason in exceptions.items() if not reason]
    used: set[str] = set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for name, what in excesses(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")):
                used.add(name)
                if name not in exceptions:
                    problems.append(f"{name}: {what} (split it, or give the reason in {EXCEPTIONS})")
    unused = [name for name in exceptions if name not in used]
    problems += [f"{EXCEPTIONS}: {name} is within its budget; remove the row" for name in unused]
    return problems


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    problems = check(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
