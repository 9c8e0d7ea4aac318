"""The one-process reference on its own: what it writes it reads, and its optimizer is the one the settings describe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config import ModelConfig, OptimizerSettings
from roll.models.hf_layout import hf_shapes
from roll.strategies import HfStrategy
from tests.checkpoint.folder_of_tensors import TOKENIZER_FILES, assert_same_bytes, read_folder
from tests.strategies.tiny import TINY, make_batch, settings, weighted_nll, weighted_value_error, write_tiny

# With a warm-up, so that a step taken at the wrong place of the schedule is another step.
OPTIMIZER = OptimizerSettings(lr=1e-2, warmup_steps=4, weight_decay=0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def strategy(folder: Path, **changes: Any) -> HfStrategy:
    made = HfStrategy(settings(folder, "hf", **({"optimizer": OPTIMIZER} | changes)))
    made.initialize()
    return made


def weights(of: HfStrategy) -> dict[str, Tensor]:
    """All weights as `model_update` streams them, copied."""
    return {name: tensor.detach().clone() for bucket in of.model_update(1 << 30) for name, tensor in bucket.items()}


def train(model: HfStrategy, *seeds: int) -> None:
    loss = weighted_nll if model.settings.head == "lm" else weighted_value_error
    for seed in seeds:
        assert model.train_step(make_batch(seed=seed), loss)["skipped_steps"] == 0


@pytest.mark.parametrize("head", ["lm", "value"])
def test_continuing_from_a_checkpoint_equals_never_having_stopped(folder: Path, tmp_path: Path, head: str) -> None:
    first = strategy(folder, head=head)
    train(first, 0, 1)
    first.save_checkpoint(tmp_path / "checkpoint")
    train(first, 2)
    again = strategy(folder, head=head, seed=8)
    again.load_checkpoint(tmp_path / "checkpoint")
    train(again, 2)
    assert_same_bytes(weights(again), weights(first))


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_written_folder_holds_the_trained_model(folder: Path, tmp_path: Path, head: str) -> None:
    for name, text in TOKENIZER_FILES.items():
        (folder / name).write_text(text)
    trained = strategy(folder, head=head)
    train(trained, 0, 1)
    trained.save_hf(tmp_path / "written")
    assert_same_bytes(read_folder(tmp_path / "written"), weights(trained))
    assert ModelConfig.from_folder(tmp_path / "written") == TINY
    assert all((tmp_path / "written" / name).read_text() == text for name, text in TOKENIZER_FILES.items())
    assert_same_bytes(weights(strategy(tmp_path / "written", head=head, init="load")), weights(trained))


def test_weights_are_streamed_in_buckets_that_another_model_takes_over(folder: Path) -> None:
    trained, other = strategy(folder), strategy(folder, seed=8)
    train(trained, 0, 1)
    buckets = list(trained.model_update(20_000))
    assert len(buckets) > 1 and max(map(len, buckets)) > 1
    assert sorted(name for bucket in buckets for name in bucket) == sorted(hf_shapes(TINY, "lm"))
    for bucket in buckets:
        other.update_weights(bucket)
    assert_same_bytes(weights(other), weights(trained))


def test_norm_weights_do_not_decay(folder: Path) -> None:
    # As with Megatron-Core's optimizer, which exempts weights of one dimension.
    after = []
    for weight_decay in (0.0, 0.5):
        model = strategy(folder, optimizer=OptimizerSettings(lr=1e-2, weight_decay=weight_decay))
        train(model, 0)
        after.append(weights(model))
    plain, decayed = after
    start = weights(strategy(folder))
    for name, weight in plain.items():
        if weight.ndim == 1:
            assert not torch.equal(weight, start[name]), name
            assert torch.equal(decayed[name], weight), name
        else:  # Decoupled: lr * weight_decay of the weight before the step.
            torch.testing.assert_close(decayed[name], weight - 1e-2 * 0.5 * start[name], rtol=1e-5, atol=1e-6)


def test_every_weight_follows_the_schedule(folder: Path) -> None:
    model = strategy(folder)
    start = weights(model)
    train(model, 0)  # The warm-up begins at a rate of 0.
    assert_same_bytes(weights(model), start)
    train(model, 1)
    after = weights(model)
    assert not any(torch.equal(after[name], weight) for name, weight in start.items())


@pytest.fixture
def all_warnings() -> Iterator[None]:
    """Torch warns of one thing once in a process; here it does each time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_metrics_may_hang_on_the_graph(folder: Path, all_warnings: None) -> None:
    model = strategy(folder)

    def loss(data: Any, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        value, _ = weighted_nll(data, output)
        return value, {"twice": 2 * value}

    metrics = model.train_step(make_batch(), loss)
    assert metrics["twice"] == pytest.approx(2 * metrics["loss"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_save_leaves_every_file_and_writes_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work = tmp_path / "home", tmp_path / "home" / "work"
    (tmp_path / "notes" / "deeper").mkdir(parents=True)
    work.mkdir(parents=True)
    for name in ("home/diary", "notes/a.txt", "notes/deeper/data.bin", "file"):
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    model = strategy(folder)
    before = contents(tmp_path)
    for where, message in (
        ("~", "lies around the working directory"),
        (".", "is the working directory"),
        (tmp_path / "notes", "notes holds a.txt, deeper, and is no .* give the name of a new folder, or move"),
        (tmp_path / "file", "file is a file, which a .* would replace"),
    ):
        for save in (model.save_hf, model.save_checkpoint):
            with pytest.raises(ValueError, match=message):
                save(where)
    monkeypatch.chdir(tmp_path / "notes")
    for save in (model.save_hf, model.save_checkpoint):
        with pytest.raises(ValueError, match="is the home folder"):
            save("~")
    with pytest.raises(ValueError, match=r"tiny holds config.json, and is no checkpoint"):
        model.save_checkpoint(folder)
    model.save_checkpoint("state")
    with pytest.raises(ValueError, match=r"state holds checksums.json, state.pt, and is no model"):
        model.save_hf("state")
    for name in ("state.pt", "checksums.json"):
        (tmp_path / "notes" / "state" / name).unlink()
    model.save_hf("state")  # An empty folder is free.
    model.save_hf("state")
    (tmp_path / "notes" / "state" / "config.json").write_text('{"port": 80}')  # Of another program.
    with pytest.raises(ValueError, match=r"state holds config.json, model.safetensors, and is no model"):
        model.save_hf("state")
    after = contents(tmp_path)
    assert {name: content for name, content in after.items() if "/state/" not in name} == before


def test_without_an_optimizer_there_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    model = strategy(folder, optimizer=None)
    with pytest.raises(ValueError, match="hf saves a checkpoint only when `optimizer` is set; got null"):
        model.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="hf loads a checkpoint only when `optimizer` is set; got null"):
        model.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="hf trains only when `optimizer` is set; got null"):
        train(model, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
