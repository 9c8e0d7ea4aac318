"""Requests and responses as rows of a batch, which are dealt over the ranks of a role as any rows are.

B rows, P columns of the longest request, N = the most new tokens of any request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from roll.generation.records import Request, Response, Sampling, Stop
from roll.protocol import DataProto

ROW_SEEDS_APART = 2**40
"""Distance between the seeds of neighbouring rows: more than there are steps or ranks."""


def pack_requests(rows: Sequence[Sequence[int]], max_new_tokens: Sequence[int], pad_token_id: int) -> DataProto:
    """Token ids as `input_ids` and `attention_mask` `[B, P]`, padded on the left, and `max_new_tokens` `[B]`."""
    width = max(map(len, rows), default=0)
    return DataProto.from_dict(
        {
            "input_ids": _matrix([[pad_token_id] * (width - len(row)) + list(row) for row in rows], width),
            "attention_mask": _matrix([[0] * (width - len(row)) + [1] * len(row) for row in rows], width),
            "max_new_tokens": torch.tensor(max_new_tokens, dtype=torch.int64),
        }
    )


def unpack_requests(batch: DataProto, sampling: Sampling, seed: int) -> list[Request]:
    """The requests of a batch, each with its own limit of tokens and its own seed; that of row 0 is `seed`."""
    rows = zip(batch["input_ids"], batch["attention_mask"], batch["max_new_tokens"].tolist(), strict=True)
    return [
        Request(
            row,
            tuple(ids[mask.bool()].tolist()),
            replace(sampling, max_new_tokens=limit),
            seed + row * ROW_SEEDS_APART,
        )
        for row, (ids, mask, limit) in enumerate(rows)
    ]


def pack_responses(responses: Iterable[Response], max_new_tokens: int) -> DataProto:
    """Responses in the order of their rows.

    Returns:
        `response_ids` `[B, N]` int64, filled with 0, `response_length` and `weight_version` `[B]`, and if the responses
        have log-probs, `response_log_probs` `[B, N]` float32; `stop` as an object for each row.
    """
    ordered = sorted(responses, key=lambda response: response.row)
    assert [response.row for response in ordered] == list(range(len(ordered))), "one response for each row"
    fills = [max_new_tokens - len(response.token_ids) for response in ordered]
    tensors = {
        "response_ids": _matrix(
            [[*one.token_ids, *[0] * fill] for one, fill in zip(ordered, fills, strict=True)], max_new_tokens
        ),
        "response_length": torch.tensor([len(one.token_ids) for one in ordered], dtype=torch.int64),
        "weight_version": torch.tensor([one.version for one in ordered], dtype=torch.int64),
    }
    log_probs = [one.log_probs for one in ordered]
    if all(row is not None for row in log_probs):
        rows = [[*(row or ()), *[0.0] * fill] for row, fill in zip(log_probs, fills, strict=True)]
        tensors["response_log_probs"] = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), max_new_tokens)
    stops = np.array([one.stop.value for one in ordered], dtype=object)
    return DataProto.from_dict(tensors, non_tensors={"stop": stops})


def unpack_responses(batch: DataProto) -> list[Response]:
    """The way back: responses numbered by the rows of the batch."""
    log_probs = batch["response_log_probs"].tolist() if "response_log_probs" in batch.tensors else [None] * len(batch)
    rows = zip(
        batch["response_ids"].tolist(),
        batch["response_length"].tolist(),
        log_probs,
        batch.non_tensor_batch["stop"],
        batch["weight_version"].tolist(),
        strict=True,
    )
    return [
        Response(row, tuple(ids[:length]), None if probs is None else tuple(probs[:length]), Stop(stop), version)
        for row, (ids, length, probs, stop, version) in enumerate(rows)
    ]


def _matrix(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
