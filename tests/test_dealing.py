"""How the tests are dealt to the processes of a run: `tests/dealing.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.dealing import ByFile, folder_of, in_order

TESTS = ("tests/data/test_a.py::test_x", "tests/workers/test_b.py::test_y", "tests/workers/test_c.py::test_z[a::b/c]")
TESTS = (*TESTS, "tests/pipelines/test_d.py::test_v", "tests/test_e.py::test_w[x/y.py]", "tests/data/test_a.py::test_u")


def test_a_tests_folder() -> None:
    assert [folder_of(name) for name in TESTS] == ["data", "workers", "workers", "pipelines", "", "data"]


def test_folders_that_take_longest_come_first_and_all_else_keeps_its_order() -> None:
    items: Any = [SimpleNamespace(nodeid=name) for name in TESTS]
    assert [TESTS.index(item.nodeid) for item in in_order(items)] == [3, 1, 2, 0, 4, 5]


@pytest.mark.parametrize(
    ("name", "dealt_with"),
    [
        (TESTS[0], "tests/data/test_a.py"),
        (TESTS[2], "workers"),
        (TESTS[3], "pipelines"),
        (TESTS[4], "tests/test_e.py"),
    ],
)
def test_what_shares_a_ray_is_dealt_to_one_process(name: str, dealt_with: str) -> None:
    assert ByFile._split_scope(object.__new__(ByFile), name) == dealt_with
