"""Conversations in jsonl and parquet files: which tokens they become, which of them are learned, what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from roll.data import PackedDataset, TextFiles
from roll.data.sources.conversation import encode_messages, encode_response
from roll.data.tokenizer import build_char_tokenizer

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Leaves out the earlier answers, as templates do that drop reasoning from the history.
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['role'] }}:{{ m['content'] }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def chat_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per character, with the end token read as one token, as tokenizers with a chat template do."""
    tokenizer = build_char_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = template
    return tokenizer


def learned(ids: list[int], in_loss: list[bool], tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[str]]:
    """The whole text, and the runs of it that are learned."""
    runs: list[list[int]] = [[]]
    for token, is_learned in zip(ids, in_loss, strict=True):
        if is_learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return tokenizer.decode(ids), [tokenizer.decode(run) for run in runs if run]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_prompt_and_its_response_without_a_template() -> None:
    tokenizer = build_char_tokenizer()
    encoded = encode_response("1+", "02", tokenizer, "here")
    assert encoded.ids == [5, 15, 4, 6, 2]
    assert encoded.in_loss == [False, False, True, True, True]


def test_a_prompt_and_its_response_in_a_template() -> None:
    tokenizer = chat_tokenizer()
    text, runs = learned(*encode_response("1+1", "2", tokenizer, "here"), tokenizer)
    assert text == "<user>1+1<eos>\n<assistant>2<eos>\n"
    assert runs == ["2<eos>"]


def test_the_end_of_an_answer_is_the_end_token_for_a_tokenizer_that_reads_none() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.split_special_tokens = True
    encoded = encode_response("1+1", "2", tokenizer, "here")
    learned_ids = [token for token, is_learned in zip(*encoded, strict=True) if is_learned]
    assert learned_ids == [*tokenizer.encode("2"), tokenizer.eos_token_id]


def test_every_answer_of_a_conversation_is_learned_and_nothing_else() -> None:
    tokenizer = chat_tokenizer()
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "thanks"},
    ]
    text, runs = learned(*encode_messages(messages, tokenizer, "here"), tokenizer)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert runs == ["2<eos>", "4<eos>"]


def test_the_parts_are_those_of_a_rollout() -> None:
    # This tokenizer has a token ">8", which the whole text has and prompt and answer do not: the prompt ends between.
    vocabulary = {character: index for index, character in enumerate("<>asitnuer78o\n")} | {">8": 14}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, [(">", "8")])), eos_token="<eos>")
    tokenizer.chat_template = CHATML
    messages = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
    encoded = encode_messages(messages, tokenizer, "here")
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert encoded.ids == [*prompt, vocabulary["8"], tokenizer.eos_token_id, vocabulary["\n"]]
    assert encoded.in_loss == [False] * len(prompt) + [True, True, False]
    assert vocabulary[">8"] in tokenizer.apply_chat_template(messages, return_dict=False)


def test_files_as_samples(tmp_path: Path) -> None:
    from datasets import Dataset

    tokenizer = build_char_tokenizer()
    one = write(tmp_path / "one.jsonl", [{"prompt": "1+", "response": "2"}, {"prompt": "", "response": "34"}])
    two = tmp_path / "two.parquet"
    Dataset.from_dict({"prompt": ["0="], "response": ["0"], "id": [7]}).to_parquet(two)
    source = TextFiles([one, str(two)], tokenizer, cache_dir=tmp_path / "cache")
    assert source.lengths.tolist() == [4, 3, 4]
    rows = [(source[i].ids.tolist(), source[i].in_loss.tolist(), source[i].origin) for i in (2, 0, 1)]
    assert rows == [
        ([4, 19, 4, 2], [False, False, True, True], f"{two} row 1"),
        ([5, 15, 6, 2], [False, False, True, True], f"{one} row 1"),
        ([7, 8, 2], [True, True, True], f"{one} row 2"),
    ]
    # Token 0 or any other of a prompt is no label, and the whole goes through packs as lists do.
    dataset = PackedDataset(pickle.loads(pickle.dumps(source)), micro_bsz=1, seq_len=12, vocab_size=96)
    assert dataset[0].input_ids.tolist() == [5, 15, 6, 2, 7, 8, 2, 4, 19, 4, 2, 0]
    assert dataset[0].labels.tolist() == [-100, 6, 2, -100, 8, 2, -100, -100, 4, 2, -100, -100]
    # The tokens are in files that are mapped into memory, not in memory.
    assert source._rows.cache_files and all(tmp_path in Path(f["filename"]).parents for f in source._rows.cache_files)


def test_messages_from_a_file(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    source = TextFiles(write(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer, cache_dir=tmp_path / "cache")
    assert learned(source[0].ids.tolist(), source[0].in_loss.tolist(), tokenizer)[1] == ["2<eos>"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1", "answer": "2"}], r"a\.jsonl must have the column messages, or prompt and"),
        ([{"prompt": "1", "response": "2"}, {"prompt": "1"}], r"row 2: response must be text, got None"),
        ([{"prompt": "1", "response": "2"}, {"prompt": "ß", "response": "1"}], r"row 2: prompt .* does not know: 'ß'"),
        ([{"prompt": "1", "response": "é"}], r"row 1: prompt and response hold characters .* 'é'"),
        ([{"messages": [{"role": "assistant", "content": "1"}]}], r"row 1: messages need a chat template"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextFiles(write(tmp_path / "a.jsonl", rows), build_char_tokenizer(), cache_dir=tmp_path / "cache")


def test_conversations_that_are_refused() -> None:
    user, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
    for messages in ([], [user]):
        with pytest.raises(ValueError, match="here: no message of role assistant"):
            encode_messages(messages, chat_tokenizer(), "here")
    with pytest.raises(ValueError, match="here: message 2 must have content as text, got None"):
        encode_messages([user, {"role": "assistant"}], chat_tokenizer(), "here")
    forgetful = chat_tokenizer(FORGETFUL)
    assert learned(*encode_messages([user, answer], forgetful, "here"), forgetful)[1] == ["2;"]
    with pytest.raises(ValueError, match="here: the chat template does not write the answer of message 4 behind"):
        encode_messages([user, answer, user, answer], forgetful, "here")
    with pytest.raises(ValueError, match="here: the chat template writes earlier answers differently"):
        encode_messages([user, answer, user], forgetful, "here")
    no_end = build_char_tokenizer()
    no_end.eos_token = None
    with pytest.raises(ValueError, match="here: the tokenizer has neither a chat template nor an end token"):
        encode_response("1", "2", no_end, "here")


def test_files_that_are_refused(tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer()
    for name, content, message in [
        (
            "torn.jsonl",
            b'{"prompt": "1", "response": "2"}\n{"prompt": "1", "resp\n',
            r"torn\.jsonl cannot be read: JSON",
        ),
        ("empty.jsonl", b"", r"empty\.jsonl is empty"),
        ("bad.parquet", b"abc", r"bad\.parquet cannot be read: Parquet"),
        ("a.txt", b"1", r"a\.txt is none of \.jsonl, \.json, \.parquet"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            TextFiles(tmp_path / name, tokenizer, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"none\.jsonl is not a file"):
        TextFiles(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(ValueError, match="no files are given"):
        TextFiles([], tokenizer)
