"""Plain text as samples, and a part of a source held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roll.data.sources.lists import ListSource
from roll.data.sources.paragraphs import Paragraphs
from roll.data.sources.part import hold_out
from roll.data.tokenizer import build_char_tokenizer

TOKENIZER = build_char_tokenizer("ab\n ")  # a 4, b 5, line break 6, blank 7


def test_paragraphs_stand_between_blank_lines_and_end_with_the_end_token(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_bytes(b"\n \na\n b \n\n\nba\n")
    second.write_bytes("aéa\r\n\r\nb".encode())
    source = Paragraphs([first, second], TOKENIZER)
    assert [source[i].ids.tolist() for i in range(len(source))] == [[4, 6, 7, 5, 2], [5, 4, 2], [4, 3, 4, 2], [5, 2]]
    assert source.lengths.tolist() == [5, 3, 4, 2]
    # The unknown letter is one token, which is not learned.
    assert source.num_unknown == 1
    assert source.notes == ("1 tokens are unknown to the tokenizer, and are not learned",)
    assert source[2].in_loss.tolist() == [True, False, True, True]
    assert source[3].origin == f"{second} at byte 8"


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    with pytest.raises(ValueError, match=r"text\.txt is not a file"):
        Paragraphs([file], TOKENIZER)
    file.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"text\.txt is not UTF-8 text: invalid start byte at byte 2"):
        Paragraphs([file], TOKENIZER)
    for number, content in enumerate((b"", b"\xef\xbb\xbf", b" \n\t\n")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"^no text to read: .*text\.txt is empty$"):
            Paragraphs([file], TOKENIZER)
        (tmp_path / f"{number}.txt").write_bytes(content)
    several = [tmp_path / "0.txt", tmp_path / "1.txt", tmp_path / "2.txt", file]
    with pytest.raises(ValueError, match=r"^no text to read: \S*0\.txt, \S*1\.txt, \S*2\.txt and 1 more are empty$"):
        Paragraphs(several, TOKENIZER)
    file.write_bytes(b"abab\n")
    assert Paragraphs(several, TOKENIZER).notes == (f"no text to read: {', '.join(map(str, several[:3]))} are empty",)
    assert Paragraphs([file], TOKENIZER).notes == ()
    source = Paragraphs([file], TOKENIZER)
    file.write_bytes(b"ab\n")
    with pytest.raises(ValueError, match="the paragraph had 5 tokens and now has 4: the file has changed"):
        source[0]


def test_held_out_samples_are_never_trained_on() -> None:
    source = ListSource([[number] * (1 + number % 3) for number in range(20)])
    train, held_out = hold_out(source, 0.15, seed=3)
    numbers = [sorted(int(part[i].ids[0]) for i in range(len(part))) for part in (train, held_out)]
    assert len(numbers[1]) == 3
    assert sorted(numbers[0] + numbers[1]) == list(range(20))
    assert held_out.lengths.tolist() == [1 + number % 3 for number in numbers[1]]
    assert not np.array_equal(hold_out(source, 0.15, seed=4)[1].lengths, []) and len(hold_out(source, 0.01, 0)[1]) == 1
    with pytest.raises(ValueError, match=r"0\.99 of 20 samples is 20 held out, which leaves none to train on"):
        hold_out(source, 0.99, seed=3)
