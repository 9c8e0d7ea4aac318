"""The page on the three documents: its code blocks run and print what stands below them, its tests exist."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.launched import launched
from tests.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "documents.md"
BLOCK = re.compile(r"<!-- ranks: (\d+) -->\n```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
BLOCKS = [(int(ranks), code, printed) for ranks, code, printed in BLOCK.findall(PAGE.read_text())]


def printed_by(code: str) -> str:
    """Standard output of a block, run as torchrun runs a script."""
    output = io.StringIO()
    with launched(), contextlib.redirect_stdout(output):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    return output.getvalue()


def test_every_block_of_code_is_run() -> None:
    assert PAGE.read_text().count("```python") == len(BLOCKS) >= 3


@pytest.mark.parametrize(("world_size", "code", "expected"), BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_prints_what_stands_below_it(ranks: RankPool, world_size: int, code: str, expected: str) -> None:
    assert "".join(ranks.run(printed_by, code, world_size=world_size)) == expected


def test_the_tests_that_the_page_names_exist() -> None:
    named = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())))
    assert len(named) > 20
    for file, name in named:
        functions = {
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"
