"""Padding, splitting and shifting, as golden rows worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from roll.parallel.sequence import (
    get_sequence_parallel_rank,
    pad_for_sequence_parallel,
    pad_packed_for_sequence_parallel,
    sequence_parallel_groups,
    shift_labels,
    split_for_sequence_parallel,
)
from tests.parallel.sequence.test_groups import refusal
from tests.rank_pool import RankPool

TOKENS = [[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]]
LABELS = [[-100, 12, 13, 14, 15], [-100, -100, 23, -100, -100]]
POSITIONS = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def lists(found: Any) -> Any:
    return [x.tolist() if isinstance(x, Tensor) else x for x in found]


def the_documents_calls() -> dict[str, Any]:
    """Of two ranks. The names and the order of results are the document's."""
    input_ids, labels, position_ids, attention_mask = map(torch.tensor, (TOKENS, LABELS, POSITIONS, MASK))
    with sequence_parallel_groups(2):
        labels = shift_labels(labels)
        padded = pad_for_sequence_parallel(input_ids, labels, position_ids, attention_mask)
        without_mask = pad_for_sequence_parallel(input_ids, labels, position_ids)
        own_ids = pad_for_sequence_parallel(input_ids, tokens_pad_index=7, labels_pad_index=-1)
        split = split_for_sequence_parallel(*padded[:3])
        whole = torch.arange(8).view(1, 8)
        return {
            "rank": get_sequence_parallel_rank(),
            "padded": lists(padded),
            "without mask": lists(without_mask),
            "own ids": lists(own_ids),
            "split": lists(split),
            "tokens only": lists(split_for_sequence_parallel(padded[0])),
            "divides": pad_for_sequence_parallel(whole)[0] is whole,
            "unpadded": refusal(lambda: split_for_sequence_parallel(input_ids)),
        }


def test_the_documents_calls(ranks: RankPool) -> None:
    first, second = ranks.run(the_documents_calls, world_size=2)
    padded = [
        [[11, 12, 13, 14, 15, 0], [21, 22, 23, 0, 0, 0]],
        [[12, 13, 14, 15, -100, -100], [-100, 23, -100, -100, -100, -100]],
        [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0]],
        [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
    ]
    for found in (first, second):
        assert found["padded"] == padded
        assert found["without mask"] == [*padded[:3], None]
        assert found["own ids"] == [[[*TOKENS[0], 7], [*TOKENS[1], 7]], None, None, None]
        assert found["divides"]
        assert "dim 1 of (2, 5) does not divide by the 2 ranks that share a sequence" in found["unpadded"]
    assert first["split"] == [
        [[11, 12, 13], [21, 22, 23]],
        [[12, 13, 14], [-100, 23, -100]],  # 14 is the label at the end of the part: token 14 is the other rank's
        [[0, 1, 2], [0, 1, 2]],
    ]
    assert second["split"] == [
        [[14, 15, 0], [0, 0, 0]],
        [[15, -100, -100], [-100, -100, -100]],
        [[3, 4, 0], [3, 4, 0]],
    ]
    assert first["tokens only"] == [[[11, 12, 13], [21, 22, 23]], None, None]


def packed() -> list[Any]:
    """Five tokens in two documents, on four ranks: three tokens of padding, the longest document."""
    with sequence_parallel_groups(4):
        tokens, cu_seqlens = torch.tensor([[11, 12, 21, 22, 23]]), torch.tensor([0, 2, 5], dtype=torch.int32)
        labels = shift_labels(tokens, cu_seqlens)
        found = pad_packed_for_sequence_parallel(tokens, cu_seqlens, labels)
        assert cu_seqlens.tolist() == [0, 2, 5]  # not changed
        one_more = pad_packed_for_sequence_parallel(tokens[:, :4], torch.tensor([0, 4]))
        return [*lists(found), lists(one_more)]


def test_padding_is_a_document_of_its_own(ranks: RankPool) -> None:
    for found in ranks.run(packed, world_size=4):
        assert found == [
            [[11, 12, 21, 22, 23, 0, 0, 0]],
            [0, 2, 5, 8],
            3,
            [[12, -100, 22, 23, -100, -100, -100, -100]],
            [[0, 1, 0, 1, 2, 0, 1, 2]],
            [[[11, 12, 21, 22]], [0, 4], 4, None, [[0, 1, 2, 3]]],
        ]


def test_the_longest_document_may_be_the_padding(ranks: RankPool) -> None:
    assert ranks.run(longest, world_size=4) == [(3, [0, 1, 2, 5, 8])] * 4


def longest() -> tuple[int, list[int]]:
    with sequence_parallel_groups(4):
        found = pad_packed_for_sequence_parallel(torch.ones(1, 5), torch.tensor([0, 1, 2, 5]))
        return found.max_length, found.cu_seqlens.tolist()


def test_shifting() -> None:
    labels = torch.tensor([[-100, 2, 3], [4, 5, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [5, 6, -100]]
    assert shift_labels(labels, torch.tensor([0, 1, 3, 6])).tolist() == [[-100, 3, -100], [5, 6, -100]]
    assert labels.tolist() == [[-100, 2, 3], [4, 5, 6]]
    for bounds in ([], [1, 6], [0, 3], [0, 4, 3, 6]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 6 labels"):
            shift_labels(labels, torch.tensor(bounds))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4),), r"tokens must have two dims \[rows, length\], got shape \(4,\)"),
        ((torch.ones(2, 4), torch.ones(2, 3)), r"labels has shape \(2, 3\), tokens have \(2, 4\)"),
        ((torch.ones(2, 4), None, torch.ones(3, 4)), r"position_ids has shape \(3, 4\), tokens have \(2, 4\)"),
    ],
)
def test_shapes_that_do_not_fit(arguments: tuple[Any, ...], message: str) -> None:
    for function in (pad_for_sequence_parallel, split_for_sequence_parallel):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 4, 4\)"):
        pad_for_sequence_parallel(torch.ones(2, 4), attention_mask=torch.ones(2, 1, 4, 4))


@pytest.mark.parametrize("cu_seqlens", [[0], [1, 4], [0, 3], [0, 2, 2, 4], [0, 5]])
def test_cu_seqlens_that_do_not_fit(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 4 tokens of the row, got"):
        pad_packed_for_sequence_parallel(torch.ones(1, 4), torch.tensor(cu_seqlens))
    with pytest.raises(ValueError, match=r"packed into one row, got tokens of shape \(2, 4\)"):
        pad_packed_for_sequence_parallel(torch.ones(2, 4), torch.tensor([0, 4]))
