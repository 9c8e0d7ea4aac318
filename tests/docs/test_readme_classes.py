"""The classes that README shows are those that the tests run."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.outside.asking import Asking
from tests.outside.table import Table, TableSettings

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


@pytest.mark.parametrize("shown", [TableSettings, Table, Asking])
def test_a_class_in_the_readme_is_the_one_that_runs(shown: type) -> None:
    assert inspect.getsource(shown) in README
