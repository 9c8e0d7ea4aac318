"""Checkpoints that cannot be continued from are refused with a reason, on every rank, and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.checkpoint.training_state import sharded_training_state
from roll.parallel.state import parallel_groups
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import make_batch, settings, weighted_nll, write_tiny

LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {"name": "hf"}), (1, {}), (2, {"pp": 2})]


@contextmanager
def trained(folder: Path, layout: dict[str, Any]) -> Iterator[Any]:
    """A strategy after one step."""
    config = settings(folder, **dict(layout))
    with nullcontext() if config.name == "hf" else parallel_groups(config.parallel) as state:
        strategy = HfStrategy(config) if state is None else MegatronTrainStrategy(config, state)
        strategy.initialize()
        strategy.train_step(make_batch(), partial(weighted_nll, strategy))
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
        strategy.train_step(make_batch(seed=1), partial(weighted_nll, strategy))
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


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_an_earlier_version(ranks: RankPool, tmp_path: Path, world_size: int, layout: dict[str, Any]) -> None:
    folder, checkpoint = write_tiny(tmp_path / "tiny"), tmp_path / "checkpoint"
    ranks.run(save, folder, layout, checkpoint, world_size=world_size)
    file = checkpoint / ("state.pt" if "name" in layout else "common.pt")
    content = torch.load(file)
    del content["progress"]
    torch.save(content, file)
    for ((message, same),) in ranks.run(loads, folder, layout, [checkpoint], world_size=world_size):
        assert "of an earlier version" in message
        assert same
