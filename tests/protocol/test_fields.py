"""check_model_batch: a good batch passes, each mistake is refused with its row and its numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.protocol import DataProto, check_model_batch
from roll.protocol.fields import MODEL_FIELDS

ROLL = Path(__file__).parents[2] / "roll"
STRATEGIES, LOSSES = ROLL / "strategies", ROLL / "algorithms" / "terms.py"

IDS = [[0, 0, 5, 6, 7], [1, 2, 3, 0, 0], [9, 9, 9, 9, 9], [4, 0, 0, 0, 0]]
ATTENTION = [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
RESPONSE = [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]


def batch_with(**changes: Any) -> DataProto:
    fields: dict[str, Any] = {
        "input_ids": torch.tensor(IDS),
        "attention_mask": torch.tensor(ATTENTION),
        "response_mask": torch.tensor(RESPONSE),
        "log_probs": torch.zeros(4, 4),
        "of_someone_else": torch.zeros(4, dtype=torch.bool),
    }
    return DataProto.from_dict({name: value for name, value in (fields | changes).items() if value is not None})


def changed(values: list[list[int]], row: int, column: int, value: int) -> torch.Tensor:
    tensor = torch.tensor(values)
    tensor[row, column] = value
    return tensor


def test_a_good_batch_passes() -> None:
    check_model_batch(batch_with(), vocab_size=10, max_positions=5)
    check_model_batch(batch_with(response_mask=None, log_probs=None))
    check_model_batch(batch_with()[:0], vocab_size=10, max_positions=5)
    check_model_batch(batch_with().select(["input_ids", "attention_mask"]))


def test_every_field_that_a_strategy_or_a_loss_reads_is_declared() -> None:
    """By name, as in data["values"]; tokens.py reads packs of tokens, which are no DataProto."""
    files = [*(path for path in STRATEGIES.glob("*.py") if path.name != "tokens.py"), LOSSES]
    sources = [path.read_text(encoding="utf-8") for path in files]
    read = set(re.findall(r"\b(?:data|batch|micro_batch)\[\"(\w+)\"\]", "\n".join(sources)))
    assert {"input_ids", "attention_mask", "response_mask", "advantages"} <= read <= set(MODEL_FIELDS)


def test_a_response_with_holes_passes() -> None:
    """The text of a tool between two answers is real, and not learned."""
    check_model_batch(batch_with(response_mask=changed(RESPONSE, 2, 2, 0)))


def test_a_row_without_tokens_passes() -> None:
    check_model_batch(batch_with(attention_mask=changed(ATTENTION, 3, 0, 0)), vocab_size=10, max_positions=5)


def test_ids_of_padding_do_not_matter() -> None:
    check_model_batch(batch_with(input_ids=changed(IDS, 0, 1, -100)), vocab_size=10)


def with_value(value: float) -> torch.Tensor:
    tensor = torch.zeros(4, 4)
    tensor[1, 3] = value  # also where no token is: zero times NaN is NaN
    return tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": changed(ATTENTION, 1, 1, 2)}, r"attention_mask: row 1 has values other .*: \[0, 1, 2\]"),
        ({"attention_mask": changed(ATTENTION, 1, 1, -1)}, "attention_mask: row 1 has values other than 0 and 1"),
        ({"response_mask": changed(RESPONSE, 2, 3, 5)}, "response_mask: row 2 has values other than 0 and 1"),
        ({"attention_mask": changed(ATTENTION, 2, 2, 0)}, "attention_mask: row 2 has a hole"),
        ({"attention_mask": changed(ATTENTION, 3, 4, 1)}, "attention_mask: row 3 has a hole"),
        ({"response_mask": changed(RESPONSE, 1, 3, 1)}, "response_mask: row 1 marks a token"),
        ({"input_ids": changed(IDS, 2, 4, 10)}, "input_ids: row 2 has id 10, outside the vocabulary of 10"),
        ({"input_ids": changed(IDS, 0, 2, -1)}, "input_ids: row 0 has id -1, outside the vocabulary of 10"),
        ({"log_probs": with_value(float("nan"))}, "log_probs: row 1 has a value that is NaN or infinite"),
        ({"log_probs": with_value(float("inf"))}, "log_probs: row 1 has a value that is NaN or infinite"),
        ({"log_probs": torch.zeros(4, 5)}, r"log_probs must be \[B, S-1\] = \[4, 4\].* \[4, 5\]; got \[4, 5\]"),
        ({"values": torch.zeros(4, 4).double()}, "values must be torch.float32, got torch.float64"),
        ({"response_mask": torch.zeros(4, 4).long()}, r"response_mask must be \[B, S\] = \[4, 5\].* got \[4, 4\]"),
        ({"attention_mask": torch.tensor(ATTENTION).bool()}, "attention_mask must be torch.int64, got torch.bool"),
        ({"input_ids": torch.tensor(IDS).int()}, "input_ids must be torch.int64, got torch.int32"),
        ({"input_ids": torch.zeros(4).long()}, r"input_ids must be \[B, S\] .* got \[4\]"),
        ({"attention_mask": None}, "lacks attention_mask; it has input_ids, log_probs"),
    ],
)
def test_a_mistake_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model_batch(batch_with(**changes), vocab_size=10, max_positions=5)


def test_a_row_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="row 2 has 5 tokens, the model's context is 4"):
        check_model_batch(batch_with(), max_positions=4)


def test_a_stub_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks input_ids, attention_mask; it has no tensors"):
        check_model_batch(batch_with().stub())
