"""Tokenizers of model folders: nothing is asked, no code runs unasked, and what is missing is said with a way out."""

from __future__ import annotations

import builtins
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from roll.data.tokenizer import build_char_tokenizer
from roll.data.tokenizer_folder import load_tokenizer
from roll.families import FAMILIES

TOKENIZER = build_char_tokenizer()
TEXT = "the  cat sat, 1+2="
OWN_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizer

(Path({ran!r})).touch()


class InternLM2Tokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tokenizer.model"}}

    def __init__(self, vocab_file, **settings):
        self.tokens = ["<unk>", "<s>", "</s>", *Path(vocab_file).read_text()]
        super().__init__(**settings)

    @property
    def vocab_size(self):
        return len(self.tokens)

    def get_vocab(self):
        return {{token: index for index, token in enumerate(self.tokens)}}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.tokens.index(token) if token in self.tokens else 0

    def _convert_id_to_token(self, index):
        return self.tokens[index]
"""
# Not like InternLM2's, which is a Python tokenizer: transformers converts its model, which takes sentencepiece.
FAST_CODE = "from transformers import PreTrainedTokenizerFast\nclass InternLM2Tokenizer(PreTrainedTokenizerFast): ...\n"


class Silence:
    """A standard input that must not be read."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"standard input was asked for {name}")


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prompt: object = "") -> str:
        raise AssertionError(f"a question was asked: {prompt}")

    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(sys, "stdin", Silence())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What transformers logs as a warning or worse."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    transformers_logging.add_handler(handler)
    yield said
    transformers_logging.remove_handler(handler)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of folders is copied to a place of this test, not to the user's cache."""
    place = str(tmp_path / "modules")
    monkeypatch.setattr(importlib.import_module("transformers.dynamic_module_utils"), "HF_MODULES_CACHE", place)
    monkeypatch.setattr(sys, "path", list(sys.path))


def write_config(folder: Path, family: str) -> Path:
    folder.mkdir(exist_ok=True)
    # Habits that transformers warns of or refuses: none of them matters to the tokenizer.
    content = {"model_type": family, "vocab_size": 96, "pad_token_id": -1, "rms_norm_eps": "1e-06", "rope_theta": None}
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(content | {"auto_map": auto_map, "torch_dtype": "bfloat16"}))
    return folder


def write_code(folder: Path) -> Path:
    """As InternLM2's folders have it: tokenizer.model and code, no tokenizer.json. Where the code says it was run."""
    ran = folder / "ran"
    (folder / "tokenizer.model").write_text("abc")  # Stands in for a SentencePiece model; only this code reads it.
    auto_map = {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}
    settings = {"auto_map": auto_map, "tokenizer_class": "InternLM2Tokenizer", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_internlm2.py").write_text(OWN_CODE.format(ran=str(ran)))
    return ran


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_our_own_tokenizer_reads_back_and_nothing_is_warned_of(
    tmp_path: Path, warnings: list[str], family: str, trust: bool
) -> None:
    """AutoTokenizer takes Qwen2's class for every folder of its family, which reads no blanks out of this one."""
    folder = write_config(tmp_path / "model", family)
    TOKENIZER.save_pretrained(folder)
    loaded = load_tokenizer(folder, trust_remote_code=trust)
    assert loaded.encode(TEXT) == TOKENIZER.encode(TEXT)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2, 3)
    assert warnings == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_tokenizer_without_settings_is_what_transformers_makes_of_it(
    tmp_path: Path, warnings: list[str], family: str
) -> None:
    folder = write_config(tmp_path / "model", family)
    TOKENIZER.save_pretrained(folder)
    (folder / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(folder, trust_remote_code=False)
    assert (loaded.encode(TEXT) == TOKENIZER.encode(TEXT)) == (family not in ("qwen2", "qwen3"))
    assert warnings == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_code_of_a_folder_runs_only_where_it_is_trusted(tmp_path: Path, warnings: list[str], family: str) -> None:
    folder = write_config(tmp_path / "model", family)
    ran = write_code(folder)
    with pytest.raises(
        ValueError, match=r"is code of its own, tokenization_internlm2\.InternLM2Tokenizer, which is not"
    ) as refused:
        load_tokenizer(folder, trust_remote_code=False)
    for word in (str(folder), "trust_remote_code=true", "put a tokenizer.json into the folder"):
        assert word in str(refused.value)
    assert not ran.exists()
    loaded = load_tokenizer(folder, trust_remote_code=True)
    assert ran.exists()
    assert loaded.encode("cab") == [5, 3, 4]
    assert loaded.eos_token_id == 2
    assert warnings == []


@pytest.mark.parametrize("family", ["internlm2", "llama"])
def test_tokenizer_json_does_without_the_code_where_transformers_does(tmp_path: Path, family: str) -> None:
    folder = write_config(tmp_path / "model", family)
    ran = write_code(folder)
    TOKENIZER.backend_tokenizer.save(str(folder / "tokenizer.json"))
    if family == "internlm2":
        assert load_tokenizer(folder, trust_remote_code=False).encode(TEXT) == TOKENIZER.encode(TEXT)
    else:
        with pytest.raises(
            ValueError, match=r"or take auto_map out of tokenizer_config\.json, to do with tokenizer\.json"
        ):
            load_tokenizer(folder, trust_remote_code=False)
    assert not ran.exists()


@pytest.mark.parametrize(
    "named",
    [
        {"AutoTokenizer": ["a.Slow", None]},
        {"AutoTokenizer": "a.Slow"},
        ["a.Slow", None],
        {"AutoTokenizer": [None, "a.Slow"]},
    ],
)
def test_every_way_to_name_code(tmp_path: Path, named: Any) -> None:
    folder = write_config(tmp_path / "model", "internlm2")
    write_code(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": named}))
    with pytest.raises(ValueError, match=r"is code of its own, a\.Slow,"):
        load_tokenizer(folder, trust_remote_code=False)


def test_code_that_asks_for_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config(tmp_path / "model", "internlm2")
    write_code(folder)
    (folder / "tokenization_internlm2.py").write_text("import no_such_package_anywhere\n")
    with pytest.raises(ValueError, match=r"has no usable tokenizer: .*no_such_package_anywhere"):
        load_tokenizer(folder, trust_remote_code=True)
    (folder / "tokenization_internlm2.py").write_text(FAST_CODE)
    monkeypatch.setattr("roll.data.tokenizer_folder.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"only with the package sentencepiece, which is not installed"):
        load_tokenizer(folder, trust_remote_code=True)


def test_trusted_code_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has tokenizer.model too; its package is not what is missing."""
    folder = write_config(tmp_path / "model", "internlm2")
    write_code(folder)
    monkeypatch.setattr("roll.data.tokenizer_folder.find_spec", lambda name: None)
    code = folder / "tokenization_internlm2.py"
    code.write_text("from .no_such_file import Base\n")
    with pytest.raises(ValueError, match=r"has no usable tokenizer: .*no_such_file"):
        load_tokenizer(folder, trust_remote_code=True)
    code.unlink()
    with pytest.raises(ValueError, match=rf"has no usable tokenizer: .*_internlm2\.\w+, and there is no {code}$"):
        load_tokenizer(folder, trust_remote_code=True)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = write_config(tmp_path / "model", family)
    with pytest.raises(ValueError, match=rf"^{folder} has no tokenizer: none of tokenizer\.json, tokenizer\.model"):
        load_tokenizer(folder, trust_remote_code=False)
    (folder / "tokenizer.model").write_text("abc")
    monkeypatch.setattr("roll.data.tokenizer_folder.find_spec", lambda name: None)
    missing = r"only with the package sentencepiece, which is not installed: pip install 'roll\[sentencepiece\]'"
    with pytest.raises(ValueError, match=missing):
        load_tokenizer(folder, trust_remote_code=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "must hold a JSON object, got list")])
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = write_config(tmp_path / "model", "llama")
    TOKENIZER.save_pretrained(folder)
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} {message}"):
        load_tokenizer(folder, trust_remote_code=False)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_a_tokenizer_of_another_version_is_named(tmp_path: Path, tokenizer_class: str | None) -> None:
    folder = write_config(tmp_path / "model", "llama")
    TOKENIZER.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    content = json.loads((folder / "tokenizer.json").read_text())
    library = rf"cannot be read by tokenizers {version('tokenizers')}: "
    damaged = {
        library + "data did not match .*ModelUntagged": content | {"model": {"type": "Next", "vocab": {}}},
        library + "data did not match .*PreTokenizerUntagged.*; if a newer": content | {"pre_tokenizer": {"type": "N"}},
        library + "missing field `content`": content | {"added_tokens": [{"id": 0}]},
        "is no tokenizer: it must have a list added_tokens and an object model": {"a": 1},
        "is no tokenizer: it must have a list": content | {"model": 3},
        "is no tokenizer: it must have": content | {"added_tokens": 3},
    }
    for message, whole in damaged.items():
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        with pytest.raises(ValueError, match=rf"^{folder}/tokenizer\.json {message}"):
            load_tokenizer(folder, trust_remote_code=False)


def test_other_warnings_are_still_heard(tmp_path: Path, warnings: list[str]) -> None:
    folder = write_config(tmp_path / "model", "internlm2")
    TOKENIZER.save_pretrained(folder)
    load_tokenizer(folder, trust_remote_code=False)
    transformers_logging.get_logger("transformers.configuration_utils").warning("something else")
    assert warnings == ["something else"]
