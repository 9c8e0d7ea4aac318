"""The parity grid: every family under every mode against one process with transformers.

Families come from `tests.families`: those of the package, and one from outside of it. Batch and loss are those of
`tiny`; one job trains all models under a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config import ParallelSettings, RopeScaling, StrategySettings
from roll.models.family_tensors import to_family
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.checkpoint.folder_of_tensors import random_tensors, write_folder
from tests.families import family_setting, tiny, variants
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import make_batch, merge_stages, settings, weighted_nll

MODELS = variants()
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"mode": "msp", "tp": 2}),
    (2, {"mode": "fsp", "tp": 2}),
    (2, {"pp": 2}),
    (2, {"mode": "isp", "sp": 2, "wp": 2}),
    (4, {"mode": "isp", "sp": 2, "wp": 2, "pp": 2}),
]


def settings_of(name: str, folder: Path, strategy: str = "megatron_train", **layout: Any) -> StrategySettings:
    return settings(folder, strategy, init="load", family=family_setting(MODELS[name].model_type), **layout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random numbers everywhere: biases that are zero and norms that are one would hide that they are missing."""
    written = {}
    for family, model in MODELS.items():
        folder = tmp_path_factory.mktemp(f"model{len(written)}")
        canonical = {
            name: 1 + 0.3 * tensor if "norm" in name else 0.15 * tensor
            for name, tensor in random_tensors(model, "lm").items()
        }
        own = {name: tensor.contiguous() for name, tensor in to_family(model, canonical.items())}
        written[family] = write_folder(folder, model, own)
    return written


def log_probs(data: DataProto, output: Any) -> dict[str, Tensor]:
    return {"log_probs": output.log_probs(data["input_ids"], data["attention_mask"])}


def train(strategy: Any, batch: DataProto) -> dict[str, Any]:
    """Log-probs before, then one step: its metrics and gradients, and the weights after it under the family's names."""
    strategy.initialize()
    before = strategy.forward_step(batch, log_probs)
    metrics = strategy.train_step(batch, weighted_nll)
    gradients = {name: tensor.detach().clone() for name, tensor in strategy.gradients()}
    weights = {name: tensor for bucket in strategy.model_update(1 << 12) for name, tensor in bucket.items()}
    return {"log_probs": before, "metrics": metrics, "gradients": gradients, "weights": weights}


def train_on_ranks(folders: dict[str, Path], layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    parallel = ParallelSettings(**layout)
    outcomes = {}
    with parallel_groups(parallel) as state:
        for family, folder in folders.items():
            strategy = MegatronTrainStrategy(settings_of(family, folder, **layout), state)
            batch = make_batch() if state.is_leader else make_batch().stub()
            outcome = train(strategy, batch)
            outcomes[family] = outcome | {key: merge_stages(outcome[key]) for key in ("gradients", "weights")}
            outcomes[family]["tied"] = strategy.model_config.tie_word_embeddings
    return outcomes


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {
        family: train(HfStrategy(settings_of(family, folder, "hf")), make_batch()) for family, folder in folders.items()
    }


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_results_and_gradients_are_those_of_one_process(
    ranks: RankPool,
    folders: dict[str, Path],
    reference: dict[str, dict[str, Any]],
    world_size: int,
    layout: dict[str, Any],
) -> None:
    for outcome in ranks.run(train_on_ranks, folders, layout, world_size=world_size):
        for family, expected in reference.items():
            ours = outcome[family]
            if ours["log_probs"] is not None:
                error = (ours["log_probs"]["log_probs"] - expected["log_probs"]["log_probs"]).abs().max()
                assert error <= 1e-5, f"{family}: {error:.1e}"
            assert ours["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
            if ours["tied"]:  # Two copies of one tensor, with one gradient.
                output = ours["gradients"].pop("output.weight")
                assert torch.equal(output, ours["gradients"]["model.tok_embeddings.weight"])
            assert ours["gradients"].keys() == expected["gradients"].keys()
            for name, gradient in expected["gradients"].items():
                error = (ours["gradients"][name] - gradient).abs().max() / gradient.abs().max()
                assert error <= 1e-5, f"{family} {name}: relative error {error:.1e}"
            assert ours["weights"].keys() == expected["weights"].keys()


def test_a_rollout_takes_over_what_the_trainer_sends(ranks: RankPool, folders: dict[str, Path]) -> None:
    (outcomes,) = ranks.run(train_on_ranks, folders, {}, world_size=1)
    for family, folder in folders.items():
        strategy = HfStrategy(settings_of(family, folder, "hf"))
        strategy.initialize()
        weights = outcomes[family]["weights"]
        for name, tensor in weights.items():  # each a bucket of its own, q without k and v
            strategy.update_weights({name: tensor})
        for bucket in strategy.model_update(1 << 20):
            for name, tensor in bucket.items():
                assert torch.equal(tensor, weights[name]), (family, name)


def refusal_of(folder: Path) -> str:
    config = settings(folder, init="load")
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        with pytest.raises(ValueError, match="tokens") as refused:
            strategy.get_data_input(make_batch())
        return str(refused.value)


def test_sequences_beyond_the_scaled_context_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    short = RopeScaling(rope_type="dynamic", factor=1.6)  # 7 * 1.6 = 11.2
    model = tiny("internlm2", max_position_embeddings=7, rope_scaling=short)
    write_folder(tmp_path, model, random_tensors(model, "lm"))
    message = "row 4 has 12 tokens, the model's context is 11"
    assert ranks.run(refusal_of, tmp_path, world_size=1) == [message]
    with pytest.raises(ValueError, match=message):
        HfStrategy(settings(tmp_path, "hf")).get_data_input(make_batch())


def train_and_save(folders: dict[str, Path], checkpoints: Path, layout: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    return _weights(folders, layout, lambda strategy, family: _train_and_save(strategy, checkpoints / family))


def load(folders: dict[str, Path], checkpoints: Path, layout: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    return _weights(folders, layout, lambda strategy, family: strategy.load_checkpoint(checkpoints / family))


def _train_and_save(strategy: MegatronTrainStrategy, checkpoint: Path) -> None:
    batch = make_batch() if strategy.state.is_leader else make_batch().stub()
    strategy.train_step(batch, weighted_nll)
    strategy.save_checkpoint(checkpoint)


def _weights(
    folders: dict[str, Path], layout: dict[str, Any], act: Callable[[MegatronTrainStrategy, str], None]
) -> dict[str, dict[str, Tensor]]:
    """Each model's weights after `act`."""
    weights = {}
    with parallel_groups(ParallelSettings(**layout)) as state:
        for family, folder in folders.items():
            strategy = MegatronTrainStrategy(settings_of(family, folder, **layout), state)
            strategy.initialize()
            act(strategy, family)
            buckets = strategy.model_update(1 << 12)
            weights[family] = merge_stages({name: tensor for bucket in buckets for name, tensor in bucket.items()})
    return weights


def test_a_checkpoint_holds_biases_and_norms_of_queries_and_keys(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    relatives = {family: folders[family] for family in ("qwen3-biased", "internlm2-biased")}
    saved = ranks.run(train_and_save, relatives, tmp_path, {"tp": 2}, world_size=2)[0]
    loaded = ranks.run(load, relatives, tmp_path, {"mode": "isp", "wp": 2}, world_size=2)[0]
    for family, weights in saved.items():
        assert loaded[family].keys() == weights.keys()
        assert all(torch.equal(loaded[family][name], tensor) for name, tensor in weights.items())
