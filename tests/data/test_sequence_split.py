"""Which tokens each rank holds: by hand, and as a partition of the row that is balanced under the causal mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.config import ParallelSettings
from roll.data.packing import align_segments, pack_rows
from roll.data.sequence_split import SequenceSplit

CONTIGUOUS = [ParallelSettings(cp=2), ParallelSettings(mode="isp", sp=2)]
ZIGZAG = [ParallelSettings(cp=2, cp_comm="ring"), ParallelSettings(cp=2, cp_comm="all_gather")]


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("parallel", CONTIGUOUS, ids=str)
def test_contiguous_by_hand(parallel: ParallelSettings) -> None:
    held = SequenceSplit(parallel, 0).held(starts(8, 3, 1))
    assert held.by_rank.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("parallel", ZIGZAG, ids=str)
def test_zigzag_by_hand(parallel: ParallelSettings) -> None:
    held = SequenceSplit(parallel, 1).held(starts(8, 4))
    assert held.by_rank.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    row = torch.arange(100, 112)
    assert held.own(row).tolist() == [102, 103, 104, 105, 109, 110]
    gathered = torch.cat([row[tokens] for tokens in held.by_rank])
    assert torch.equal(held.in_order(gathered), row)


@given(
    st.sampled_from(["a2a", "all_gather", "ring"]),
    st.integers(1, 5),
    st.sampled_from([("mtp", 1), ("msp", 2), ("fsp", 3)]),
    st.lists(st.integers(1, 23), max_size=5),
)
def test_every_token_is_held_once_and_the_causal_work_is_even(
    cp_comm: str, cp: int, mode: tuple[str, int], lengths: list[int]
) -> None:
    parallel = ParallelSettings.model_validate({"mode": mode[0], "tp": mode[1], "cp": cp, "cp_comm": cp_comm})
    aligned = align_segments(
        torch.tensor(lengths, dtype=torch.long),
        multiple_of=parallel.row_multiple,
        segment_multiple_of=parallel.segment_multiple,
    )
    total = int(aligned.cu_seqlens[-1])
    assert total % (cp * (mode[1] if mode[0] != "mtp" else 1)) == 0
    held = SequenceSplit(parallel, 0).held(aligned.cu_seqlens)
    assert held.by_rank.shape == (cp, total // cp)
    assert torch.equal(held.by_rank.flatten().sort().values, torch.arange(total))
    assert (held.by_rank.diff(dim=1) > 0).all()  # in the order of the row
    row = torch.arange(total) * 7
    ranks = [SequenceSplit(parallel, rank).held(aligned.cu_seqlens) for rank in range(cp)]
    assert torch.equal(held.in_order(torch.cat([rank.own(row) for rank in ranks])), row)
    if parallel.zigzag:
        # A token at position p attends to p + 1 tokens.
        seen = torch.cat([torch.arange(1, length + 1) for length in aligned.cu_seqlens.diff().tolist()])
        assert len(set(seen[held.by_rank].sum(dim=1).tolist())) == 1


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_filling_stands_behind_its_segment(lengths: list[int], segment: int, more: int) -> None:
    aligned = align_segments(
        torch.tensor(lengths, dtype=torch.long), multiple_of=segment * more, segment_multiple_of=segment
    )
    bounds = aligned.cu_seqlens.tolist()
    assert bounds[-1] % (segment * more) == 0 and bounds[-1] > 0
    assert all(stop > start and (stop - start) % segment == 0 for start, stop in pairwise(bounds))
    expected = [start + token for start, length in zip(bounds, lengths, strict=False) for token in range(length)]
    assert aligned.places.tolist() == expected
    assert aligned.lengths[: len(lengths)].tolist() == lengths
    # No more than needed: less than a multiple behind each, and one last segment that fills up the row.
    assert len(bounds) - 1 - len(lengths) in (0, 1)
    assert bounds[len(lengths)] == sum(-(-length // segment) * segment for length in lengths)


def test_packed_rows_with_filled_segments_by_hand() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    rows = pack_rows(ids, ids > 0, multiple_of=12, segment_multiple_of=4)
    assert rows.input_ids.tolist() == [[5, 6, 0, 0, 7, 8, 9, 0, 0, 0, 0, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3] * 3]
    assert (rows.cu_seqlens.tolist(), rows.segment_lengths.tolist()) == ([0, 4, 8, 12], [2, 3, 4])
    assert rows.next_tokens(ids).tolist() == [6, 0, 0, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert rows.unpack_next(torch.arange(1.0, 13.0)).tolist() == [[0, 0, 1], [5, 6, 0]]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens of a row do not split over 2 ranks of the sequence; 8 would fit"):
        SequenceSplit(CONTIGUOUS[0], 0).held(starts(3, 4))
    with pytest.raises(ValueError, match="6 tokens of a row do not split over 4 chunks of a sequence; 8 would fit"):
        SequenceSplit(ZIGZAG[0], 0).held(starts(4, 6))
