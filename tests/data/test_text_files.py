"""Conversations in jsonl and parquet files as samples; what of a file is refused, and how its row is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.data import PackedDataset, TextFiles
from roll.data.sources.conversation import encode_messages, encode_response
from roll.data.sources.text_rows import read_rows
from roll.data.tokenizer import build_char_tokenizer
from tests.data.test_conversation import chat_tokenizer

TOKENIZER = build_char_tokenizer()
MESSAGES = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
GOOD = b'{"prompt": "1", "response": "2"}\n'


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples(source: TextFiles) -> list[tuple[list[int], list[bool]]]:
    return [(source[row].ids.tolist(), source[row].in_loss.tolist()) for row in range(len(source))]


def test_files_as_samples(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"prompt": "1+", "response": "2"}, {"prompt": "", "response": "34"}])
    two = tmp_path / "two.parquet"
    pq.write_table(pa.table({"prompt": ["0="], "response": ["0"], "id": [7]}), two)
    source = TextFiles([one, str(two)], TOKENIZER, cache_dir=tmp_path / "cache")
    assert source.lengths.tolist() == [4, 3, 4]
    rows = [(source[i].ids.tolist(), source[i].in_loss.tolist(), source[i].origin) for i in (2, 0, 1)]
    assert rows == [
        ([4, 19, 4, 2], [False, False, True, True], f"{two} row 1"),
        ([5, 15, 6, 2], [False, False, True, True], f"{one} row 1"),
        ([7, 8, 2], [True, True, True], f"{one} row 2"),
    ]
    with pytest.raises(IndexError, match="row 3 of 3"):
        source[3]
    # Token 0 or any other of a prompt is no label, and the whole goes through packs as lists do.
    pickled = pickle.dumps(source)
    assert b"memmap" not in pickled and len(pickled) < 3000, "tokens are sent by the name of their file"
    dataset = PackedDataset(pickle.loads(pickled), micro_bsz=1, seq_len=12, vocab_size=96)
    assert dataset[0].input_ids.tolist() == [5, 15, 6, 2, 7, 8, 2, 4, 19, 4, 2, 0]
    assert dataset[0].labels.tolist() == [-100, 6, 2, -100, 8, 2, -100, -100, 4, 2, -100, -100]


def test_messages_and_pairs_from_one_file(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    rows = [{"messages": MESSAGES}, {"prompt": "1+1", "response": "2"}, {"messages": MESSAGES, "prompt": None}]
    source = TextFiles(write(tmp_path / "a.jsonl", rows), tokenizer, cache_dir=tmp_path / "cache")
    assert samples(source) == [tuple(encode_messages(MESSAGES, tokenizer, ""))] * 3
    nested = pa.array([MESSAGES, MESSAGES])
    pq.write_table(pa.table({"messages": nested, "n": [1, 2]}), tmp_path / "a.parquet")
    assert samples(TextFiles(tmp_path / "a.parquet", tokenizer, cache_dir=tmp_path / "cache")) == samples(source)[:2]


LOOKS_LIKE_MORE = [
    "2024-01-01", "007", "1e5", "null", "NA", "nan", "true", "[1, 2]", '{"a": 1}', "12:30", "1,5", " 1 ", "", "0x1F",
    "a\u2028b", "a\x85b", "a\x0bb", "a\x00b", "\ufeff", "\r\n", "é", "\U0001f600",
]  # fmt: skip


def test_text_stays_text(tmp_path: Path) -> None:
    alphabet = "".join(sorted(set("".join(LOOKS_LIKE_MORE))))
    tokenizer = build_char_tokenizer(alphabet)
    rows = [{"prompt": text, "response": text} for text in LOOKS_LIKE_MORE]
    escaped = write(tmp_path / "a.jsonl", rows)
    raw = tmp_path / "b.jsonl"
    raw.write_bytes("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    table = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    expected = [tuple(encode_response(text, text, tokenizer, "")) for text in LOOKS_LIKE_MORE]
    for path in (escaped, raw, table):
        assert [row for _, row in read_rows(path)] == rows
        assert samples(TextFiles(path, tokenizer, cache_dir=tmp_path / "cache")) == expected


def test_late_rows_may_have_other_keys(tmp_path: Path) -> None:
    late = [{"role": "user", "content": "1+1", "name": "Ann", "tags": [1, "a"]}, {"role": "assistant", "content": "2"}]
    rows = [*[{"messages": MESSAGES}] * 30_000, {"messages": late, "id": 7}, {"messages": MESSAGES, "id": "seven"}]
    assert [row for _, row in read_rows(write(tmp_path / "all.jsonl", rows))] == rows
    tokenizer = chat_tokenizer()
    source = TextFiles(write(tmp_path / "last.jsonl", rows[-5:]), tokenizer, cache_dir=tmp_path / "cache")
    assert samples(source) == [tuple(encode_messages(MESSAGES, tokenizer, ""))] * 5


def test_what_editors_do_to_lines_changes_nothing(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf\r\n{"prompt": "1", "response": "2"}\r\n\n   \n\t{"prompt": "3", "response": "4"}'
    (tmp_path / "a.jsonl").write_bytes(content)
    source = TextFiles(tmp_path / "a.jsonl", TOKENIZER, cache_dir=tmp_path / "cache")
    assert [ids for ids, _ in samples(source)] == [[5, 6, 2], [7, 8, 2]]
    (tmp_path / "a.json").write_bytes(
        b'\xef\xbb\xbf [\n {"prompt": "1",\n "response": "2"}, {"prompt": "3", "response": "4"}]'
    )
    array = TextFiles(tmp_path / "a.json", TOKENIZER, cache_dir=tmp_path / "cache")
    assert samples(array) == samples(source)
    assert array[1].origin == f"{tmp_path / 'a.json'} row 2"


REFUSED_LINES = [
    (GOOD + b'{"prompt": "1"}', r"a\.jsonl row 2 must have messages, or prompt and response; it has prompt$"),
    (b"{}", r"a\.jsonl row 1 must have messages, or prompt and response; it has nothing$"),
    (GOOD + b'\n\n{"prompt": "1", "response": null}', r"a\.jsonl row 2 \(line 4\): response must be text, got null$"),
    (b'{"prompt": 1, "response": "2"}', r"a\.jsonl row 1: prompt must be text, got 1$"),
    (b'{"prompt": "1", "response": true}', r"row 1: response must be text, got True$"),
    (b'{"prompt": "1", "response": ["2"]}', r"row 1: response must be text, got the list \['2'\]$"),
    (GOOD + b'{"prompt": "\\u00df", "response": "1"}', r"a\.jsonl row 2 holds text .* does not know: '\u00df'$"),
    (GOOD + b'{"prompt": "\xdf", "response": "1"}\n',
     r"a\.jsonl row 2 is not UTF-8 text: byte 13 of it is 0xdf; convert the file to UTF-8$"),
    (GOOD.decode().encode("utf-16"), r"a\.jsonl row 1 is not UTF-8 text: byte 1 of it is 0xff"),
    (GOOD + b'{"prompt": "1", "resp', r"a\.jsonl row 2 is not JSON: .*; the file ends within this line$"),
    (GOOD + b'{"prompt": "1", "resp\n' + GOOD, r"row 2 is not JSON: Invalid control character at character 22$"),
    (b"{'prompt': '1'}\n", r"a\.jsonl row 1 is not JSON: Expecting property name"),
    (GOOD + b'["1", "2"]', r"a\.jsonl row 2 must be an object with messages, or .*; it is \['1', '2'\]$"),
    (b'"text"', r"a\.jsonl row 1 must be an object .*; it is 'text'$"),
    (b"[" * 100_000, r"a\.jsonl row 1 is not JSON that can be read: "),
    (b'{"prompt": ' + b"1" * 5000 + b"}", r"a\.jsonl row 1 is not JSON that can be read: Exceeds the limit"),
    (b'{"messages": "[]"}', r"row 1: messages must be a list of objects .*, got the text '\[\]'$"),
    (b'{"messages": ["a", "b"]}', r"row 1: message 1 must be an object with role and content, got the text 'a'$"),
    (GOOD + b'{"messages": []}', r"row 2: no message of role assistant, so there is nothing to learn"),
    (b'{"messages": [{"role": "assistant", "content": "1"}]}', r"row 1: messages need a chat template"),
    (GOOD + b'{"prompt": "1", "response": "2", "prompt": "3"}',
     r"a\.jsonl row 2 has the key 'prompt' twice in one object: which one holds\?$"),
    (b'{"messages": [{"role": "user", "role": "assistant", "content": "1"}]}',
     r"a\.jsonl row 1 has the key 'role' twice in one object"),
    (b"", r"a\.jsonl is empty: it holds no row$"),
    (b"\xef\xbb\xbf\n \r\n\n", r"a\.jsonl is empty: it holds no row$"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED_LINES)
def test_lines_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TextFiles(tmp_path / "a.jsonl", TOKENIZER, cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()], "half of a file is no cache"


def test_a_template_that_raises_names_file_and_row(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    rows = [{"messages": MESSAGES}, {"messages": [{"role": "system", "content": "1"}, *MESSAGES]}]
    with pytest.raises(ValueError, match=r"a\.jsonl row 2: the chat template refuses the conversation: no system role"):
        TextFiles(write(tmp_path / "a.jsonl", rows), tokenizer, cache_dir=tmp_path / "cache")


def test_tables_that_are_refused(tmp_path: Path) -> None:
    text = pa.array(["1", "2"])
    not_utf8 = pa.StringArray.from_buffers(2, text.buffers()[1], pa.py_buffer(b"1\xdf"))
    tables = [
        ({"prompt": text, "answer": text}, r"a\.parquet must have the column messages, or prompt and response; it has"),
        ({"prompt": text, "response": [None, "2"]}, r"a\.parquet row 1: response must be text, got null$"),
        ({"prompt": text, "response": ["2", None]}, r"a\.parquet row 2: response must be text, got null$"),
        ({"prompt": text, "response": [1, 2]}, r"a\.parquet row 1: response must be text, got 1$"),
        ({"prompt": text, "response": [b"1", b"2"]}, r"row 1: response must be text, got the bytes b'1'$"),
        ({"messages": [None, None]}, r"a\.parquet row 1 must have messages, or prompt and response"),
        ({"messages": [[], []]}, r"a\.parquet row 1: no message of role assistant"),
        ({"messages": ["[]", "[]"]}, r"a\.parquet row 1: messages must be a list of objects"),
        ({"prompt": text, "response": not_utf8}, r"a\.parquet row 2 is not UTF-8 text"),
        ({"prompt": text[:0], "response": text[:0]}, r"a\.parquet is empty: it holds no row$"),
    ]  # fmt: skip
    for columns, message in tables:
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=message):
            TextFiles(tmp_path / "a.parquet", TOKENIZER, cache_dir=tmp_path / "cache")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", b"abc", whole[:-9], b"PAR1" + b"\0" * 40 + b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read: "):
            TextFiles(tmp_path / "a.parquet", TOKENIZER, cache_dir=tmp_path / "cache")


def test_files_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in [
        ("a.txt", r"a\.txt is none of \.jsonl, \.json, \.parquet$"),
        ("none.jsonl", r"none\.jsonl is not a file$"),
        ("folder.jsonl", r"folder\.jsonl is not a file$"),
    ]:
        with pytest.raises(ValueError, match=message):
            TextFiles(tmp_path / name, TOKENIZER, cache_dir=tmp_path / "cache")
    (tmp_path / "a.json").write_bytes(b'[{"prompt": "1", "response": "2"}, 3]')
    with pytest.raises(ValueError, match=r"a\.json row 2 must be an object .*; it is 3$"):
        TextFiles(tmp_path / "a.json", TOKENIZER, cache_dir=tmp_path / "cache")
    (tmp_path / "a.json").write_bytes(b'[{"prompt": "1"')
    with pytest.raises(ValueError, match=r"a\.json is not JSON: Expecting"):
        TextFiles(tmp_path / "a.json", TOKENIZER, cache_dir=tmp_path / "cache")
    (tmp_path / "b.jsonl").symlink_to("/proc/self/mem")  # Opens, and its first byte cannot be read.
    with pytest.raises(ValueError, match=r"b\.jsonl cannot be read: .*Input/output error"):
        list(read_rows(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match="no files are given"):
        TextFiles([], TOKENIZER)
    with pytest.raises(ValueError, match=r"^cache_dir .*a\.txt cannot keep the tokens of conversations: "):
        TextFiles(
            write(tmp_path / "a.jsonl", [{"prompt": "1", "response": "2"}]), TOKENIZER, cache_dir=tmp_path / "a.txt"
        )
