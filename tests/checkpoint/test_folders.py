"""What ranks do together on folders: each hears of the first failure, and each goes on after the same one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch.distributed as dist

from roll.checkpoint.folders import Kind, alone, new_folder, on_every_rank, on_rank_0, refuse_to_replace
from roll.errors import mistake
from tests.rank_pool import RankPool


def failure(kind: type[OSError | ValueError], rank: int) -> OSError | ValueError:
    return OSError(errno.ENOSPC, f"rank {rank} is full", "a") if kind is OSError else ValueError(f"rank {rank} refuses")


def outcomes(kind: type[OSError | ValueError], failing: tuple[int, ...]) -> list[str]:
    """What this rank gets of an act of every rank and of one of rank 0, where these ranks fail."""
    rank = dist.get_rank()

    def act() -> str:
        if rank in failing:
            raise failure(kind, rank)
        return f"result of {rank}"

    found = []
    for together in (on_every_rank, on_rank_0):
        try:
            found.append(together(act))
        except kind as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_every_rank_hears_the_first_failure(ranks: RankPool, kind: type[OSError | ValueError]) -> None:
    def found(*failing: int) -> list[list[str]]:
        of_all: list[list[str]] = ranks.run(outcomes, kind, failing, world_size=3)
        return of_all

    assert found() == [[f"result of {rank}", "result of 0"] for rank in range(3)]
    assert found(1, 2) == [[str(failure(kind, 1)), "result of 0"]] * 3
    assert found(0, 2) == [[str(failure(kind, 0))] * 2] * 3


def test_a_folder_that_cannot_be_begun_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "model"
    with pytest.raises(OSError, match="Not a directory") as error, new_folder(folder, Kind.MODEL, alone):
        pytest.fail("there is no folder to write into")
    assert mistake(error.value) == f"{folder}: the model cannot be written: Not a directory"


@pytest.mark.parametrize("content", ["[]", '"model_type"', "3", "null", '{"port": 80}', "{", ""])
def test_a_config_of_another_program_is_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"a holds config\.json, and is no model"):
        refuse_to_replace(tmp_path / "a", Kind.MODEL)
    (tmp_path / "a" / "config.json").write_text('{"model_type": "x"}')
    refuse_to_replace(tmp_path / "a", Kind.MODEL)
