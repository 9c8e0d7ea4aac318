"""The loss of a dispatched model from `labels`, as the document's loop has it: one process' loss and gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from roll.parallel.sequence import (
    dispatch_modules,
    dispatched_modules,
    get_sequence_parallel_group,
    pad_for_sequence_parallel,
    reduce_sequence_parallel_loss,
    sequence_parallel_groups,
    split_for_sequence_parallel,
)
from roll.parallel.sequence.model_loss import mean_over_ranks, shift_over_ranks
from tests.parallel.sequence.one_process import (
    How,
    differences,
    exact_loss,
    gradients,
    make_batch,
    reduced,
    reference,
    split_run,
)
from tests.parallel.sequence.test_groups import refusal
from tests.parallel.sequence.tiny_models import make_exact, make_model
from tests.rank_pool import RankPool

# Every input, and labels that are all there, on few ranks, counted by another rank than the one that predicts them, or
# predicted by none. Documents of packed rows predict each other's first token under `all`, as in transformers.
CASES = [
    *product(("dense", "padded", "left_padded", "packed"), ("uneven", "one_rank")),
    *product(("dense", "packed"), ("all",)),
    *product(("dense",), ("border", "first", "none")),
    ("cu_seqlens", "all"),
]
FP32: dict[str, Any] = {"logits": 1e-6, "gradient": 1e-5}  # rounding of sums in another order
FP64: dict[str, Any] = {"logits": 1e-10, "gradient": 1e-10}


def failures() -> dict[str, Any]:
    """Cases in which this rank differs from one process: under averaged gradients with the loss reduced and not, and
    under gradients that are added up, in fp64 and in eval mode.
    """
    batches = {f"{inputs}-{labels}": make_batch(inputs, labels) for inputs, labels in CASES}
    with sequence_parallel_groups(dist.get_world_size()):
        failed: dict[str, Any] = {
            "fp32": differences(make_model("qwen3"), batches, hows=("labels", "unreduced"), **FP32)
        }
        exact: Any = make_exact(make_model("mistral", sliding_window=5, dtype=torch.float64)).eval()
        exact.loss_function = exact_loss
        failed["fp64"] = differences(exact, batches, reducer="sum", hows=("labels",), **FP64)
    return {name: wrong for name, wrong in failed.items() if wrong}


@pytest.mark.parametrize("size", [2, 4])
def test_labels_on_ranks_are_labels_of_one_process(ranks: RankPool, size: int) -> None:
    failed = ranks.run(failures, world_size=size, timeout=240)
    assert {f"rank {rank}": wrong for rank, wrong in enumerate(failed) if wrong} == {}


def the_documents_loop(llm: Any, batch: tuple[Tensor, ...], reduces: bool) -> tuple[Tensor, Tensor]:
    """The document's lines on one batch: the loss before and after its reduction; backward through one of them."""
    input_ids, labels, position_ids, attention_mask = batch
    input_ids, labels, position_ids, attention_mask = pad_for_sequence_parallel(
        input_ids, labels, position_ids, attention_mask
    )
    # attention mask should not be split
    input_ids, labels, position_ids = split_for_sequence_parallel(input_ids, labels, position_ids)
    outputs = llm(input_ids=input_ids, labels=labels, position_ids=position_ids, attention_mask=attention_mask)
    num_tokens_per_rank = (labels != -100).sum()
    loss = reduce_sequence_parallel_loss(outputs.loss, num_tokens_per_rank)
    (loss if reduces else outputs.loss).backward()
    return outputs.loss.detach(), loss.detach()


def documents_batch() -> tuple[Tensor, ...]:
    """Rows of 30 and 17 of 31 tokens with a prompt of 12: neither 2 nor 4 divide them."""
    batch = make_batch("dense", "all", seed=3)
    tokens, labels = batch.tokens[:, :31], batch.labels[:, :31].clone()
    mask = (torch.arange(31) < torch.tensor([[30], [17]])).long()
    labels[mask == 0] = -100
    labels[0, :12] = -100
    return tokens, labels, torch.arange(31).repeat(2, 1), mask


def losses_and_errors() -> dict[str, Any]:
    """Of the document's loop under DistributedDataParallel, reduced and not; one process is transformers alone."""
    batch = documents_batch()
    one = make_model("llama", seed=1)
    expected = one(input_ids=batch[0], labels=batch[1], position_ids=batch[2], attention_mask=batch[3]).loss
    expected.backward()
    found: dict[str, Any] = {"one process": float(expected.detach())}
    with sequence_parallel_groups(dist.get_world_size()):
        model = make_model("llama", seed=1)
        dispatch_modules(model)
        llm = DistributedDataParallel(model)
        for reduces in (True, False):
            model.zero_grad()
            found[f"losses {reduces}"] = [float(loss) for loss in the_documents_loop(llm, batch, reduces)]
            errors = [
                float((weight.grad - wanted.grad).abs().max() / wanted.grad.abs().max())
                for weight, wanted in zip(model.parameters(), one.parameters(), strict=True)
            ]
            found[f"error {reduces}"] = max(errors)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_the_documents_loop(ranks: RankPool, size: int) -> None:
    """The loss is the whole sequence's on every rank, before the reduction too; DDP's gradients are one process'."""
    for found in ranks.run(losses_and_errors, world_size=size):
        for reduces in (True, False):
            assert found[f"losses {reduces}"] == pytest.approx([found["one process"]] * 2, rel=1e-6)
            assert found[f"error {reduces}"] <= 1e-5


def test_shifting_and_the_mean_by_hand(ranks: RankPool) -> None:
    """Rows 1 2 | 3 4 and 5 6 | 7 8 over two ranks; losses 6 of three targets and 2 of one: a mean of 8 / 4."""
    first, second = ranks.run(by_hand, world_size=2)
    assert first["shifted"] == [[2, 3], [6, 7]]
    assert second["shifted"] == [[4, -100], [8, -100]]
    for found in (first, second):
        assert found["means"] == [2.0, 1.0, 0.0]  # 8 / 4, 8 / 8 of the given number, nothing to divide by
        assert found["gradients"] == [0.75, 0.375, 3.0]  # what both propagate, 1 + 2, over 4, over 8, over nothing
    assert shift_over_ranks(torch.tensor([[1, 2, 3]]), None).tolist() == [[2, 3, -100]]
    alone = torch.tensor(6.0, requires_grad=True)
    mean = mean_over_ranks(alone, torch.tensor(3), None, None)
    mean.backward()
    assert (float(mean.detach()), float(alone.grad)) == (2.0, pytest.approx(1 / 3))  # type: ignore[arg-type]


def by_hand() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"means": [], "gradients": []}
    with sequence_parallel_groups(2) as groups:
        labels = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])[:, 2 * rank : 2 * rank + 2]
        found["shifted"] = shift_over_ranks(labels, groups.sequence).tolist()
        for summed, counts, items in (
            ((6.0, 2.0), (3, 1), None),
            ((6.0, 2.0), (3, 1), 8.0),
            ((0.0, 0.0), (0, 0), None),
        ):
            own = torch.tensor(summed[rank], requires_grad=True)
            mean = mean_over_ranks(own, torch.tensor(counts[rank]), items, groups.sequence)
            (mean * (1 + rank)).backward()
            found["means"].append(float(mean.detach()))
            found["gradients"].append(float(own.grad))  # type: ignore[arg-type]
    return found


def number_of_items() -> dict[str, bool]:
    """num_items_in_batch of a step's micro-batches, as transformers' Trainer counts it, beside one process."""
    batches = [make_batch("dense", "uneven", seed=0), make_batch("padded", "one_rank", seed=1)]
    items = sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)
    one, model = make_model("llama"), make_model("llama")
    expected = torch.zeros(())
    for batch in batches:
        loss = one(
            batch.tokens, attention_mask=batch.attention_mask, labels=batch.labels, num_items_in_batch=items
        ).loss
        loss.backward()
        expected += loss.detach()
    found = {}
    ways: list[tuple[How, Any]] = [("labels", items), ("unreduced", torch.tensor(items)), ("shifted", float(items))]
    with sequence_parallel_groups(dist.get_world_size()), dispatched_modules(model):
        for how, given in ways:
            model.zero_grad()
            losses = [split_run(model, batch, how=how, num_items_in_batch=given)[1] for batch in batches]
            total = reduced(gradients(model), "mean", get_sequence_parallel_group())
            found[f"loss {how}"] = bool(torch.isclose(sum(losses, torch.zeros(())), expected, rtol=1e-6, atol=0))
            found[f"gradients {how}"] = all(
                bool((total[name] - value).abs().max() <= 1e-5 * value.abs().max())
                for name, value in gradients(one).items()
            )
    return found


def test_one_mean_over_micro_batches(ranks: RankPool) -> None:
    for found in ranks.run(number_of_items, world_size=2):
        assert all(found.values()), found


def sum_alone(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    return logits.sum()


def other_label(
    logits: Tensor, labels: Tensor, num_items_in_batch: int, shift_labels: Tensor, ignore_index: int = -1
) -> Tensor:
    return logits.sum()


def fails_on_rank_1(logits: Tensor, labels: Tensor, num_items_in_batch: int, shift_labels: Tensor, **_: Any) -> Tensor:
    if dist.get_rank():
        raise ZeroDivisionError("of a user's own")
    return logits.sum()


def misuse() -> dict[str, str]:
    """Messages by case, and whether the model has its own loss function afterwards."""
    rank, labels = dist.get_rank(), make_batch("dense", "all").tokens
    own = labels.chunk(2, dim=1)[rank]
    cases: dict[str, dict[str, Any]] = {
        "both": {"labels": own, "shift_labels": own},
        "both on one": {"labels": own} | ({"shift_labels": own} if rank else {}),
        "one of both": {"shift_labels": own} if rank else {"labels": own},
        "on one": {"labels": own} if rank else {},
        "whole": {"labels": labels},
        "floats": {"shift_labels": own.float()},
        "no tensor": {"labels": own.tolist()},
        "no items": {"labels": own, "num_items_in_batch": 0},
        "many items": {"labels": own, "num_items_in_batch": torch.ones(2)},
        "items differ": {"labels": own, "num_items_in_batch": 3 + rank},
        "outside": {"labels": own.masked_fill(torch.arange(16) == 9, 60) if rank else own},
    }
    with sequence_parallel_groups(2):
        model = make_model()
        with dispatched_modules(model):
            found = {name: refusal(lambda case=case: model(own, **case)) for name, case in cases.items()}
            refusal(lambda: model(own, **cases["items differ"]))
            found["kept after a failure"] = str("_loss_function" in model.__dict__)
            found["no labels"] = str(model(own, num_items_in_batch=3).loss)
            model(own, labels=own)
        found["kept"] = str("_loss_function" in model.__dict__)
        model.loss_function = fails_on_rank_1
        with dispatched_modules(model):
            found["failing"] = refusal(lambda: model(own, labels=own))
        for function in (sum_alone, other_label):
            model.loss_function = function
            with dispatched_modules(model):
                found[function.__name__] = refusal(lambda: model(own, labels=own))
            assert model.loss_function is function
        model.loss_function = exact_loss
        with dispatched_modules(model):
            model(own, labels=own)
            found["own given back"] = str(model.loss_function is exact_loss)
        forward = model.forward
        model.forward = lambda input_ids=None, labels=None, **others: forward(input_ids=input_ids, **others)
        with dispatched_modules(model):
            found["its own loss"] = refusal(lambda: model(own, labels=own))
    return found


def test_misuse(ranks: RankPool) -> None:
    first, second = ranks.run(misuse, world_size=2)
    assert first == second
    part = "must be those of this rank's part, (2, 16) integers, got"
    both = "the model takes labels or shift_labels, not both: labels are shifted by the model, shift_labels are not"
    differs = "differs between the ranks of the group:"
    assert first == {
        "both": f"UserError: {both}",
        "both on one": f"UserError: rank 1 of the group: {both}",
        "one of both": f"UserError: labels {differs} 'labels', 'shift_labels'",
        "on one": f"UserError: labels {differs} None, 'labels'",
        "whole": f"UserError: labels {part} (2, 32) torch.int64",
        "floats": f"UserError: shift_labels {part} (2, 16) torch.float32",
        "no tensor": f"UserError: labels {part} list",
        "no items": "UserError: num_items_in_batch must be one positive number, got 0",
        "many items": "UserError: num_items_in_batch must be one positive number, got tensor([1., 1.])",
        "items differ": f"UserError: num_items_in_batch {differs} 3.0, 4.0",
        "outside": "UserError: rank 1 of the group: labels: 60 is outside the vocabulary of 48",
        "failing": "UserError: rank 1 of the group: the loss function raised ZeroDivisionError: of a user's own",
        "no labels": "None",
        "kept after a failure": "False",
        "kept": "False",
        "sum_alone": "UserError: the loss function sum_alone takes no shift_labels and no num_items_in_batch, so that "
        "its parts cannot be added up: compute the loss from the logits",
        "other_label": "UserError: the loss function ignores labels of -1, not of -100",
        "own given back": "True",
        "its own loss": "UserError: LlamaForCausalLM called its loss function 0 times for its labels: what its loss "
        "is made of is not known; compute it from the logits",
    }


def test_one_rank_alone_is_the_same_loss() -> None:
    """Before init a part is the whole: transformers' loss, and zero where it has 0 / 0."""
    model, batch = make_model("llama"), make_batch("packed", "all")
    _, expected, wanted = reference(model, batch)
    model.zero_grad()
    with dispatched_modules(model):
        _, loss = split_run(model, batch, how="unreduced")
        found = gradients(model)
        nothing = model(batch.tokens, labels=make_batch("dense", "first").labels).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max()
    assert float(nothing.detach()) == 0.0
    assert model(batch.tokens, labels=make_batch("dense", "first").labels).loss.isnan()
