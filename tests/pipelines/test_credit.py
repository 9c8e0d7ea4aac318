"""Credit on its way into the batch: what is laid onto it, and credit that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms import Credit
from roll.pipelines.credit import readable, with_credit
from roll.protocol import DataProto

NAN = float("nan")
MASK = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1]])
MAKES = frozenset({"advantages"})


def credited(advantages: list[list[float]], kept: Any = None, **others: Any) -> DataProto:
    batch = DataProto.from_dict({"response_mask": MASK, "scores": torch.ones(3)})
    return with_credit(batch, Credit({"advantages": torch.tensor(advantages), **others}, kept=kept), MAKES)


def test_responses_that_are_not_kept_have_no_tokens_to_learn_from() -> None:
    batch = credited([[1.0, 2.0], [3.0, NAN], [NAN, 4.0]], torch.tensor([True, True, False]))
    assert batch["response_mask"].tolist() == [[0, 1, 1], [0, 1, 0], [0, 0, 0]]
    assert batch["response_mask"].dtype == MASK.dtype
    assert batch["advantages"][0].tolist() == [1.0, 2.0] and batch["scores"].tolist() == [1.0] * 3
    assert credited([[0.0, 0.0]] * 3)["response_mask"].tolist() == MASK.tolist()
    assert credited([[0.0, 0.0]] * 3, torch.zeros(3, dtype=torch.bool))["response_mask"].sum() == 0


@pytest.mark.parametrize(
    ("advantages", "others", "message"),
    [
        ([[0.0, 0.0]] * 3, {"extra": torch.ones(3)}, r"has made advantages, extra, but it declares advantages$"),
        ([[0.0, 0.0], [0.0, 0.0], [0.0, NAN]], {}, r"advantages: row 2 has nan, which is not finite"),
        ([[0.0, 0.0]] * 2, {}, r"same number of rows, got {.advantages.: 2, "),
        ([[0.0, 0.0]] * 3, {"kept": torch.ones(3, 1, dtype=torch.bool)}, r"kept must be 3 bools, got bool\[3, 1\]"),
        ([[0.0, 0.0]] * 3, {"kept": torch.ones(3)}, r"kept must be 3 bools, got float32\[3\]"),
        ([[0.0, 0.0]] * 3, {"kept": [True] * 3}, r"kept must be 3 bools, got list"),
        ([[0.0, 0.0]] * 3, {"kept": torch.ones(1, dtype=torch.bool)}, r"kept must be 3 bools, got bool\[1\]"),
    ],
)
def test_credit_that_does_not_fit(advantages: list[list[float]], others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credited(advantages, **others)


def test_credit_of_another_kind() -> None:
    batch = DataProto.from_dict({"response_mask": MASK})
    with pytest.raises(ValueError, match="credit must give a Credit, got dict"):
        with_credit(batch, {"advantages": torch.ones(3, 2)}, MAKES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="credit has made advantages, which must be a tensor, got ndarray"):
        with_credit(batch, Credit({"advantages": np.ones((3, 2))}), MAKES)  # type: ignore[dict-item]


def test_a_field_may_have_any_name() -> None:
    batch = DataProto.from_dict({"response_mask": MASK})
    made = with_credit(batch, Credit({"mask": torch.ones(3, 2)}), frozenset({"mask"}))
    assert made["mask"].tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(ValueError, match="mask: row 0 has inf"):
        with_credit(batch, Credit({"mask": torch.full((3, 2), torch.inf)}), frozenset({"mask"}))


def test_credit_is_given_what_the_algorithm_says_it_reads() -> None:
    batch = DataProto.from_dict({"scores": torch.ones(2), "values": torch.ones(2)}, {"entry": [1, 2], "stop": [3, 4]})
    given = readable(batch, {"scores", "entry", "group"})
    assert set(given.tensors) == {"scores"} and set(given.non_tensor_batch) == {"entry"}
