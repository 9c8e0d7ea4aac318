"""A Hugging Face folder through a model that is split over ranks and back: not a bit changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint.hf import load_weights, save_hf
from roll.checkpoint.sharded import save_sharded
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ModelConfig, ParallelSettings
from roll.models.gpt import build_model
from roll.parallel.state import parallel_groups
from tests.checkpoint.folder_of_tensors import (
    TOKENIZER_FILES,
    assert_same_bytes,
    random_tensors,
    read_folder,
    write_folder,
)
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import BIASED, TINY

LAYOUTS = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "mode": "fsp"}),
    (4, {"tp": 4}),
    (2, {"pp": 2}),
    (4, {"tp": 2, "pp": 2}),
    (4, {"tp": 2, "pp": 2, "mode": "fsp"}),
    (4, {"tp": 2, "pp": 2, "rank_order": "tp-cp-ep-pp-dp"}),
    (2, {"mode": "msp", "tp": 2}),
    (2, {"mode": "isp", "sp": 2}),
    (2, {"mode": "isp", "wp": 2}),
    (4, {"mode": "isp", "sp": 2, "wp": 4}),
    (4, {"mode": "isp", "sp": 4, "wp": 2}),
    (4, {"mode": "isp", "wp": 2, "pp": 2}),
    (2, {}),  # dp 2
    (4, {"pp": 2, "rank_order": "tp-cp-ep-pp-dp"}),  # pp 2 x dp 2
]


def through_the_model(
    jobs: list[tuple[Path, str, Path]], layout: dict[str, Any], max_shard_bytes: int, dtype: torch.dtype
) -> list[tuple[int, bool]]:
    """For each (source, head, target): load, write. How many numbers this rank held, and whether the head is zero."""
    parallel = ParallelSettings(**layout)
    held = []
    with parallel_groups(parallel) as state:
        for source_folder, head, target in jobs:
            model = ModelConfig.from_folder(source_folder)
            source = tensor_source(source_folder, model, init="load", head=head, seed=0)
            gpt = build_model(model, parallel, state, dtype=dtype, head=head)
            load_weights(gpt, source, state)
            save_hf(target, gpt, model, state, dtype=dtype, source=source_folder, max_shard_bytes=max_shard_bytes)
            numbers = sum(parameter.numel() for parameter in gpt.parameters())
            is_zero = head == "value" and state.is_last_stage and not gpt.output_layer.weight.any()
            held.append((numbers, bool(is_zero)))
    return held


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_there_and_back(ranks: RankPool, tmp_path: Path, world_size: int, layout: dict[str, Any]) -> None:
    jobs, tensors = [], {}
    models = {"lm": BIASED, "value": TINY}
    for head, files in (("lm", 3), ("value", 1)):
        tensors[head] = random_tensors(models[head], head)
        source = write_folder(tmp_path / head, models[head], tensors[head], files)
        jobs.append((source, head, tmp_path / f"{head}-again"))
    ranks.run(through_the_model, jobs, layout, 64 << 10, torch.float32, world_size=world_size)
    for source, head, target in jobs:
        assert_same_bytes(read_folder(target), tensors[head])
        assert len(list(target.glob("*.safetensors"))) > 1
        assert all(path.stat().st_size < 80 << 10 for path in target.glob("*.safetensors"))
        assert ModelConfig.from_folder(target) == models[head]
        for name in TOKENIZER_FILES:
            assert (target / name).read_bytes() == (source / name).read_bytes()
        assert not target.with_name(target.name + ".unfinished").exists()


def test_one_file_and_half_precision(ranks: RankPool, tmp_path: Path) -> None:
    tensors = random_tensors(TINY, "lm")
    jobs = [(write_folder(tmp_path / "lm", TINY, tensors), "lm", tmp_path / "again")]
    ranks.run(through_the_model, jobs, {"tp": 2}, 1 << 30, torch.bfloat16, world_size=2)
    assert [path.name for path in (tmp_path / "again").glob("*.safetensors*")] == ["model.safetensors"]
    assert_same_bytes(read_folder(tmp_path / "again"), {name: x.bfloat16() for name, x in tensors.items()})


def test_a_folder_may_be_written_over_the_one_it_came_from(ranks: RankPool, tmp_path: Path) -> None:
    tensors = random_tensors(TINY, "lm")
    folder = write_folder(tmp_path / "lm", TINY, tensors, files=3)
    ranks.run(through_the_model, [(folder, "lm", folder)], {"pp": 2}, 1 << 30, torch.float32, world_size=2)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [
        "model-stage00-00000.safetensors",
        "model-stage01-00000.safetensors",
    ]
    assert_same_bytes(read_folder(folder), tensors)
    assert all((folder / name).is_file() for name in TOKENIZER_FILES)


@pytest.mark.parametrize(("world_size", "layout"), [(2, {"tp": 2}), (2, {"pp": 2})], ids=name_of)
def test_a_value_head_on_a_language_model_starts_at_zero(
    ranks: RankPool, tmp_path: Path, world_size: int, layout: dict[str, Any]
) -> None:
    tensors = random_tensors(TINY, "lm")
    jobs = [(write_folder(tmp_path / "lm", TINY, tensors), "value", tmp_path / "critic")]
    held = ranks.run(through_the_model, jobs, layout, 1 << 30, torch.float32, world_size=world_size)
    assert [is_zero for ((_, is_zero),) in held] == ([True, True] if "tp" in layout else [False, True])
    del tensors["output.weight"]
    zero = torch.zeros(1, TINY.hidden_size)
    assert_same_bytes(read_folder(tmp_path / "critic"), tensors | {"v_head.weight": zero})


def test_a_rank_holds_its_own_part_only(ranks: RankPool, tmp_path: Path) -> None:
    # Of V = 40, H = 48, ffn 80, 4 layers, wqkv of (8 + 2 * 4) * 6 = 96 rows. At tp 2 x pp 2 a rank has half the rows
    # of half the layers, whole norms, and on its stage half the embedding, or half the output and the last norm.
    jobs = [(write_folder(tmp_path / "lm", TINY, random_tensors(TINY, "lm")), "lm", tmp_path / "again")]
    held = ranks.run(through_the_model, jobs, {"tp": 2, "pp": 2}, 1 << 30, torch.float32, world_size=4)
    layer = (96 * 48 + 48 * 48 + 3 * 80 * 48) // 2 + 2 * 48
    first, last = 2 * layer + 40 * 48 // 2, 2 * layer + 40 * 48 // 2 + 48
    assert [numbers for ((numbers, _),) in held] == [first, first, last, last]


def saves_that_fail(folder: Path, notes: Path, target: Path) -> list[str]:
    """Errors of this rank: a target below a file, a target with foreign files."""
    told = []
    with parallel_groups(ParallelSettings(tp=2)) as state:
        gpt = build_model(TINY, ParallelSettings(tp=2), state, dtype=torch.float32, head="lm")
        load_weights(gpt, tensor_source(folder, TINY, init="random", head="lm", seed=0), state)
        below = folder / "config.json" / "model"
        with pytest.raises(OSError, match="the model cannot be written: Not a directory: " + repr(str(below))) as error:
            save_hf(below, gpt, TINY, state, dtype=torch.float32, source=folder)
        told.append(str(error.value))
        for refused in (
            partial(save_hf, notes, gpt, TINY, state, dtype=torch.float32, source=folder),
            partial(save_sharded, notes, {}),
        ):
            with pytest.raises(ValueError, match="notes holds diary, and is no") as refusal:
                refused()
            told.append(str(refusal.value))
        save_hf(target, gpt, TINY, state, dtype=torch.float32, source=folder)  # What failed is no obstacle.
    return told


def test_what_rank_0_cannot_write_every_rank_is_told(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "lm", TINY, {})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary").write_text("dear")
    told = ranks.run(saves_that_fail, folder, tmp_path / "notes", tmp_path / "again", world_size=2)
    assert told[0] == told[1] and len(told[0]) == 3
    assert (tmp_path / "notes" / "diary").read_text() == "dear"
    assert ModelConfig.from_folder(tmp_path / "again") == TINY
