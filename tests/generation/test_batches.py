"""Requests and responses as rows of a batch: there and back, by hand."""

from __future__ import annotations

import pytest

from roll.generation.batches import ROW_SEEDS_APART, pack_requests, pack_responses, unpack_requests, unpack_responses
from roll.generation.records import Request, Response, Sampling, Stop


def test_requests_by_hand() -> None:
    batch = pack_requests([[5, 6, 7], [8]], [4, 2], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 9, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    sampling = Sampling(100, 0.7, (2,))
    assert unpack_requests(batch, sampling, seed=11) == [
        Request(0, (5, 6, 7), Sampling(4, 0.7, (2,)), 11),
        Request(1, (8,), Sampling(2, 0.7, (2,)), 11 + ROW_SEEDS_APART),
    ]
    assert unpack_requests(batch.select_idxs([]), sampling, seed=11) == []


@pytest.mark.parametrize("log_probs", [True, False])
def test_responses_by_hand(log_probs: bool) -> None:
    first = Response(0, (5, 2), (-0.5, -1.5) if log_probs else None, Stop.END, 3)
    second = Response(1, (7, 8, 9), (-1.0, -2.0, -3.0) if log_probs else None, Stop.LENGTH, 4)
    batch = pack_responses([second, first], max_new_tokens=4)
    assert batch["response_ids"].tolist() == [[5, 2, 0, 0], [7, 8, 9, 0]]
    assert batch["response_length"].tolist() == [2, 3]
    assert ("response_log_probs" in batch.tensors) is log_probs
    if log_probs:
        assert batch["response_log_probs"].tolist() == [[-0.5, -1.5, 0, 0], [-1, -2, -3, 0]]
    assert unpack_responses(batch) == [first, second]
    assert unpack_responses(batch.select_idxs([1, 0])) == [
        Response(0, *_but_row(second)),
        Response(1, *_but_row(first)),
    ]


def _but_row(response: Response) -> tuple[tuple[int, ...], tuple[float, ...] | None, Stop, int]:
    return response.token_ids, response.log_probs, response.stop, response.version
