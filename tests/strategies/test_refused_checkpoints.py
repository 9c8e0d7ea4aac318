"""Checkpoints that cannot be continued from are refused with a reason, on every rank, and change nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from roll.checkpoint.checksums import CHECKSUMS, Checksum, checksums_of, write_checksums
from roll.checkpoint.training_state import sharded_training_state
from roll.errors import mistake
from roll.parallel.state import parallel_groups
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, make_batch, settings, weighted_nll, weighted_value_error, write_tiny

LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {"name": "hf"}), (1, {}), (2, {"pp": 2})]


@contextmanager
def trained(folder: Path, layout: dict[str, Any]) -> Iterator[Any]:
    """A strategy after one step."""
    config = settings(folder, **dict(layout))
    with nullcontext() if config.name == "hf" else parallel_groups(config.parallel) as state:
        strategy = HfStrategy(config) if state is None else MegatronTrainStrategy(config, state)
        strategy.initialize()
        loss = weighted_nll if config.head == "lm" else weighted_value_error
        strategy.train_step(make_batch(), loss)
        yield strategy


def state_of(strategy: Any) -> dict[str, Tensor]:
    """Weights and moments, copied."""
    if isinstance(strategy, HfStrategy):
        assert strategy.trained is not None
        moments = strategy.trained.adam.state.values()
        found = dict(strategy.trained.masters) | {f"exp_avg/{n}": m["exp_avg"] for n, m in enumerate(moments)}
    else:
        sharded, _ = sharded_training_state(strategy.gpt, strategy.optimizer, strategy.state)
        found = {name: place.data for name, place in sharded.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def save(folder: Path, layout: dict[str, Any], checkpoint: Path) -> None:
    with trained(folder, layout) as strategy:
        strategy.train_step(make_batch(seed=1), weighted_nll)
        strategy.save_checkpoint(checkpoint)


def loads(folder: Path, layout: dict[str, Any], checkpoints: list[Path]) -> list[tuple[str, bool]]:
    """Message of each refusal, and whether weights and moments are as before."""
    told = []
    with trained(folder, layout) as strategy:
        before = state_of(strategy)
        for checkpoint in checkpoints:
            with pytest.raises(ValueError, match=r".") as error:
                strategy.load_checkpoint(checkpoint)
            same = all(torch.equal(tensor, before[name]) for name, tensor in state_of(strategy).items())
            told.append((str(error.value), same))
    return told


def read_sums(folder: Path) -> dict[str, Checksum]:
    return checksums_of(folder, (path.name for path in folder.iterdir() if path.name != CHECKSUMS))


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path, place: float = 0.5) -> None:
    """One bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def other_sums(file: Path) -> None:
    file.write_text('{"common.pt": 3}')


def other_text(file: Path) -> None:
    file.write_text('{"name": "x"}')


def of_another_strategy(file: Path) -> None:
    """A complete checkpoint, with other files."""
    (file.parent / "model.pt").write_text("weights")
    write_checksums(file.parent, checksums_of(file.parent, ["model.pt"]))


Damage = tuple[Callable[[Path], None], str, str]
"""How a file is damaged, its name, and the message that is expected of it."""


def damages_of(file: str) -> list[Damage]:
    """Damages of any file but the one of checksums."""
    name = re.escape(file)
    return [
        (truncated, file, rf"{name} is damaged: it has \d+ bytes and was written with \d+$"),
        (other_text, file, rf"{name} is damaged: it has 13 bytes and was written with \d+$"),
        (
            flipped,
            file,
            rf"{name} is damaged: it has (\d+) bytes with CRC-32 \w{{8}}, and was written with \1 and \w{{8}}",
        ),
        (Path.unlink, file, rf"is not a complete checkpoint .*: it holds no {name}$"),
    ]


OF_CHECKSUMS: list[Damage] = [
    (Path.unlink, CHECKSUMS, r"is not a complete checkpoint .*: it holds no checksums\.json$"),
    (truncated, CHECKSUMS, r"checksums\.json is damaged"),
    (other_sums, CHECKSUMS, r"checksums\.json is damaged"),
    (other_text, CHECKSUMS, r"checksums\.json is damaged"),
]
OF_TENSORS = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp")
DAMAGES: dict[str, list[Damage]] = {
    "hf": [
        *damages_of("state.pt"),
        *OF_CHECKSUMS,
        (of_another_strategy, CHECKSUMS, r"is not a checkpoint of strategy hf: it holds no state\.pt$"),
    ],
    "megatron_train": [
        *damages_of("common.pt"),
        *damages_of(".metadata"),
        *damages_of("metadata.json"),
        *OF_CHECKSUMS,
        (
            of_another_strategy,
            CHECKSUMS,
            r"is not a checkpoint of Megatron-Core: it holds no common\.pt, metadata\.json, \.metadata$",
        ),
        *(damage for file in OF_TENSORS for damage in damages_of(file)),
    ],
}


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_a_refused_checkpoint_says_why_and_changes_nothing(
    ranks: RankPool, tmp_path: Path, world_size: int, layout: dict[str, Any]
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    ranks.run(save, folder, layout, tmp_path / "whole", world_size=world_size)
    written = {path.name for path in (tmp_path / "whole").iterdir()}
    damages = [damage for damage in DAMAGES[layout.get("name", "megatron_train")] if damage[1] in written]
    assert written == {file for _, file, _ in damages}
    copies = []
    for number, (damage, file, _) in enumerate(damages):
        copies.append(Path(shutil.copytree(tmp_path / "whole", tmp_path / f"{number}")))
        damage(copies[-1] / file)
    for told in ranks.run(loads, folder, layout, [tmp_path / "absent", *copies], world_size=world_size):
        assert told[0][1]
        for (message, same), (damage, file, expected) in zip(told[1:], damages, strict=True):
            assert re.search(expected, message), f"{damage.__name__} {file}: {message}"
            assert same, f"{damage.__name__} {file}"


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_a_checkpoint_of_another_model(
    ranks: RankPool, tmp_path: Path, world_size: int, layout: dict[str, Any]
) -> None:
    """In pipeline parallelism the difference may be on one stage only; every rank hears of it."""
    models = {"wide": {"intermediate_size": 96}, "deep": {"num_hidden_layers": 6}, "lm": {}}
    for name, changes in models.items():
        folder = write_tiny(tmp_path / name, TINY.model_copy(update=changes))
        ranks.run(save, folder, layout, tmp_path / f"{name}-saved", world_size=world_size)
    saved = [tmp_path / f"{name}-saved" for name in models]
    critic = layout | {"head": "value"}
    for told in ranks.run(loads, tmp_path / "lm", layout, saved[:2], world_size=world_size):
        wide, deep = told
        assert re.search(r"another model: \S+ has shape \(96, 48\) there, \(80, 48\) here", wide[0]), wide
        assert re.search(r"another model: \S+\.layers\.4\.\S+ has shape \(.*\) there, None here", deep[0]), deep
        assert wide[1] and deep[1]
    for told in ranks.run(loads, tmp_path / "lm", critic, saved[2:], world_size=world_size):
        ((message, same),) = told
        assert re.search(r"another model: \S*v_head\.weight has shape None there, \(1, 48\) here", message)
        assert same


def loses_files(folder: Path, layout: dict[str, Any], checkpoint: Path) -> str:
    """What a rank is told when the files of rank 1 vanish after the ranks have checked them."""

    def lose_and_load(state_dict: dict[str, Any], place: str) -> dict[str, Any]:
        for file in Path(place).glob("__1_*"):
            file.unlink(missing_ok=True)
        return load(state_dict, place)

    load = dist_checkpointing.load
    with trained(folder, layout) as strategy, pytest.MonkeyPatch.context() as patch:
        strategy.save_checkpoint(checkpoint)
        patch.setattr(dist_checkpointing, "load", lose_and_load)
        with pytest.raises(OSError, match="tensors cannot be read") as error:
            strategy.load_checkpoint(checkpoint)
    return mistake(error.value) or "a traceback"


def test_files_that_vanish_while_they_are_read(ranks: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    told = ranks.run(loses_files, write_tiny(tmp_path / "tiny"), {"pp": 2}, saved, world_size=2)
    for line in told:
        assert line.startswith(f"{saved}: tensors cannot be read, and weights are replaced in part: ")
        assert "No such file" in line
    assert told[0] == told[1]
