"""The character-level tokenizer: ids, exact round trip, the saved folder, unknown characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from roll.data.tokenizer import DEFAULT_ALPHABET, build_char_tokenizer, check_characters, unknown_characters

TOKENIZER = build_char_tokenizer()


def test_ids_are_fixed() -> None:
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 96
    special = (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id)
    assert special == (0, 1, 2, 3)
    # '0' is the first character (id 4), ' ' the eleventh, '+' the twelfth, '=' the sixteenth.
    assert TOKENIZER.encode("10 + 9=") == [5, 4, 14, 15, 14, 13, 19]


def test_an_alphabet_of_ones_own_keeps_its_order() -> None:
    tokenizer = build_char_tokenizer("zé a")
    assert tokenizer.encode("a zé") == [7, 6, 4, 5]
    assert len(tokenizer) == 8


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=DEFAULT_ALPHABET, max_size=40))
def test_round_trip_is_exact(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([TOKENIZER.bos_token_id, *ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_spaces_before_punctuation_and_at_the_ends_survive() -> None:
    text = "\n\n  is 3 , 4 . 5 ?  \n"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_saved_and_loaded(tmp_path: Path, beside_a_model: bool) -> None:
    original = build_char_tokenizer("<>eos 12+=")
    original.save_pretrained(tmp_path)
    if beside_a_model:
        config = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "vocab_size": 14}
        (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == original.get_vocab()
    text = " 1 + 2 = <eos>  "
    assert loaded.encode(text) == original.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    batch = loaded(["12", "1"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"] == [[10, 11], [0, 10]]
    assert batch["attention_mask"] == [[1, 1], [0, 1]]
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2, 3)


def test_a_text_cannot_spell_a_special_token() -> None:
    ids = TOKENIZER.encode("<eos><pad>")
    assert len(ids) == 10 and not set(ids) & {0, 1, 2, 3}
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<eos><pad>"
    assert build_char_tokenizer("eos").encode("<eos>") == [3, 4, 5, 6, 3]  # its alphabet has no "<"


def test_unknown_characters_are_found_and_named() -> None:
    assert TOKENIZER.encode("3ß4") == [7, 3, 8]
    assert unknown_characters(["3 ß 4", "π?", "3 + 4"], TOKENIZER) == ["ß", "π"]
    assert unknown_characters([], TOKENIZER) == []
    check_characters(["3 + 4"], TOKENIZER, what="prompts")
    with pytest.raises(ValueError, match=r"prompts hold characters .*'ß', 'π'"):
        check_characters(["3 ß 4", "π"], TOKENIZER, what="prompts")


@pytest.mark.parametrize(("alphabet", "message"), [("", "at least one"), ("abcb", "repeated: 'b'")])
def test_a_bad_alphabet_is_refused(alphabet: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_char_tokenizer(alphabet)
