"""XTuner's later call forms of pad, split and reduce, beside the document's; values worked out by hand."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.parallel.sequence import (
    get_sequence_parallel_group,
    pad_for_sequence_parallel,
    reduce_sequence_parallel_loss,
    sequence_parallel_groups,
    split_for_sequence_parallel,
)
from tests.rank_pool import RankPool

pad: Any = pad_for_sequence_parallel
split: Any = split_for_sequence_parallel
reduce: Any = reduce_sequence_parallel_loss


def calls() -> dict[str, Any]:
    """Results by form, of four ranks in groups of two: positional, by name, mixed."""
    ids, rank = torch.tensor([[11, 12, 13], [21, 22, 23]]), dist.get_rank()
    mean, tokens = torch.tensor([2.0, 6.0, 1.0, 3.0][rank], requires_grad=True), torch.tensor([3, 1, 2, 2][rank])
    scale = [0.375, 0.125, 0.25, 0.25][rank]  # any weights, not only numbers of tokens
    with sequence_parallel_groups(2):
        group = get_sequence_parallel_group()
        whole = pad(ids, 7)
        losses = [
            reduce(mean, tokens),
            reduce(mean, tokens, group),
            reduce(mean, tokens, None),
            reduce(mean, loss_scale=tokens),
            reduce(mean_loss=mean, loss_scale=tokens, sp_group=group),
            reduce(mean, tokens, sp_group=group),
            reduce(mean, scale, group),
            reduce(mean, tokens, group, reducer="mean"),
        ]
        losses[-1].backward()
        assert mean.grad is not None
        return {
            "padded": [
                each.tolist()
                for each in (whole, pad(ids, 7, 1), pad(ids, padding_value=7), pad(tensor=ids, padding_value=7, dim=-1))
            ],
            "rows": [pad(ids[:1], 7, 0).tolist(), pad(ids[:1], padding_value=7, dim=-2).tolist()],
            "one dim": pad(ids[0], -100).tolist(),
            "floats": pad(torch.tensor([[0.5]]), 0.25).tolist(),
            "split": [
                each.tolist()
                for each in (
                    split(whole, 1, group),
                    split(whole, dim=1, sp_group=group),
                    split(input=whole, dim=-1, sp_group=group),
                    split(whole, 1),
                    split(whole, 1, None),
                )
            ],
            "split rows": split(ids, 0, group).tolist(),
            "other group": split(ids.repeat(2, 1), 0, dist.group.WORLD).tolist(),
            "losses": [float(loss.detach()) for loss in losses],
            "gradient": float(mean.grad),
            "count": int(tokens),
            "document": [type(pad(ids, None)).__name__, len(pad(ids, ids)), len(split(whole, None, whole))],
        }


def test_later_forms(ranks: RankPool) -> None:
    found = ranks.run(calls, world_size=4)
    for rank, each in enumerate(found):
        second = rank % 2
        assert each["padded"] == [[[11, 12, 13, 7], [21, 22, 23, 7]]] * 4
        assert each["rows"] == [[[11, 12, 13], [7, 7, 7]]] * 2
        assert each["one dim"] == [11, 12, 13, -100]
        assert each["floats"] == [[0.5, 0.25]]
        assert each["split"] == [[[13, 7], [23, 7]] if second else [[11, 12], [21, 22]]] * 5
        assert each["split rows"] == [[21, 22, 23] if second else [11, 12, 13]]
        assert each["other group"] == [[21, 22, 23] if second else [11, 12, 13]]
        # (3 * 2 + 1 * 6) / 4 and (2 * 1 + 2 * 3) / 4; two ranks times 3/4, 1/4, 1/2, 1/2
        assert each["losses"] == [[3.0, 3.0, 2.0, 2.0][rank]] * 8
        assert each["gradient"] == [1.5, 0.5, 1.0, 1.0][rank]
        assert each["count"] == [3, 1, 2, 2][rank]  # not overwritten
        assert each["document"] == ["tuple", 4, 3]


IDS = torch.ones(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad(IDS, "0"), "padding_value must be a number, got str"),
        (lambda: pad(IDS, padding_value=None), "padding_value must be a number, got NoneType"),
        (lambda: pad(IDS, [[1]]), "padding_value must be a number, got list"),
        (lambda: pad(IDS, 0, None), "dim must be an integer, got NoneType"),
        (lambda: pad(IDS, 0, IDS), "dim must be an integer, got Tensor"),
        (lambda: pad(IDS, 0, 1.0), "dim must be an integer, got float"),
        (lambda: pad(IDS, True), "padding_value must be a number, got bool"),
        (lambda: pad(IDS, IDS, 1), r"position_ids must be a tensor or None, got int"),
        (lambda: pad([1, 2]), r"tokens must be a tensor, got list"),
        (lambda: pad([1, 2], 0), r"tensor must be a tensor, got list"),
        (lambda: split(IDS, "1"), "dim must be an integer, got str"),
        (lambda: split([1, 2], 0), "input must be a tensor, got list"),
        (lambda: split(IDS, 1, "sp"), "the group must be a process group .*, got str"),
        (lambda: reduce(torch.ones(()), 1, 2), "the group must be a process group .*, got int"),
        (lambda: reduce(2.0, 1), "mean_loss must be a tensor, got float"),
        (lambda: reduce(torch.ones(()), None, None), "num_tokens must be a number, got NoneType"),
        (lambda: reduce(torch.ones(()), 1, total_tokens="3"), "total_tokens must be a number, got str"),
        (lambda: pad(IDS, 0, 2), r"dim 2 .*\(2, 4\)"),
        (lambda: split(IDS, 2), r"dim 2 .*\(2, 4\)"),
    ],
)
def test_values_of_neither_form(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pad(tokens=IDS, padding_value=0),
            r"pad_for_sequence_parallel: .*; it is called as pad_for_sequence_parallel\(tokens, labels=None, "
            r"position_ids=None, attention_mask=None\) or pad_for_sequence_parallel\(tensor, padding_value, dim=-1\)",
        ),
        (
            lambda: split(IDS, sp_group=None),
            r"missing a required argument: 'dim'; it is called as split_for_sequence_parallel\(tokens, labels=None, "
            r"position_ids=None\) or split_for_sequence_parallel\(input, dim, sp_group=None\)",
        ),
        (
            lambda: reduce(torch.ones(()), num_tokens_for_loss=2),
            r"or reduce_sequence_parallel_loss\(mean_loss, loss_scale, sp_group=None\)",
        ),
        (lambda: reduce(torch.ones(()), 1, None, "mean"), r"reduce_sequence_parallel_loss: too many positional"),
    ],
)
def test_arguments_of_neither_form(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_the_documents_form_is_the_one_that_is_shown() -> None:
    assert list(inspect.signature(pad).parameters)[:4] == ["tokens", "labels", "position_ids", "attention_mask"]
    assert list(inspect.signature(split).parameters)[:3] == ["tokens", "labels", "position_ids"]
    assert list(inspect.signature(reduce).parameters)[:2] == ["mean_loss", "num_tokens"]
