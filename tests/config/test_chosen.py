"""A section whose class is chosen by its name: read, refused, dumped and read back as that class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import PositiveFloat, PositiveInt

from roll.config import ConfigError, Problem, Settings, dump_config, load_config
from roll.config.chosen import ChosenByName
from roll.config.problems import Check
from roll.errors import UserError


class Animal(Settings):
    name: str
    legs: PositiveInt = 4


class Coat(Settings):
    colour: str
    length: PositiveFloat = 1.0


class Cat(Animal):
    lives: PositiveInt = 9
    coat: Coat = Coat(colour="grey")

    def checks(self) -> Iterable[Check]:
        return (self._lives_on_legs,)

    def _lives_on_legs(self) -> Iterator[Problem]:
        if self.lives < self.legs:
            yield Problem("lives", f"{self.lives} is less than legs {self.legs}")


class Bird(Animal):
    legs: PositiveInt = 2
    span: PositiveFloat


KINDS: dict[str, type[Animal]] = {"cat": Cat, "bird": Bird}


def kind_of(name: str) -> type[Animal]:
    if name not in KINDS:
        raise UserError(f"must be {' or '.join(KINDS)}")
    return KINDS[name]


class House(Settings):
    rooms: PositiveInt = 3
    pet: Annotated[Animal, ChosenByName(kind_of)]
    guest: Annotated[Animal, ChosenByName(kind_of, default="cat")] = Cat(name="cat")

    def checks(self) -> Iterable[Check]:
        return (self._room_for_legs,)

    def _room_for_legs(self) -> Iterator[Problem]:
        if self.rooms < self.pet.legs:
            yield Problem("rooms", f"{self.rooms} is less than pet.legs {self.pet.legs}")


def load(tmp_path: Path, *overrides: str) -> House:
    (tmp_path / "house.yaml").write_text("rooms: 8\n")
    return load_config(House, tmp_path / "house.yaml", ["pet={name: cat}", *overrides])


def refusal(tmp_path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, *overrides)
    return str(refused.value).splitlines()


def test_its_name_chooses_the_class(tmp_path: Path) -> None:
    house = load(tmp_path, "pet.lives=7", "pet.coat.colour=red", "guest.lives=5")
    assert house.pet == Cat(name="cat", lives=7, coat=Coat(colour="red"))
    assert house.guest == Cat(name="cat", lives=5)
    assert load(tmp_path, "pet={name: bird, span: 0.3}", "pet.legs=3").pet == Bird(name="bird", legs=3, span=0.3)
    assert House(pet=Bird(name="bird", span=1.0)).pet.legs == 2


@pytest.mark.parametrize("pet", ["{name: cat, coat: {colour: red}}", "{name: bird, span: 0.3}"])
def test_what_is_dumped_reads_back_equal(tmp_path: Path, pet: str) -> None:
    house = load(tmp_path, f"pet={pet}")
    (tmp_path / "dumped.yaml").write_text(dump_config(house))
    for copy in (
        load_config(House, tmp_path / "dumped.yaml"),
        House.model_validate_json(house.model_dump_json()),
        House(**house.model_dump()),
        House(**dict(house)),
    ):
        assert copy == house and type(copy.pet) is type(house.pet)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["pet.name=dog"], ["pet.name: must be cat or bird, got 'dog'"]),
        (["pet.name=3"], ["pet.name: must be a valid string, got 3"]),
        (["pet=cat"], ["pet: must be a section of settings, got 'cat'"]),
        (["pet=null"], ["pet: must be a section of settings, got null"]),
        (["pet.lifes=3"], ["pet.lifes: unknown setting; did you mean pet.lives?"]),
        (["pet.coat={colour: red, lenght: 1}"], ["pet.coat.lenght: unknown setting; did you mean pet.coat.length?"]),
        (["colour=red"], ["colour: unknown setting; did you mean pet.coat.colour?"]),
        (["guest.color=red"], ["guest.color: unknown setting; did you mean guest.coat.colour?"]),
        (["pet.name=bird"], ["pet.span: this setting is required, but not given"]),
        (["pet={name: bird, span: 1.0, lives: 3}"], ["pet.lives: unknown setting; did you mean pet.legs?"]),
        (["pet.lives=3"], ["pet.lives: 3 is less than legs 4"]),
        # All at once: what is wrong in itself, the check of the whole, and the section's own.
        (
            ["pet={lives: 2, coat: {length: 0}}", "rooms=1"],
            [
                "pet.coat.colour: this setting is required, but not given",
                "pet.coat.length: must be greater than 0, got 0",
                "rooms: 1 is less than pet.legs 4",
                "pet.lives: 2 is less than legs 4",
            ],
        ),
        # Nothing is compared with a section of no class.
        (["pet={name: dog, legs: 30}", "rooms=0"], ["rooms: must be greater than 0, got 0", "pet.name: must be"]),
    ],
)
def test_each_problem_has_its_path(tmp_path: Path, overrides: list[str], lines: list[str]) -> None:
    found = refusal(tmp_path, *overrides)
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(expected)


def test_a_section_without_a_name_or_a_default_has_no_class(tmp_path: Path) -> None:
    (tmp_path / "house.yaml").write_text("pet: {legs: 3}\n")
    with pytest.raises(ConfigError, match=r"^pet\.name: this setting is required, but not given$"):
        load_config(House, tmp_path / "house.yaml")


def test_settings_under_the_name_of_another_class_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^pet\.name: 'cat' has settings of class Cat, not Bird, got 'cat'$"):
        House(pet=Bird(name="cat", span=1.0))
    with pytest.raises(ConfigError, match=r"^pet\.name: must be cat or bird, got 'dog'$"):
        House(pet=Bird(name="dog", span=1.0))


def test_settings_of_another_kind_are_no_section() -> None:
    other: Any = Coat(colour="red")
    with pytest.raises(ConfigError, match=r"^pet: must be a section of settings, got Coat"):
        House(pet=other)
