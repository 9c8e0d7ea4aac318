"""Texts of which some characters are learned, as tokens of which some are learned.

A text is tokenized as a whole, and offsets say which characters a token stands for. A token is learned if any of its
characters is: the first word of an answer often shares its token with the space in front of it. transformers' own
assistant mask follows the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from roll.data.sources.chat_template import Span
from roll.data.special_tokens import front_tokens, special_tokens, with_front
from roll.data.tokenizer import unknown_pieces
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_LEVEL_SPACE = "Ġ"
"""A space as byte-level vocabularies write it."""


@dataclass(frozen=True)
class LearnedText:
    """A text and the parts of it that are learned.

    Example: the prompt "1+" with the response "2" is the text "1+2", of which `[(2, 3)]` is learned.
    """

    text: str
    learned: tuple[Span, ...]
    """Characters to learn, in order, without overlap."""
    from_template: bool
    """True: a chat template wrote the text, special tokens included. False: the tokenizer's own special tokens are put
    in front, and its end token, which is learned, behind."""
    origin: str
    """Place that the text comes from, for messages: a row of a file, say."""
    unread: tuple[str, ...] = ()
    """Names of what the row holds and the chat template does not write."""


class EncodedText(NamedTuple):
    """Token ids, and of each whether it is learned."""

    ids: list[int]
    in_loss: list[bool]


def check_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a tokenizer that does not say which characters a token stands for."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} gives no offsets, so the tokens of an answer cannot be told from those of its "
            "prompt: use the fast tokenizer of the same model (a tokenizer.json), or data of kind tokenized"
        )


def encode_learned(texts: Sequence[LearnedText], tokenizer: PreTrainedTokenizerBase) -> list[EncodedText]:
    """Tokens of each text. An end token that closes an answer is one token, whatever the tokenizer makes of its text.

    Raises ValueError for a tokenizer without offsets, and, beginning with the text's origin, for text that the
    tokenizer does not know or loses, offsets that run backwards, and an end token that shares a token with other text.
    """
    check_offsets(tokenizer)
    if not texts:
        return []
    front = [] if all(text.from_template for text in texts) else front_tokens(tokenizer)
    ends = special_tokens(tokenizer)
    batch = tokenizer(
        [text.text for text in texts],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        padding=False,
        truncation=False,
        verbose=False,  # No warning about texts longer than the model: what is cut is the packer's to say.
    )
    encoded = zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True)
    return [_encoded(text, ids, offsets, tokenizer, front, ends) for text, ids, offsets in encoded]


def _encoded(
    text: LearnedText,
    ids: list[int],
    offsets: list[Span],
    tokenizer: PreTrainedTokenizerBase,
    front: list[int],
    ends: tuple[str, ...],
) -> EncodedText:
    offsets = _with_trimmed_space(ids, offsets, tokenizer)
    if any(after[0] < before[0] or after[1] < before[1] for before, after in pairwise(offsets)):
        raise UserError(f"{text.origin}: the tokenizer's offsets run backwards, so they do not tell what is learned")
    if text.from_template:
        ids, offsets = _with_whole_end_tokens(text, ids, offsets, tokenizer, ends)
    unknown = unknown_pieces(text.text, ids, offsets, tokenizer)
    if unknown:
        found = ", ".join(map(repr, sorted(unknown)))
        raise UserError(f"{text.origin} holds text that the tokenizer does not know: {found}")
    in_loss = _overlapping(offsets, text.learned)
    if text.from_template:
        return EncodedText(ids, in_loss)
    whole, end = with_front(ids, front), tokenizer.eos_token_id
    in_loss = [False] * (len(whole) - len(ids)) + in_loss
    if not (ids and ids[-1] == end and in_loss[-1]):
        whole, in_loss = [*whole, end], [*in_loss, True]
    return EncodedText(whole, in_loss)


def _with_trimmed_space(ids: Sequence[int], offsets: Sequence[Span], tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Offsets with the white space that a byte-level tokenizer takes off in front of a token (`trim_offsets`).

    The offset of a token that is no more than a space is empty, and lies behind the space.
    """
    filled, done = [], 0
    for token, (start, stop) in zip(ids, offsets, strict=True):
        if start > done and (start == stop or tokenizer.convert_ids_to_tokens(token).startswith(BYTE_LEVEL_SPACE)):
            start = done
        filled.append((start, stop))
        done = max(done, stop)
    return filled


def _overlapping(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Tell of each token whether it stands for a character of one of the spans; both are in order."""
    found = []
    rest = [span for span in reversed(spans) if span[0] < span[1]]
    for start, stop in offsets:
        while rest and rest[-1][1] <= start:
            rest.pop()
        found.append(bool(rest) and max(stop, start + 1) > rest[-1][0])
    return found


def _with_whole_end_tokens(
    text: LearnedText, ids: list[int], offsets: list[Span], tokenizer: PreTrainedTokenizerBase, ends: tuple[str, ...]
) -> tuple[list[int], list[Span]]:
    """The end token behind each answer as one token, for tokenizers that read no special tokens out of a text.

    Args:
        ends: texts of the tokens that may end an answer, longest first.
    """
    for first_learned, last_learned in reversed(text.learned):
        stop = first_learned + len(text.text[first_learned:last_learned].rstrip())  # White space may follow it.
        end = next((token for token in ends if text.text.endswith(token, first_learned, stop)), None)
        if end is None:
            continue
        start, end_id = stop - len(end), tokenizer.convert_tokens_to_ids(end)
        places = [place for place, (first, last) in enumerate(offsets) if first < stop and last > start]
        if [ids[place] for place in places] == [end_id]:
            continue
        if not places or offsets[places[0]][0] != start or offsets[places[-1]][1] != stop:
            raise UserError(f"{text.origin}: the tokenizer joins the end token {end!r} of an answer to other text")
        before, behind = slice(0, places[0]), slice(places[-1] + 1, None)
        ids = [*ids[before], end_id, *ids[behind]]
        offsets = [*offsets[before], (start, stop), *offsets[behind]]
    return ids, offsets
