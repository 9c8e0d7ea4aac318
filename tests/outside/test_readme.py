"""The parts of a user's own that the README shows are those that tests/pipelines/test_outside_parts.py runs."""

from __future__ import annotations

import ast
import re

import pytest

from tests.isolation import ROOT


def without_docstrings(source: str) -> dict[str, str]:
    """The classes and functions of a module, without their docstrings, by name."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return {part.name: ast.unparse(part) for part in tree.body if isinstance(part, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize(
    ("title", "file", "parts"), [("algorithm", "reinforce", 3), ("engine", "table", 2), ("environment", "asking", 1)]
)
def test_the_example_is_the_file(title: str, file: str, parts: int) -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.partition(f"## An {title} of your own")[2]
    shown = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert shown is not None
    written = without_docstrings((ROOT / "tests" / "outside" / f"{file}.py").read_text())
    assert without_docstrings(shown[1]) == written and len(written) == parts
