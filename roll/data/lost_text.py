"""Text that a fast tokenizer loses: characters that no token of the result stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def lost_pieces(
    text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> set[str]:
    """The pieces of `text` that are lost in `ids`, which stand for the characters of `offsets`.

    White space and characters that nobody sees may be left out: that is how a tokenizer splits and cleans text.
    """
    backend: Tokenizer = tokenizer.backend_tokenizer
    if _drops_characters(backend):
        # A dropped character shifts the offsets of those behind it, so offsets do not tell which one it is.
        dropped = {piece for part in _read_parts(text, ids, offsets, tokenizer) for piece in _dropped(part, backend)}
        if dropped:
            return dropped
    lost, done = set(), 0
    for start, stop in (*offsets, (len(text), len(text))):
        if start > done:
            lost.add("".join(one for one in text[done:start] if one.isprintable() and not one.isspace()))
        done = max(done, stop)
    return lost - {""}


def _drops_characters(backend: Tokenizer) -> bool:
    """Tell whether the tokenizer leaves characters out: BPE without an unknown token, and without every byte."""
    model = backend.model
    if not isinstance(model, BPE) or model.unk_token is not None:
        return False
    if model.byte_fallback:
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    elif "Ã©" in "".join(_pieces("é", backend)):  # The two bytes of é, as a byte-level tokenizer spells them.
        every_byte = ByteLevel.alphabet()
    else:
        return True
    return any(backend.token_to_id(byte) is None for byte in every_byte)


def _read_parts(
    text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """The parts of a text between its added tokens, which are found before the model reads the rest."""
    added, done = tokenizer.added_tokens_decoder, 0
    for token_id, (start, stop) in zip(ids, offsets, strict=True):
        if token_id in added:
            yield text[done:start]
            done = stop
    yield text[done:]


def _dropped(text: str, backend: Tokenizer) -> set[str]:
    """The characters of a text, after normalization, that the model has no token for."""
    prefix = backend.model.continuing_subword_prefix or ""
    characters = set("".join(_pieces(text, backend)))
    return {
        one for one in characters if not backend.model.tokenize(one) and backend.token_to_id(f"{prefix}{one}") is None
    }


def _pieces(text: str, backend: Tokenizer) -> list[str]:
    """The pieces of a text that the model is given."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
