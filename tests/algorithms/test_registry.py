"""Algorithms by name: files of the package, and classes of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from roll.algorithms import Algorithm
from roll.algorithms.ppo import PPOSettings
from roll.algorithms.registry import ALGORITHMS, SHARED, find_algorithm, settings_of
from roll.errors import UserError
from tests.outside.reinforce import Reinforce, ReinforceSettings

if TYPE_CHECKING:
    from torch import Tensor

    from tests.outside.reinforce import ReinforceSettings as Hidden

OUTSIDE = "tests.outside.reinforce:Reinforce"


class HidesItsSettings(Reinforce):
    settings: Hidden


class KeepsATensor(Reinforce):
    """Annotates another attribute with a type that exists for type checkers only."""

    last: Tensor


def test_each_file_of_the_package_is_an_algorithm() -> None:
    folder = Path(__file__).resolve().parents[2] / "roll" / "algorithms"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", *SHARED} == set(ALGORITHMS)
    assert {"grpo", "ppo"} <= set(ALGORITHMS)
    for name in ALGORITHMS:
        assert issubclass(find_algorithm(name), Algorithm)
        assert settings_of(name).model_fields["name"].default == name


def test_a_class_of_a_users_own() -> None:
    assert find_algorithm(OUTSIDE) is Reinforce
    assert settings_of(OUTSIDE) is ReinforceSettings
    assert settings_of(f"{__name__}:KeepsATensor") is ReinforceSettings
    assert settings_of("ppo") is PPOSettings


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gppo", r"must be 'grpo' or 'ppo' \(did you mean '\w+'\?\), or module:Name of an algorithm of your own"),
        ("gae", "must be 'grpo' or 'ppo', or module:Name"),
        ("tests.outside.reinforce:ReinforceSettings", "is no subclass of roll.algorithms.algorithm.Algorithm"),
        (
            "roll.algorithms:Algorithm",
            "lacks 'credit', 'losses', 'makes' and 'reads', which roll.algorithms.algorithm.Algorithm asks for",
        ),
        ("tests.outside.reinforce:Reinforc", "near names: Reinforce"),
        ("no.such_module:A", "cannot import module 'no.such_module'"),
        ("roll.algorithms:Algorithm", "lacks 'credit', 'losses', 'makes' and 'reads'"),
        (
            f"{__name__}:HidesItsSettings",
            r"HidesItsSettings\.settings is annotated with 'Hidden', which .* does not have",
        ),
    ],
)
def test_a_name_of_no_algorithm(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of(name)


def test_settings_are_annotated() -> None:
    class Odd(Reinforce):
        settings: int  # type: ignore[assignment]

    with pytest.raises(UserError, match=r"Odd\.settings is annotated with <class 'int'>, which is no Algorithm"):
        Odd.settings_type()
