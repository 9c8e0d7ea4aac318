"""Special tokens of a tokenizer, and those that it adds to a text: one begin token in front, none behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts of a tokenizer's special tokens (`<s>`, `<|im_end|>`), longest first.

    Added tokens that stand for text (`<tool_call>` of Qwen) are none of them.
    """
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted({*tokenizer.all_special_tokens, *added}, key=lambda token: (-len(token), token)))


def front_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the tokenizer puts in front of every text, such as `<s>`.

    Ids that it puts behind a text (T5's `</s>`) are left out: a prompt that ends so cannot be continued.

    Raises ValueError for a tokenizer that reads no text, or reads it as other tokens beside special ones.
    """
    text, bare = _readable(tokenizer)
    whole = tokenizer.encode(text)
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start])
    raise UserError(f"{type(tokenizer).__name__} reads a text as other tokens once it adds special ones to it")


def _readable(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """A text, and the ids that it is read as: a letter, or what a token is called where letters give no id."""
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    for text in chain("a", _texts_of_tokens(tokenizer)):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if ids and not special.intersection(ids):
            return text, ids
    raise UserError(f"{type(tokenizer).__name__} reads no text, not even that of its own tokens")


def _texts_of_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    vocabulary = tokenizer.get_vocab()
    yield from sorted(vocabulary, key=vocabulary.__getitem__)


def with_front(ids: list[int], front: list[int]) -> list[int]:
    """Ids of a text with the special tokens in front; unchanged where the text itself begins with them."""
    return ids if ids[: len(front)] == front else [*front, *ids]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, front: list[int]) -> list[int]:
    """Ids of a text as a model reads it: `front` is `front_tokens(tokenizer)`, and stands there once."""
    return with_front(tokenizer.encode(text, add_special_tokens=False), front)
