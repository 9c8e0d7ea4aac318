"""Where the reference and Megatron-Core could differ besides parallelism: both must be right, so both must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config import MicroBatchSettings, ModelConfig, OptimizerSettings
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.checkpoint.folder_of_tensors import read_folder
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, make_batch, settings, weighted_nll, weighted_value_error, write_tiny

# The embedding's row of `pad_token_id` is that of a real token; embeddings are tied or not.
PAD_IS_EOS = ModelConfig(**TINY.model_dump() | {"pad_token_id": 2})
TIED = ModelConfig(**TINY.model_dump() | {"model_type": "llama", "pad_token_id": 2, "tie_word_embeddings": True})
EMBEDDING = "model.tok_embeddings.weight"
HARD = OptimizerSettings(
    lr=1e-2,
    min_lr=1e-3,
    betas=(0.8, 0.9),
    eps=1e-4,
    weight_decay=0.3,
    max_grad_norm=0.05,
    schedule="cosine",
    warmup_steps=2,
    total_steps=6,
)
TINY_STEPS = OptimizerSettings(lr=1e-6)


def train(strategy: Any, steps: int, loss: Any = None) -> list[dict[str, float]]:
    loss = loss or (weighted_nll if strategy.settings.head == "lm" else weighted_value_error)
    return [strategy.train_step(batch_with_eos(seed), loss) for seed in range(steps)]


def batch_with_eos(seed: int = 0) -> DataProto:
    """Real tokens of id 2, some of them learned."""
    batch = make_batch(seed=seed).clone()
    batch["input_ids"][:, 4:6] = 2
    return batch


def weights(strategy: Any) -> dict[str, Tensor]:
    return {name: tensor for bucket in strategy.model_update(1 << 20) for name, tensor in bucket.items()}


def log_probs(data: DataProto, output: Any) -> dict[str, Tensor]:
    values, entropy = output.log_probs_and_entropy(data["input_ids"], data["attention_mask"])
    return {"log_probs": values, "entropy": entropy}


def unusual_batches() -> dict[str, DataProto]:
    """Ids that no vocabulary has where nothing is read, a row without a token, and no rows at all."""
    garbage = batch_with_eos().clone()
    garbage["input_ids"][garbage["attention_mask"] == 0] = 10**6
    garbage["input_ids"][0, 0] = -7
    empty_row = batch_with_eos().clone()
    empty_row["attention_mask"][1] = 0
    empty_row["response_mask"][1] = 0
    return {"plain": batch_with_eos(), "garbage": garbage, "empty row": empty_row, "no rows": batch_with_eos()[:0]}


def observed(strategy: Any, target: Path) -> dict[str, Any]:
    """All that a strategy does with one model, for comparison; the learning rate is that of `strategy`."""
    found: dict[str, Any] = {}
    if strategy.settings.head == "lm":
        found["results"] = {n: strategy.forward_step(batch, log_probs) for n, batch in unusual_batches().items()}
    found["metrics"] = train(strategy, 1)
    found["gradients"] = {name: gradient.clone() for name, gradient in strategy.gradients()}
    found["metrics"] += train(strategy, 5)
    found["weights"] = weights(strategy)
    for name, batch in unusual_batches().items():
        if strategy.settings.head == "lm":
            found["metrics"].append(strategy.train_step(batch, weighted_nll))
            if name != "no rows":
                found[f"gradients of {name}"] = {name: gradient.clone() for name, gradient in strategy.gradients()}

    def exploding(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Any]]:
        loss = weighted_nll if strategy.settings.head == "lm" else weighted_value_error
        return loss(data, output)[0] * torch.inf, {"plain number": 0.5}

    before = weights(strategy)
    (broken,) = train(strategy, 1, exploding)
    found["broken"] = broken["skipped_steps"], broken["lr"], broken["plain number"]
    found["unchanged"] = all(torch.equal(tensor, before[name]) for name, tensor in weights(strategy).items())
    unlearned = DataProto.from_dict({name: make_batch()[name] for name in ("input_ids", "attention_mask")})
    with pytest.raises(ValueError, match="needs `response_mask`"):
        strategy.train_step(unlearned, weighted_nll)
    strategy.save_hf(target)
    found["written"] = {name: tensor.dtype for name, tensor in read_folder(target).items()}
    return found


def megatron(folder: Path, target: Path, changes: dict[str, Any]) -> dict[str, Any]:
    config = settings(folder, **changes)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        return observed(strategy, target)


def reference(folder: Path, **changes: Any) -> HfStrategy:
    strategy = HfStrategy(settings(folder, "hf", **changes))
    strategy.initialize()
    return strategy


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    """Largest error of each tensor, as a share of its largest number."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error, scale = (actual[name].float() - tensor.float()).abs().amax(), tensor.float().abs().amax()
        assert error <= share * scale, f"{name}: {float(error / scale):.2e}"


CASES = [
    (PAD_IS_EOS, "lm", "float32", HARD),
    (TIED, "lm", "float32", HARD),
    (PAD_IS_EOS, "value", "float32", HARD),
    (PAD_IS_EOS, "lm", "bfloat16", HARD),
]
# Of the largest number of a tensor. fp32: sums in another order, enlarged by ten steps of Adam. bfloat16: 2^-8 per
# operation, in layers that round at other places.
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (0.1, 0.1)}


@pytest.mark.parametrize(("model", "head", "dtype", "optimizer"), CASES, ids=["plain", "tied", "value", "bfloat16"])
def test_both_learn_the_same_from_the_same(
    ranks: RankPool, tmp_path: Path, model: ModelConfig, head: str, dtype: str, optimizer: OptimizerSettings
) -> None:
    folder = write_tiny(tmp_path / "model", model)
    changes = {"head": head, "dtype": dtype, "optimizer": optimizer}
    ours = observed(reference(folder, **changes), tmp_path / "hf")
    (theirs,) = ranks.run(megatron, folder, tmp_path / "megatron", changes, world_size=1)
    at_once, in_the_end = TOLERANCES[dtype]
    for name, results in theirs.get("results", {}).items():
        for kind, tensor in results.items():
            assert ours["results"][name][kind].shape == tensor.shape
            assert ours["results"][name][kind].dtype == tensor.dtype == torch.float32
            torch.testing.assert_close(ours["results"][name][kind], tensor, rtol=0, atol=at_once)
    assert {name: gradient.dtype for name, gradient in ours["gradients"].items()} == dict.fromkeys(
        ours["gradients"], torch.float32
    )
    for name in [name for name in theirs if name.startswith("gradients")]:
        if model.tie_word_embeddings:  # Two copies of one tensor, with one gradient.
            torch.testing.assert_close(theirs[name].pop("output.weight"), theirs[name][EMBEDDING], rtol=0, atol=0)
        assert_close(ours[name], theirs[name], at_once if name == "gradients" else in_the_end)
    assert_close(ours["weights"], theirs["weights"], in_the_end)
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine == pytest.approx(other, rel=in_the_end, abs=1e-9)
    # The first step of the warm-up has rate 0; a step that is skipped does not count.
    assert [mine["skipped_steps"] for mine in ours["metrics"]] == [0.0] * 6 + [0.0, 0.0, 0.0, 1.0][: 4 * (head == "lm")]
    for name in ("broken", "unchanged", "written"):
        assert ours[name] == theirs[name], name
    assert ours["broken"][0] == 1 and ours["unchanged"]


def test_the_row_of_the_pad_id_learns_as_its_token_does(tmp_path: Path) -> None:
    """Against central differences of the loss, in the embedding's entry whose gradient is the largest of its row."""
    strategy = reference(write_tiny(tmp_path, PAD_IS_EOS), micro_batch=MicroBatchSettings(rows=6))
    train(strategy, 1)
    row = dict(strategy.gradients())[EMBEDDING][2]
    assert row.count_nonzero() == len(row)
    strategy = reference(tmp_path, optimizer=OptimizerSettings(lr=1e-30, max_grad_norm=1e9))
    entry = int(row.abs().argmax())
    step, losses = 1e-2, []
    embedding = strategy.network.get_input_embeddings().weight
    for shift in (step, -2 * step):
        with torch.no_grad():
            embedding[2, entry] += shift
        losses.append(train(strategy, 1)[0]["loss"])
    # fp32 losses of about 4, differences of about 1e-2: 1e-4 of them is rounding.
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(row[entry]), rel=1e-2)


def test_a_small_rate_moves_every_weight_in_half_precision(tmp_path: Path) -> None:
    """Steps of 1e-6 are far below the spacing of bfloat16 at 0.1, 2^-11; in fp32 masters none is lost."""
    strategy = reference(write_tiny(tmp_path / "model", PAD_IS_EOS), dtype="bfloat16", optimizer=TINY_STEPS)
    assert strategy.trained is not None
    before = {name: master.detach().clone() for name, master in strategy.trained.masters.items()}
    train(strategy, 10)
    for name, master in strategy.trained.masters.items():
        assert master.dtype == torch.float32
        if name != "model.embed_tokens.weight":  # Of the vocabulary only some ids are in the batches.
            moved = (master - before[name]).abs()
            assert (moved > 0).float().mean() > 0.9, name  # 0.3 % without; some go forth and back.
            assert moved.max() < 2e-5, name
        assert torch.equal(strategy.trained.weights[name], master.bfloat16())
    strategy.save_checkpoint(tmp_path / "checkpoint")
    again = reference(tmp_path / "model", dtype="bfloat16", optimizer=TINY_STEPS, seed=8)
    again.load_checkpoint(tmp_path / "checkpoint")
    for one in (strategy, again):
        train(one, 1)
    assert again.trained is not None
    for name, master in again.trained.masters.items():
        assert torch.equal(master, strategy.trained.masters[name]), name


def test_gradients_of_half_precision_are_added_up_in_fp32(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "micro_batch": MicroBatchSettings(rows=1)}
    strategy = reference(write_tiny(tmp_path), **changes)
    assert strategy.trained is not None
    parts: list[dict[str, Tensor]] = []

    def loss(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = weighted_nll(data, output)
        named = [(name, weight) for name, weight in strategy.trained.weights.items()]  # type: ignore[union-attr]
        gradients = torch.autograd.grad(value, [weight for _, weight in named], retain_graph=True)
        parts.append({name: gradient for (name, _), gradient in zip(named, gradients, strict=True)})
        return value, metrics

    strategy.train_step(make_batch(), loss)
    assert len(parts) == 6
    for name, gradient in strategy.trained.gradients().items():
        torch.testing.assert_close(gradient, sum(part[name].float() for part in parts), rtol=1e-6, atol=1e-9)


def test_new_weights_replace_the_masters_too(tmp_path: Path) -> None:
    strategy = reference(write_tiny(tmp_path), dtype="bfloat16")
    strategy.update_weights({EMBEDDING: torch.full((TINY.vocab_size, TINY.hidden_size), 0.25)})
    train(strategy, 1)  # At rate 1e-3, from the new weights.
    assert (weights(strategy)[EMBEDDING].float() - 0.25).abs().max() < 2e-3


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    other = reference(write_tiny(tmp_path / "other", ModelConfig(**TINY.model_dump() | {"intermediate_size": 64})))
    other.save_checkpoint(tmp_path / "checkpoint")
    strategy = reference(write_tiny(tmp_path / "model"))
    before = weights(strategy)
    with pytest.raises(ValueError, match=r"another model: .*gate_proj.weight has shape \(64, 48\) there, \(80, 48\)"):
        strategy.load_checkpoint(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(strategy).items())
