"""The algorithm that the README shows is the one that a test trains with (tests/pipelines/test_outside_parts.py)."""

from __future__ import annotations

import ast
import re

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


def test_the_example_is_the_file() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## An algorithm of your own")[2]
    shown = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert shown is not None
    written = without_docstrings((ROOT / "tests" / "outside" / "reinforce.py").read_text())
    assert without_docstrings(shown[1]) == written and len(written) == 3
