"""What a training step promises: the same update however the batch is cut, complete checkpoints, weights for others."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms import LossTerm, cross_entropy, entropy_term, kl_term, policy_term, total_loss, value_term
from roll.config import MicroBatchSettings, ModelConfig, OptimizerSettings, ParallelSettings
from roll.data.micro_batches import with_plan
from roll.errors import UserError
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto, MicroBatchPlan
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.checkpoint.folder_of_tensors import assert_same_bytes, random_tensors, read_folder, write_folder
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, make_batch, merge_stages, settings, share_of, weighted_nll, write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def terms_of(objective: str, per: Any) -> list[LossTerm]:
    """The loss of PPO's policy with an entropy bonus, of its critic, or of GRPO's policy."""
    policy = policy_term(0.2, 0.2, per=per)
    if objective == "value":
        return [value_term(0.2, per=per)]
    return [policy, kl_term(0.5, "k3", per=per)] if objective == "grpo" else [entropy_term(0.1, per=per), policy]


def make_experience(seed: int = 0) -> DataProto:
    """A batch with everything that losses read; old log-probs and values near, but not at, the model's."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(seed)
    shape = batch["weights"].shape

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator)

    learned = {"log_probs": noise() - 3.5, "values": noise(), "advantages": noise(), "returns": noise()}
    learned["ref_log_probs"] = noise() - 3.5
    return batch.union(DataProto.from_dict(learned))


# (data-parallel ranks, micro-batches as rows of each rank's share, rows of the batch that each rank gets)
CUTS: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = [
    (1, (((0, 1, 2, 3, 4, 5),),), ((0, 1, 2, 3, 4, 5),)),
    (2, (((0, 1, 2),), ((0, 1, 2),)), ((0, 1, 2), (3, 4, 5))),
    (1, (((4, 0), (5,), (1, 3), (2,)),), ((0, 1, 2, 3, 4, 5),)),
    (2, (((0,), (1, 2, 3)), ((0,), (1,))), ((5, 0, 2, 4), (3, 1))),
]


def update_of_rank(
    folder: Path, objective: str, mode: Any, plan: MicroBatchPlan, layout: dict[str, Any]
) -> dict[str, Any]:
    config = settings(folder, head="value" if objective == "value" else "lm", **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        if objective == "value":  # It starts at zero, and no gradient would pass through it to the layers.
            torch.nn.init.constant_(strategy.gpt.output_layer.weight, 0.1)
        share = make_experience().select_idxs(list(plan.rows[state.at.dp])).with_plan(plan)
        metrics = strategy.train_step(share, partial(total_loss, terms_of(objective, mode)))
        return {"metrics": metrics, "gradients": merge_stages(dict(strategy.gradients()))}


@pytest.mark.parametrize(
    ("objective", "mode"),
    [
        ("policy", "token-mean"),
        ("policy", "seq-mean-token-sum"),
        ("value", "token-mean"),
        ("value", "seq-mean-token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("grpo", 7.0),
    ],
)
def test_an_update_does_not_depend_on_ranks_and_micro_batches(
    ranks: RankPool, folder: Path, objective: str, mode: Any
) -> None:
    outcomes = []
    for dp, shares, rows in CUTS:
        plan = MicroBatchPlan(shares=shares, rows=rows)
        outcomes += ranks.run(update_of_rank, folder, objective, mode, plan, {}, world_size=dp)
    whole, *others = outcomes
    for other in others:
        for name, value in whole["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        for name, gradient in whole["gradients"].items():
            scale = gradient.abs().max()
            assert scale > 0, name
            assert (other["gradients"][name] - gradient).abs().max() <= 1e-5 * scale, name


def on_policy_ratio(folder: Path, layout: dict[str, Any]) -> dict[str, float]:
    """Log-probs as the actor computes them for a rollout, then a first update from them, cut differently."""
    config = settings(folder, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        batch = make_experience()

        def forward(data: DataProto, output: Any) -> dict[str, Tensor]:
            return {"log_probs": output.log_probs(data["input_ids"], data["response_mask"])}

        # As the driver does it: results come from the rank that reports, the next batch goes to the leader.
        old = merge_stages(strategy.forward_step(with_plan(batch, 1, MicroBatchSettings(rows=6)), forward) or {})
        seen: list[float] = []

        def loss(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
            new = output.log_probs(data["input_ids"], data["response_mask"])
            mask = data["response_mask"][:, 1:].bool()
            ratio = (new - data["log_probs"]).exp()[mask]
            seen.append(float((ratio - 1).abs().max()) if len(ratio) else 0.0)
            return cross_entropy(new, mask).sum() / data.normalizers.tokens, {}

        fresh = batch.select(["input_ids", "attention_mask", "response_mask"]).union(DataProto.from_dict(old))
        strategy.train_step(fresh, loss)
        return {"error": max(seen, default=0.0)} if state.is_reporter else {"error": 0.0}


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_the_first_ratio_on_policy_is_one(
    ranks: RankPool, folder: Path, world_size: int, layout: dict[str, Any]
) -> None:
    # fp32; the matrix products of another micro-batch size may sum in another order.
    for outcome in ranks.run(on_policy_ratio, folder, layout, world_size=world_size):
        assert outcome["error"] <= 1e-6


def weights_after_updates(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Two updates; after each, what `model_update` streams and the actor's own log-probs."""
    config = settings(folder, **layout, optimizer=OptimizerSettings(lr=1e-2))
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        syncs = []
        for seed in (0, 1):
            strategy.train_step(make_batch(seed=seed), weighted_nll)
            streamed: dict[str, Tensor] = {}
            largest = 0
            for bucket in strategy.model_update(bucket_bytes=20_000):
                largest = max(largest, len(bucket))
                streamed |= bucket
            results = strategy.forward_step(make_batch(), plain_log_probs)
            syncs.append({"weights": merge_stages(streamed), "log_probs": results, "largest": largest})
        return {"syncs": syncs, "reports": state.is_reporter}


def plain_log_probs(data: DataProto, output: Any) -> dict[str, Tensor]:
    return {"log_probs": output.log_probs(data["input_ids"], data["attention_mask"])}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2}), (2, {"mode": "isp", "sp": 2, "wp": 2}), (2, {"cp": 2})],
)
def test_the_rollout_model_follows_two_updates(
    ranks: RankPool, folder: Path, world_size: int, layout: dict[str, Any]
) -> None:
    rollout = HfStrategy(settings(folder, "hf", optimizer=None))
    rollout.initialize()
    outcomes = ranks.run(weights_after_updates, folder, layout, world_size=world_size)
    (reporter,) = [outcome for outcome in outcomes if outcome["reports"]]
    for sync in reporter["syncs"]:
        assert 1 < sync["largest"] < len(sync["weights"]), "several buckets of several tensors each"
        rollout.update_weights(sync["weights"])
        theirs = rollout.forward_step(make_batch(), plain_log_probs)["log_probs"]
        torch.testing.assert_close(theirs, sync["log_probs"]["log_probs"], rtol=0, atol=1e-5)
    first, second = (sync["log_probs"]["log_probs"] for sync in reporter["syncs"])
    assert (first - second).abs().max() > 1e-2, "the updates changed the model"


def continued(folder: Path, layout: dict[str, Any], checkpoint: Path, stages: tuple[str, ...]) -> Any:
    """Run stages of three steps each; a stage is `train`, `save` or `load`."""
    optimizer = OptimizerSettings(lr=1e-2, schedule="cosine", total_steps=8, warmup_steps=2, weight_decay=0.1)
    config = settings(folder, **layout, optimizer=optimizer)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        steps = []
        for stage in stages:
            if stage == "save":
                strategy.save_checkpoint(checkpoint)
            elif stage == "load":
                strategy.load_checkpoint(checkpoint)
            else:
                for step in range(3):
                    batch = make_batch(seed=step + (10 if "save" in stages or "load" in stages else 0))
                    batch = batch.chunk(state.degrees.dp)[state.at.dp]
                    steps.append(strategy.train_step(batch, weighted_nll))
        weights: dict[str, Tensor] = {}
        for bucket in strategy.model_update(1 << 20):
            weights |= bucket
        return {"steps": steps, "weights": merge_stages(weights), "reports": state.is_reporter}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, {"tp": 2}), (2, {"tp": 2})),
        ((2, {"tp": 2}), (2, {"pp": 2})),
        ((2, {}), (4, {"tp": 2, "pp": 2})),
        ((4, {"tp": 2, "pp": 2, "mode": "fsp"}), (1, {})),
        ((2, {"mode": "fsp", "tp": 2}), (4, {"mode": "isp", "sp": 2, "wp": 2})),
        ((4, {"mode": "isp", "sp": 2, "wp": 4}), (2, {"mode": "isp", "wp": 2})),
        ((4, {"mode": "isp", "wp": 2, "pp": 2}), (2, {"mode": "msp", "tp": 2})),
        ((2, {"cp": 2, "cp_comm": "ring"}), (1, {})),
    ],
    ids=str,
)
def test_continuing_from_a_checkpoint_equals_never_having_stopped(
    ranks: RankPool, folder: Path, tmp_path: Path, saved: Any, loaded: Any
) -> None:
    checkpoint = tmp_path / "checkpoint"
    whole = ranks.run(continued, folder, dict(saved[1]), checkpoint, ("train", "save", "train"), world_size=saved[0])
    rest = ranks.run(continued, folder, dict(loaded[1]), checkpoint, ("load", "train"), world_size=loaded[0])
    expected, actual = (next(outcome for outcome in side if outcome["reports"]) for side in (whole, rest))
    for one, other in zip(expected["steps"][3:], actual["steps"], strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name
    for name, weight in expected["weights"].items():
        # Adam divides by the root of a second moment: rounding in a tiny gradient grows to a few 1e-5 of the weight.
        np.testing.assert_allclose(actual["weights"][name], weight, rtol=0, atol=1e-4, err_msg=name)


def test_a_checkpoint_from_before_the_first_step(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    whole = ranks.run(continued, folder, {"tp": 2}, tmp_path / "later", ("train", "save"), world_size=2)
    ranks.run(continued, folder, {"tp": 2}, checkpoint, ("save",), world_size=2)
    rest = ranks.run(continued, folder, {"mode": "isp", "wp": 2}, checkpoint, ("load", "train"), world_size=2)
    for one, other in zip(whole[0]["steps"], rest[0]["steps"], strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name


def written_again(folder: Path, target: Path, layout: dict[str, Any]) -> set[torch.dtype]:
    """Load for training in bfloat16, write again; the types in which weights go to other systems."""
    config = settings(folder, init="load", dtype="bfloat16", **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        strategy.save_hf(target)
        return {tensor.dtype for bucket in strategy.model_update(1 << 20) for tensor in bucket.values()}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"mode": "isp", "sp": 2, "wp": 2}], ids=str)
def test_half_precision_stays_what_it_was(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    # In mode isp the optimizer's fp32 weights are the only ones.
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(TINY, "lm").items()}
    folder = write_folder(tmp_path / "there", TINY, tensors, files=2)
    types = ranks.run(written_again, folder, tmp_path / "again", layout, world_size=2)
    assert types == [{torch.bfloat16}] * 2
    assert_same_bytes(read_folder(tmp_path / "again"), tensors)
    assert '"bfloat16"' in (tmp_path / "again" / "config.json").read_text()


def degenerate_steps(folder: Path, layout: dict[str, Any]) -> Any:
    config = settings(folder, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()

        def weights() -> dict[str, Tensor]:
            return {k: v for bucket in strategy.model_update(1 << 20) for k, v in bucket.items()}

        before = weights()
        no_tokens = make_batch().clone()
        no_tokens["response_mask"].zero_()
        empty = strategy.train_step(no_tokens, weighted_nll)

        def exploding(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = weighted_nll(data, output)
            return loss * float("nan"), metrics

        broken = strategy.train_step(make_batch(), exploding)
        after = weights()
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        # One share has no response token: its rank still takes part, and contributes exactly zero.
        partly = make_batch().clone()
        partly["response_mask"][3:] = 0
        share = partly.chunk(state.degrees.dp)[state.at.dp]
        good = strategy.train_step(share, weighted_nll)
        return {"empty": empty, "broken": broken, "unchanged": unchanged, "good": good, "reports": state.is_reporter}


@pytest.mark.parametrize(("world_size", "layout"), [(2, {"tp": 2}), (2, {"pp": 2}), (2, {})])
def test_steps_without_a_signal_change_nothing_and_say_so(
    ranks: RankPool, folder: Path, world_size: int, layout: dict[str, Any]
) -> None:
    for outcome in ranks.run(degenerate_steps, folder, layout, world_size=world_size):
        assert outcome["empty"] == {"lr": 1e-3, "skipped_steps": 1}, "there is no loss where there is no token"
        assert outcome["broken"]["skipped_steps"] == 1
        assert outcome["unchanged"]
        assert outcome["good"]["skipped_steps"] == 0
        if outcome["reports"]:
            assert outcome["good"]["loss"] > 0


def refused_batch(folder: Path, layout: dict[str, Any], kind: str) -> str:
    config = settings(folder, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        batch = make_batch().clone()
        if kind == "id":
            batch["input_ids"][1, 3] = 40
        elif kind == "hole":
            batch["attention_mask"][4, 5] = 0
        if not state.is_leader:
            batch = batch.stub()
        with pytest.raises(ValueError, match="row") as refusal:
            strategy.forward_step(batch, plain_log_probs)
        return str(refusal.value)


@pytest.mark.parametrize("kind", ["id", "hole"])
@pytest.mark.parametrize(("world_size", "layout"), [(2, {"tp": 2}), (4, {"tp": 2, "pp": 2})])
def test_a_bad_batch_is_refused_on_every_rank_alike(
    ranks: RankPool, folder: Path, world_size: int, layout: dict[str, Any], kind: str
) -> None:
    messages = ranks.run(refused_batch, folder, layout, kind, world_size=world_size)
    assert len(set(messages)) == 1
    assert ("40" in messages[0] and "row 1" in messages[0]) if kind == "id" else "row 4" in messages[0]


def refused_share(folder: Path, layout: dict[str, Any]) -> list[str]:
    """One data-parallel share is bad, or no share says what is learned from: everyone hears of it, nobody waits."""
    config = settings(folder, **layout)
    messages = []
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        bad = make_batch().clone()
        bad["input_ids"][1, 3] = 40
        without_mask = DataProto.from_dict({name: make_batch()[name] for name in ("input_ids", "attention_mask")})
        for batch in (bad, without_mask):
            share = batch.chunk(state.degrees.dp)[state.at.dp]
            with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the message is what is returned
                strategy.train_step(share, weighted_nll)
            messages.append(str(refusal.value))
    return messages


@pytest.mark.parametrize("layout", [{}, {"mode": "isp", "wp": 2}], ids=str)
def test_a_bad_share_is_refused_by_every_share(ranks: RankPool, folder: Path, layout: dict[str, Any]) -> None:
    first, second = ranks.run(refused_share, folder, layout, world_size=2)
    assert "row 1" in first[0]
    assert second[0] == f"the batch of data-parallel rank 0 was refused: {first[0]}"
    assert "response_mask" in first[1]
    assert first[1] == second[1]


def step_with_budget(folder: Path, layout: dict[str, Any]) -> dict[str, float]:
    # Shares of 6 + 7 + 8 and 1 + 12 + 9 tokens: one micro-batch and two.
    config = settings(folder, **layout, micro_batch=MicroBatchSettings(max_tokens=21))
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        share = make_batch().chunk(state.degrees.dp)[state.at.dp]
        results = strategy.forward_step(share, plain_log_probs)
        assert results is not None
        assert len(results["log_probs"]) == len(share)
        return strategy.train_step(share, weighted_nll)


def test_shares_that_gather_weights_together_may_need_unequal_numbers_of_micro_batches(
    ranks: RankPool, folder: Path
) -> None:
    (alone,) = ranks.run(step_with_budget, folder, {}, world_size=1)
    for outcome in ranks.run(step_with_budget, folder, {"mode": "isp", "wp": 2}, world_size=2):
        assert outcome["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert outcome["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def metrics_of_changing_names(folder: Path, by_rank: bool, layout: dict[str, Any]) -> str:
    """The error of a loss whose metrics have other names on another rank, or in another micro-batch."""
    config, calls = settings(folder, **layout), itertools.count()

    def loss(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        total, _ = weighted_nll(data, output)
        odd = (dist.get_rank() if by_rank else next(calls)) % 2
        return total, {"odd" if odd else "even": total.detach()}

    if "name" in layout:
        strategy: Any = HfStrategy(config)
        strategy.initialize()
        with pytest.raises(UserError) as error:
            strategy.train_step(make_batch(), loss)
        return str(error.value)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        with pytest.raises(UserError) as error:
            strategy.train_step(share_of(make_batch(), state.at.dp, state.degrees.dp), loss)
        return str(error.value)


@pytest.mark.parametrize(
    ("world_size", "by_rank", "layout"),
    [(2, True, {}), (2, False, {}), (1, False, {}), (1, False, {"name": "hf"})],
)
def test_metrics_of_different_names_are_refused_on_every_rank(
    ranks: RankPool, folder: Path, world_size: int, by_rank: bool, layout: dict[str, Any]
) -> None:
    layout = layout | {"micro_batch": MicroBatchSettings(rows=1)}
    for rank, error in enumerate(ranks.run(metrics_of_changing_names, folder, by_rank, layout, world_size=world_size)):
        here = ("even", "odd")[rank] if by_rank else "even and odd"
        assert error == f"a loss has the same metrics in all micro-batches on all ranks; this rank has {here}"


def refused_degrees(folder: Path, groups: dict[str, Any], layout: dict[str, Any]) -> str:
    with parallel_groups(ParallelSettings(**groups)) as state, pytest.raises(ValueError, match="parallel") as refusal:
        MegatronTrainStrategy(settings(folder, **layout), state)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("groups", "layout", "message"),
    [
        ({"pp": 2}, {"pp": 2}, "parallel.pp: 2 does not divide the model's num_hidden_layers 3; 1 would fit"),
        ({"cp": 2}, {}, "parallel: the settings say .*cp=1.*, the groups were made for .*cp=2"),
        ({"pp": 2}, {}, "parallel: the settings say .*pp=1.*, the groups were made for .*pp=2"),
        ({"tp": 2}, {"mode": "fsp", "tp": 2}, "parallel: the settings say .*fsp.*, the groups were made for .*mtp"),
    ],
)
def test_degrees_that_fit_neither_model_nor_groups_are_refused(
    ranks: RankPool, tmp_path: Path, groups: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    folder = write_tiny(tmp_path, ModelConfig(**TINY.model_dump() | {"num_hidden_layers": 3}))
    for text in ranks.run(refused_degrees, folder, groups, layout, world_size=2):
        assert re.search(message, text)


def test_training_needs_an_optimizer(folder: Path) -> None:
    with pytest.raises(ValueError, match="optimizer"):
        settings(folder, optimizer=None)


def results_without_rows(folder: Path) -> dict[str, Any]:
    """A step and a forward pass in which the second share has no rows."""
    config = settings(folder)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        share = make_batch()[:6] if state.at.dp == 0 else make_batch()[:0]

        def forward(data: DataProto, output: Any) -> dict[str, Tensor]:
            return {"log_probs": output.log_probs(data["input_ids"], data["attention_mask"])}

        shape = tuple(strategy.forward_step(share, forward)["log_probs"].shape)
        return {"shape": shape, "metrics": strategy.train_step(share, weighted_nll)}


def test_a_share_without_rows_takes_part_in_the_step(ranks: RankPool, folder: Path) -> None:
    (alone,) = ranks.run(results_without_rows, folder, world_size=1)
    first, second = ranks.run(results_without_rows, folder, world_size=2)
    assert (first["shape"], second["shape"]) == ((6, 11), (0, 11))
    for outcome in (first, second):  # the same sums, in fp32
        for name, value in alone["metrics"].items():
            assert outcome["metrics"][name] == pytest.approx(value, rel=1e-5), name
