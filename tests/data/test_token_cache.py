"""The cache of tokenized files: a second start reads it, and whatever decides the tokens makes a new entry."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from roll.data.sources import token_cache
from roll.data.sources.token_cache import CachedTokens, cached_tokens, default_cache_dir, encoding_source, fingerprint
from roll.data.tokenizer import build_char_tokenizer
from tests.data.tokenizer_kinds import byte_level_bpe

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rows_file(folder: Path) -> Path:
    file = folder / "a.jsonl"
    file.write_text('{"prompt": "1", "response": "2"}\n')
    return file


def test_the_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = rows_file(tmp_path), tmp_path / "cache"
    folder = cached_tokens(file, build_char_tokenizer(), cache)
    ids, in_loss = CachedTokens(folder)[0]
    assert (ids.tolist(), in_loss.tolist()) == ([5, 6, 2], [False, True, True])
    assert (ids.dtype, in_loss.dtype) == (np.int64, np.bool_)
    monkeypatch.setattr(token_cache, "read_rows", lambda path: pytest.fail("the file is read again"))
    assert cached_tokens(file, build_char_tokenizer(), cache) == folder
    # The name and place of a file do not decide its tokens.
    assert cached_tokens(file.rename(tmp_path / "b.jsonl"), build_char_tokenizer(), cache) == folder


def content(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    stamps = file.stat()
    file.write_text(file.read_text().replace("2", "3"))
    import os

    os.utime(file, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))


def template(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    tokenizer.chat_template += " "


def no_template(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    tokenizer.chat_template = None


def added_token(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    tokenizer.add_tokens(["12"])


def end_token(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    tokenizer.eos_token = "<|im_end|>"


def begin_token(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    tokenizer.backend_tokenizer.post_processor = build_char_tokenizer().backend_tokenizer.post_processor


def unread_special_tokens(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    tokenizer.split_special_tokens = True


CHANGES: list[Callable[[PreTrainedTokenizerFast, Path], None]] = [
    content,
    template,
    no_template,
    added_token,
    end_token,
    begin_token,
    unread_special_tokens,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_the_tokens_is_in_the_fingerprint(
    tmp_path: Path, change: Callable[[PreTrainedTokenizerFast, Path], None]
) -> None:
    file = rows_file(tmp_path)
    before = fingerprint(file, chat_tokenizer())
    tokenizer = chat_tokenizer()
    change(tokenizer, file)
    assert fingerprint(file, tokenizer) != before


def test_how_a_file_is_read_is_in_the_fingerprint(tmp_path: Path) -> None:
    file = rows_file(tmp_path)
    before = fingerprint(file, chat_tokenizer())
    assert fingerprint(file.rename(tmp_path / "a.json"), chat_tokenizer()) != before


@pytest.mark.parametrize("name", token_cache.ENCODING_MODULES)
def test_our_own_code_is_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, module = rows_file(tmp_path), importlib.import_module(name)
    before = fingerprint(file, chat_tokenizer())
    assert module.__doc__ is not None and module.__doc__ in encoding_source()
    source = token_cache.inspect.getsource
    monkeypatch.setattr(
        token_cache.inspect, "getsource", lambda one: source(one) + ("\n# changed" if one is module else "")
    )
    assert fingerprint(file, chat_tokenizer()) != before


@pytest.mark.parametrize("library", token_cache.LIBRARIES)
def test_versions_are_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    file = rows_file(tmp_path)
    before, version = fingerprint(file, chat_tokenizer()), token_cache.version
    monkeypatch.setattr(token_cache, "version", lambda name: version(name) + ("1" if name == library else ""))
    assert fingerprint(file, chat_tokenizer()) != before


def test_the_day_is_in_it_where_the_template_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, dated = rows_file(tmp_path), chat_tokenizer()
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    before = [fingerprint(file, tokenizer) for tokenizer in (chat_tokenizer(), dated)]

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> Tomorrow:
            return cls(2222, 2, 2)

    monkeypatch.setattr(token_cache, "date", Tomorrow)
    after = [fingerprint(file, tokenizer) for tokenizer in (chat_tokenizer(), dated)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_using_a_tokenizer_changes_nothing(tmp_path: Path) -> None:
    file, tokenizer = rows_file(tmp_path), chat_tokenizer()
    before = fingerprint(file, tokenizer)
    tokenizer.pad_token = None
    tokenizer("the cat", truncation=True, max_length=1)
    assert fingerprint(file, tokenizer) == before


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    file, cache = rows_file(tmp_path), tmp_path / "cache"
    partial = cache / f"{fingerprint(file, build_char_tokenizer())}.partial"
    partial.mkdir(parents=True)
    (partial / "ids.bin").write_bytes(b"half")
    folder = cached_tokens(file, build_char_tokenizer(), cache)
    assert CachedTokens(folder)[0][0].tolist() == [5, 6, 2]
    assert not partial.exists()


def _first_ids(file: Path, cache: Path) -> list[int]:
    return CachedTokens(cached_tokens(file, build_char_tokenizer(), cache))[0][0].tolist()


def test_processes_that_come_together_find_the_same(tmp_path: Path) -> None:
    file, cache = rows_file(tmp_path), tmp_path / "cache"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.starmap(_first_ids, [(file, cache)] * 8)
    assert found == [[5, 6, 2]] * 8
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_the_default_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "roll"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "roll"
