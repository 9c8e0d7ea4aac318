"""Generated tokens as responses: where they end, and what stands around them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.data.responses import as_responses
from roll.protocol import DataProto

PAD, EOS = 0, 2


def prompts_of(ids: list[list[int]]) -> DataProto:
    """Prompts padded on the left with id 0."""
    tensor = torch.tensor(ids, dtype=torch.long)
    return DataProto.from_dict(
        {"input_ids": tensor, "attention_mask": (tensor != PAD).long()},
        {"answer": [f"answer {row}" for row in range(len(ids))]},
        {"step": 3},
    )


def lists_of(data: DataProto) -> dict[str, list[list[int]]]:
    return {name: data[name].tolist() for name in ("input_ids", "attention_mask", "response_mask")}


def test_by_hand() -> None:
    # Ended early, never ended, ended at once, ended twice.
    prompts = prompts_of([[0, 5], [6, 7], [8, 9], [0, 5]])
    generated = torch.tensor([[3, EOS, 4], [3, 4, 5], [EOS, 7, 7], [4, EOS, EOS]])
    data = as_responses(prompts, generated, 4, end_token_ids=[EOS], pad_token_id=PAD)
    assert lists_of(data) == {
        "input_ids": [[0, 5, 3, 2, 0, 0], [6, 7, 3, 4, 5, 0], [8, 9, 2, 0, 0, 0], [0, 5, 4, 2, 0, 0]],
        "attention_mask": [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]],
        "response_mask": [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]],
    }
    assert all(data[name].dtype == torch.int64 for name in lists_of(data))


def test_other_fields_stay() -> None:
    data = as_responses(prompts_of([[5], [6]]), torch.tensor([[3], [4]]), 1, end_token_ids=[EOS], pad_token_id=PAD)
    assert data["answer"].tolist() == ["answer 0", "answer 1"]
    assert data.meta_info == {"step": 3}


def test_the_end_token_may_be_the_padding_token() -> None:
    data = as_responses(prompts_of([[5]]), torch.tensor([[3, EOS, EOS]]), 3, end_token_ids=[EOS], pad_token_id=EOS)
    assert lists_of(data) == {
        "input_ids": [[5, 3, EOS, EOS]],
        "attention_mask": [[1, 1, 1, 0]],
        "response_mask": [[0, 1, 1, 0]],
    }


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    data = as_responses(prompts_of([[EOS, 5]]), torch.tensor([[3, 4]]), 2, end_token_ids=[EOS], pad_token_id=PAD)
    assert lists_of(data)["response_mask"] == [[0, 0, 1, 1]]


def test_a_response_may_hold_the_id_of_padding() -> None:
    data = as_responses(prompts_of([[5]]), torch.tensor([[PAD, 4]]), 2, end_token_ids=[EOS], pad_token_id=PAD)
    assert lists_of(data)["response_mask"] == [[0, 1, 1]]


@pytest.mark.parametrize("max_new_tokens", [0, 2])
def test_nothing_was_generated(max_new_tokens: int) -> None:
    nothing = torch.zeros(1, 0, dtype=torch.long)
    data = as_responses(prompts_of([[5]]), nothing, max_new_tokens, end_token_ids=[EOS], pad_token_id=PAD)
    assert lists_of(data) == {
        "input_ids": [[5] + [PAD] * max_new_tokens],
        "attention_mask": [[1] + [0] * max_new_tokens],
        "response_mask": [[0] * (1 + max_new_tokens)],
    }


def test_what_is_given_is_not_changed() -> None:
    prompts, generated = prompts_of([[0, 5]]), torch.tensor([[EOS, 7]])
    before: tuple[Tensor, Tensor, Tensor] = (
        prompts["input_ids"].clone(),
        prompts["attention_mask"].clone(),
        generated.clone(),
    )
    as_responses(prompts, generated, 3, end_token_ids=[EOS], pad_token_id=PAD)
    for after, kept in zip((prompts["input_ids"], prompts["attention_mask"], generated), before, strict=True):
        assert torch.equal(after, kept)


@given(st.integers(0, 5).flatmap(lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1)))
def test_responses_are_what_a_loop_finds(generated: list[list[int]]) -> None:
    max_new_tokens = len(generated[0]) + 2
    prompts = prompts_of([[0, 5, 6]] * len(generated))
    tensor = torch.tensor(generated, dtype=torch.long).view(len(generated), -1)
    data = as_responses(prompts, tensor, max_new_tokens, end_token_ids=[EOS], pad_token_id=PAD)
    for row, tokens in enumerate(generated):
        response = []
        for token in tokens:
            response.append(token)
            if token == EOS:
                break
        missing = max_new_tokens - len(response)
        assert data["input_ids"][row].tolist() == [0, 5, 6, *response, *([PAD] * missing)]
        assert data["attention_mask"][row].tolist() == [0, 1, 1, *([1] * len(response)), *([0] * missing)]
        assert data["response_mask"][row].tolist() == [0, 0, 0, *([1] * len(response)), *([0] * missing)]


def test_any_of_several_end_tokens_ends_a_response() -> None:
    generated = torch.tensor([[3, 5, 4, EOS], [EOS, 5, 3, 3], [4, 4, 5, EOS], [3, 4, 3, 4]])
    data = as_responses(prompts_of([[7]] * 4), generated, 4, end_token_ids=(EOS, 5), pad_token_id=PAD)
    assert lists_of(data)["response_mask"] == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert lists_of(data)["input_ids"] == [[7, 3, 5, 0, 0], [7, EOS, 0, 0, 0], [7, 4, 4, 5, 0], [7, 3, 4, 3, 4]]
