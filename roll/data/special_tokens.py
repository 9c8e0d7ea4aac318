"""Special tokens that a tokenizer adds to a text by itself: one begin token in front, none behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def front_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the tokenizer puts in front of every text, such as `<s>`.

    Ids that it puts behind a text (T5's `</s>`) are left out: a prompt that ends so cannot be continued.
    """
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start])
    raise ValueError(f"{type(tokenizer).__name__} reads a text as other tokens once it adds special ones to it")


def with_front(ids: list[int], front: list[int]) -> list[int]:
    """Ids of a text with the special tokens in front; unchanged where the text itself begins with them."""
    return ids if ids[: len(front)] == front else [*front, *ids]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, front: list[int]) -> list[int]:
    """Ids of a text as a model reads it: `front` is `front_tokens(tokenizer)`, and stands there once."""
    return with_front(tokenizer.encode(text, add_special_tokens=False), front)
