"""Rows of a batch from token ids: which are learned from, and what stands around them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.data.responses import Continuation, as_rows
from roll.errors import UserError
from roll.protocol import DataProto

PAD, EOS = 0, 2


def rows_of(
    prompts: list[list[int]], rests: list[Continuation], widths: tuple[int, int], *, log_probs: bool = False
) -> DataProto:
    most = {"max_prompt_tokens": widths[0], "max_new_tokens": widths[1]}
    return as_rows(prompts, rests, with_log_probs=log_probs, pad_token_id=PAD, **most)


def learned(*ids: int) -> Continuation:
    rest = Continuation()
    rest.append(ids, learned=True)
    return rest


def lists_of(data: DataProto) -> dict[str, list[list[int]]]:
    return {name: data[name].tolist() for name in ("input_ids", "attention_mask", "response_mask")}


def test_by_hand() -> None:
    # Ended early, never ended, ended at once.
    data = rows_of([[5], [6, 7], [8, 9]], [learned(3, EOS), learned(3, 4, 5, 6), learned(EOS)], (2, 4))
    assert lists_of(data) == {
        "input_ids": [[0, 5, 3, 2, 0, 0], [6, 7, 3, 4, 5, 6], [8, 9, 2, 0, 0, 0]],
        "attention_mask": [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        "response_mask": [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]],
    }
    assert all(data[name].dtype == torch.int64 for name in lists_of(data))
    assert "rollout_log_probs" not in data.tensors


def test_turns_between_responses_by_hand() -> None:
    rest = Continuation()
    rest.append((3, EOS), learned=True, log_probs=(-0.5, -1.5))
    rest.append((6, 7), learned=False)
    rest.append((4,), learned=True, log_probs=(-2.5,))
    rest.append((9,), learned=True)  # of the environment, and learned from: no engine has sampled it
    data = rows_of([[5], [8]], [rest, learned(1)], (2, 7), log_probs=True)
    assert lists_of(data) == {
        "input_ids": [[0, 5, 3, 2, 6, 7, 4, 9, 0], [0, 8, 1, 0, 0, 0, 0, 0, 0]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0, 0]],
        "response_mask": [[0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0]],
    }
    nan = math.nan  # Index t speaks of token t + 1.
    expected = torch.tensor([[0, -0.5, -1.5, 0, 0, -2.5, nan, 0], [0, nan, 0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(data["rollout_log_probs"], expected, rtol=0, atol=0, equal_nan=True)


def test_a_response_may_hold_the_id_of_padding() -> None:
    assert lists_of(rows_of([[5]], [learned(PAD, 4)], (1, 2)))["response_mask"] == [[0, 1, 1]]


@pytest.mark.parametrize("max_new_tokens", [0, 2])
def test_nothing_was_generated(max_new_tokens: int) -> None:
    assert lists_of(rows_of([[5]], [Continuation()], (1, max_new_tokens))) == {
        "input_ids": [[5] + [PAD] * max_new_tokens],
        "attention_mask": [[1] + [0] * max_new_tokens],
        "response_mask": [[0] * (1 + max_new_tokens)],
    }


def test_no_rows() -> None:
    assert rows_of([], [], (2, 3), log_probs=True)["rollout_log_probs"].shape == (0, 4)


def test_what_is_too_long_is_refused_with_its_row() -> None:
    with pytest.raises(UserError, match="row 1: 3 prompt tokens are more than max_prompt_tokens 2"):
        rows_of([[5], [6, 7, 8]], [learned(1), learned(1)], (2, 4))
    with pytest.raises(UserError, match="row 0: 5 new tokens are more than max_new_tokens 4"):
        rows_of([[5]], [learned(1, 1, 1, 1, 1)], (2, 4))


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=5))))
def test_rows_are_what_a_loop_finds(drawn: list[tuple[int, list[tuple[int, bool]]]]) -> None:
    rests = []
    for _, tokens in drawn:
        rest = Continuation()
        for token, counts in tokens:
            rest.append((token,), learned=counts)
        rests.append(rest)
    data = rows_of([[7] * length for length, _ in drawn], rests, (3, 5))
    for row, (length, tokens) in enumerate(drawn):
        behind = [0] * (5 - len(tokens))
        assert data["input_ids"][row].tolist() == [PAD] * (3 - length) + [7] * length + [t for t, _ in tokens] + behind
        assert data["attention_mask"][row].tolist() == [0] * (3 - length) + [1] * (length + len(tokens)) + behind
        assert data["response_mask"][row].tolist() == [0] * 3 + [int(counts) for _, counts in tokens] + behind
