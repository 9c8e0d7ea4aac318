"""A character-level Hugging Face tokenizer, for small models on short tasks; of any tokenizer, unknown characters and
the id that fills up rows.

`save_pretrained` writes it beside a model; `AutoTokenizer.from_pretrained` reads it back. It adds no special tokens by
itself, so that n characters are n tokens, and it never reads one out of a text: the five characters `<eos>` of a prompt
are five tokens, not the end token.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from roll.data.lost_text import lost_pieces
from roll.errors import UserError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

# 92 characters, which makes 96 tokens: divisible by every tensor parallel degree of a small model. They hold words and
# short arithmetic, such as the questions and answers of spell_backward, chain_sum, products, gcd and simple_equations.
# The order is part of the format: a saved model depends on it.
DEFAULT_ALPHABET = "0123456789 +-*/=().,:?\n" + string.ascii_lowercase + string.ascii_uppercase + "!\"#$%&';<>@[]^_{}"


def build_char_tokenizer(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer of `alphabet` (default `DEFAULT_ALPHABET`), one token for each character.

    Ids: `<pad>` 0, `<bos>` 1, `<eos>` 2, `<unk>` 3, then the alphabet in its own order. Any other character becomes
    `<unk>`. Padding is on the left. Raises ValueError for an empty alphabet or a repeated character.

    Example: `build_char_tokenizer("ab ").encode("b a") == [5, 6, 4]`.
    """
    alphabet = DEFAULT_ALPHABET if alphabet is None else alphabet
    if not alphabet:
        raise UserError("alphabet must hold at least one character")
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise UserError(f"alphabet must hold each character once, repeated: {_quoted(repeated)}")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # a text cannot spell a special token
    )


def unknown_characters(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The characters (or words, if it has words) of `texts` that the tokenizer reads as its unknown token or leaves
    out, sorted. Empty for byte-level vocabularies, which read everything.
    """
    unknown, texts = tokenizer.unk_token_id, list(texts)
    if not texts:
        return []
    if tokenizer.is_fast:
        batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found = zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True)
        return sorted(set().union(*(unknown_pieces(text, ids, spans, tokenizer) for text, ids, spans in found)))
    if unknown is None:
        return []
    unread = [text for text in texts if unknown in tokenizer.encode(text, add_special_tokens=False)]
    characters = sorted(set().union(*unread))
    return [character for character in characters if unknown in tokenizer.encode(character, add_special_tokens=False)]


def unknown_pieces(
    text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> set[str]:
    """The pieces of a text that became the unknown token, but for that token's own text, or no token at all."""
    unknown, lost = tokenizer.unk_token_id, lost_pieces(text, ids, offsets, tokenizer)
    if unknown is None or unknown not in ids:
        return lost
    pieces = {text[slice(*span)] for token, span in zip(ids, offsets, strict=True) if token == unknown}
    return lost | pieces - {tokenizer.unk_token}


def check_characters(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, what: str) -> None:
    """Raise ValueError naming each character of `texts` that the tokenizer does not know; `what` names the texts."""
    unknown = unknown_characters(texts, tokenizer)
    if unknown:
        raise UserError(f"{what} hold characters that the tokenizer does not know: {_quoted(unknown)}")


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up rows: the pad token's, or the end token's where there is no pad token (Llama's has none).

    With neither it is 0. Any id serves: masks say which tokens are real, and nothing depends on what stands elsewhere.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _quoted(characters: list[str]) -> str:
    return ", ".join(repr(character) for character in characters)
