"""Lists and InternEvo's tokenized folders as sources: what they read, and what they refuse."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.data import ListSource, Sample, SampleSource, TokenizedFolder, build_pack
from roll.data.sources.tokenized_folder import write_tokenized


def write(file: Path, lines: list[str], meta: list[tuple[int, int]]) -> Path:
    """A `.bin` file of exactly these lines, and a meta file of exactly these entries."""
    file.write_text("".join(lines))
    with (file.parent / f"{file.name}.meta").open("wb") as stream:
        np.save(stream, np.array(meta))
    return file


def contents(source: SampleSource) -> list[tuple[list[int], list[bool]]]:
    samples = [source[index] for index in range(len(source))]
    return [(sample.ids.tolist(), sample.in_loss.tolist()) for sample in samples]


def test_a_list() -> None:
    source = ListSource([[5, -6, 0], [], np.array([7], dtype=np.int32)])  # type: ignore[list-item]
    assert source.lengths.tolist() == [3, 0, 1]
    assert contents(source) == [([5, 6, 0], [True, False, True]), ([], []), ([7], [True])]
    assert source[2].ids.dtype == np.int64
    assert source[2].origin == "sample 2"


def test_the_example_of_internevos_manual(tmp_path: Path) -> None:
    # The three lines and the meta entries are those of its usage.md.
    tokens = [
        [73075, 75302, 69522, 69022, 98899, 67713, 68015, 81269, 74637, 75445, 99157],
        [69469, 60355, 73026, 68524, 60846, 61844, 98899, 67775, 79241, 98899, 67713, 67800, 67453, 67838, 99157],
        [68057, 79017, 60378, 68014, 98899, 67713, 67990, 68015, 70381, 67428, 61003, 67622, 99157],
    ]
    lines = [json.dumps({"tokens": row}) + "\n" for row in tokens]
    write(tmp_path / "output.bin", lines, [(0, 11), (90, 15), (208, 13)])
    source = TokenizedFolder(tmp_path)
    assert source.lengths.tolist() == [11, 15, 13]
    assert [source[index].ids.tolist() for index in (2, 0, 1)] == [tokens[2], tokens[0], tokens[1]]
    assert source[1].origin == f"{tmp_path / 'output.bin'} line 2"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "cn").mkdir()
    write_tokenized(tmp_path / "b.bin", [[1, -2, 3], []])
    write_tokenized(tmp_path / "cn" / "a.bin", iter([[4]]))
    write_tokenized(tmp_path / "a.bin", [])
    source = TokenizedFolder(tmp_path)
    assert [file.name for file in source.files] == ["a.bin", "b.bin", "a.bin"]
    expected = [([1, 2, 3], [True, False, True]), ([], []), ([4], [True])]
    assert contents(source) == contents(pickle.loads(pickle.dumps(source))) == expected
    assert contents(TokenizedFolder(tmp_path / "b.bin")) == expected[:2]
    assert source.notes == (f"no sample to read: {tmp_path / 'a.bin'} is empty",)
    with pytest.raises(IndexError, match="sample 3 of 3"):
        source[3]
    with pytest.raises(ValueError, match=r"^no sample to read: .*a\.bin is empty$"):
        TokenizedFolder(tmp_path / "a.bin")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def samples() -> Iterator[list[int]]:
        yield [1]
        raise RuntimeError("the tokenizer broke")

    write_tokenized(tmp_path / "a.bin", [[7]])
    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        write_tokenized(tmp_path / "a.bin", samples())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.bin.meta"]
    assert TokenizedFolder(tmp_path)[0].ids.tolist() == [7]


LINES = ['{"tokens": [1, 2]}\n', '{"tokens": [3]}\n']  # 19 and 16 bytes


@pytest.mark.parametrize(
    ("lines", "meta", "message"),
    [
        ([*LINES[:1], '{"tokens": [3'], [(0, 2), (19, 1)], r"a\.bin line 2 is torn"),
        (LINES[:1], [(0, 2), (19, 1)], r"a\.bin\.meta entry 2 begins at byte 19, but a\.bin has 19 bytes"),
        (LINES, [(0, 2), (0, 1)], r"a\.bin\.meta entry 2 is \(0, 1\): offsets must rise"),
        (LINES, [(-4, 2), (19, 1)], r"a\.bin\.meta entry 1 is \(-4, 2\)"),
        (LINES, [(0, -2), (19, 1)], r"a\.bin\.meta entry 1 is \(0, -2\)"),
        (LINES, [], r"a\.bin\.meta has no entry, a\.bin has 35 bytes"),
        (LINES, [(0, 2)], r"a\.bin\.meta has 1 entries, a\.bin has lines behind that of the last"),
        (LINES, [(19, 1)], r"a\.bin\.meta entry 1 begins at byte 19, not where a\.bin begins"),
        (LINES, [(0, 2, 1), (19, 1, 1)], r"must hold integers \[n, 2\], got int64 \[2, 3\]"),
        (LINES, [(0.0, 2.0)], r"must hold integers \[n, 2\], got float64 \[1, 2\]"),
    ],
)
def test_files_that_do_not_match_are_refused_at_once(
    tmp_path: Path, lines: list[str], meta: list[tuple[int, int]], message: str
) -> None:
    write(tmp_path / "a.bin", lines, meta)
    with pytest.raises(ValueError, match=message):
        TokenizedFolder(tmp_path)


@pytest.mark.parametrize(
    ("lines", "meta", "index", "message"),
    [
        (['{"tokens": [1, \n', *LINES], [(0, 2), (16, 2), (35, 1)], 0, r"line 1: no JSON object .* at byte 0"),
        (
            [*LINES, LINES[1]],
            [(0, 2), (18, 1), (35, 1)],
            1,
            r"line 2: no JSON object .* at byte 18: the line is torn, or the meta",
        ),
        (LINES, [(0, 2), (19, 2)], 1, r"line 2: the meta file says 2 tokens, the line holds 1 tokens"),
        (['{"text": "x"}\n'], [(0, 2)], 0, r"line 1: no JSON object"),
        (["[1, 2]\n"], [(0, 2)], 0, r"line 1: no JSON object"),
        (['{"tokens": "ab"}\n'], [(0, 2)], 0, r"line 1: .* the line holds 'ab'"),
        (['{"tokens": [1, "b"]}\n'], [(0, 2)], 0, r"line 1: tokens must be a flat list of integers"),
        (['{"tokens": [1.5, 2]}\n'], [(0, 2)], 0, r"line 1: tokens must be a flat list of integers"),
    ],
)
def test_a_line_that_does_not_match_is_refused_when_it_is_read(
    tmp_path: Path, lines: list[str], meta: list[tuple[int, int]], index: int, message: str
) -> None:
    source = TokenizedFolder(write(tmp_path / "a.bin", lines, meta))
    with pytest.raises(ValueError, match=rf"a\.bin {message}"):
        source[index]


def test_no_files_no_meta_and_a_meta_file_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.bin file"):
        TokenizedFolder(tmp_path)
    file = tmp_path / "a.bin"
    file.write_text(LINES[0])
    with pytest.raises(ValueError, match=r"a\.bin has no meta file a\.bin\.meta beside it"):
        TokenizedFolder(tmp_path)
    (tmp_path / "a.bin.meta").write_bytes(b"(0, 2)")
    with pytest.raises(ValueError, match=r"a\.bin\.meta is not a NumPy array file"):
        TokenizedFolder(tmp_path)


def test_ids_outside_the_vocabulary_are_named() -> None:
    sample = Sample.from_signed([4, -9, 3], "rows.bin line 7")
    sample.check_vocabulary(10)
    with pytest.raises(ValueError, match=r"rows\.bin line 7: token 1 has id 9, outside the vocabulary of 9"):
        sample.check_vocabulary(9)


@pytest.mark.parametrize("samples", [[1, 2], [[1, 2], 3], [None]])
def test_a_sample_that_is_no_list(samples: Any) -> None:
    with pytest.raises(ValueError, match=r"^sample \d must be a list of token ids, got"):
        build_pack(samples, micro_bsz=1, seq_len=4)
