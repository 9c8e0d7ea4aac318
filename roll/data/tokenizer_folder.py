"""The tokenizer of a model folder, read with transformers: without a question, and without code that nobody allowed.

transformers asks at the terminal whether code of a folder may run, unless it is told. Here it always is.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from roll.config.hf_config import read_config_json
from roll.errors import UserError

CONFIG, WHOLE, SENTENCEPIECE = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"
WITHOUT_A_CLASS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of tokenizer_class, of transformers 5 and older, for a tokenizer that is what tokenizer.json says, no more."""
VOCABULARIES = (WHOLE, SENTENCEPIECE, "vocab.json", "tekken.json")


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`.

    Args:
        trust_remote_code: whether code that lies in the folder, or that it names, may run. InternLM2's folders have
            such code; where they also have tokenizer.json, none of it is needed.

    Raises:
        ValueError: the folder has no tokenizer that can be read so; with what is missing and the way out.
    """
    settings = _read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    code = _code_of(settings)
    if code and trust_remote_code:
        _check_code(folder, code)
    else:
        _check_files(folder, code)
        if (folder / WHOLE).is_file() and settings.get("tokenizer_class") in WITHOUT_A_CLASS:
            # AutoTokenizer would take the class of the model's family, and Qwen2's splits words in its own way.
            return PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, config=_tokenizer_class_of(folder), trust_remote_code=trust_remote_code
        )
    except ImportError as error:  # of the code, which names the package that it wants
        raise UserError(f"{folder} has no usable tokenizer: {error}") from error
    except (OSError, ValueError) as error:
        # transformers does without the code only for some families, such as InternLM2 and Qwen2.
        if code and not trust_remote_code:
            refused: str | None = _code_is_needed(folder, code)
        else:  # An OSError of the folder's code is about a file of it.
            refused = None if code and isinstance(error, OSError) else _package_is_needed(folder)
        raise UserError(refused or f"{folder} has no usable tokenizer: {error}") from error
    return tokenizer


def _check_files(folder: Path, code: str | None) -> None:
    """Raise ValueError unless the files are there that a tokenizer of transformers' own is made from."""
    if (folder / WHOLE).is_file():
        _check_whole(folder / WHOLE)
        return
    if code is not None:
        raise UserError(_code_is_needed(folder, code))
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise UserError(f"{folder} has no tokenizer: none of {', '.join(VOCABULARIES)}")
    if missing := _package_is_needed(folder):
        raise UserError(missing)


def _check_whole(file: Path) -> None:
    """Raise ValueError unless `file` is a tokenizer that the installed tokenizers library reads."""
    content = _read_json(file)
    if not isinstance(content.get("added_tokens"), list) or not isinstance(content.get("model"), dict):
        raise UserError(f"{file} is no tokenizer: it must have a list added_tokens and an object model")
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own is of no narrower type
        if type(error) is not Exception:
            raise
        raise UserError(
            f"{file} cannot be read by tokenizers {version('tokenizers')}: {error}; if a newer version wrote it, "
            "install that one"
        ) from error


def _check_code(folder: Path, code: str) -> None:
    """Raise ValueError if a class's file is missing in the folder; that of `repository--module.Class` is elsewhere."""
    file = folder / f"{code.rpartition('.')[0]}.py"
    if "--" not in code and not file.is_file():
        raise UserError(f"{folder} has no usable tokenizer: {CONFIG} names its code {code}, and there is no {file}")


def _package_is_needed(folder: Path) -> str | None:
    if (folder / WHOLE).is_file() or not (folder / SENTENCEPIECE).is_file() or find_spec("sentencepiece") is not None:
        return None
    return (
        f"{folder} has no {WHOLE}; its {SENTENCEPIECE} can be read only with the package sentencepiece, "
        f"which is not installed: pip install 'roll[sentencepiece]', or put a {WHOLE} into the folder"
    )


def _code_is_needed(folder: Path, code: str) -> str:
    if (folder / WHOLE).is_file():
        instead = f"take auto_map out of {CONFIG}, to do with {WHOLE} alone"
    else:
        instead = f"put a {WHOLE} into the folder, which it lacks (save_pretrained of its fast tokenizer writes one)"
    return (
        f"the tokenizer of {folder} is code of its own, {code}, which is not run unasked: read it and set "
        f"trust_remote_code=true, or {instead}"
    )


def _code_of(settings: dict[str, Any]) -> str | None:
    """The class that tokenizer_config.json names in code of its own, `module.Class`; None if there is none."""
    named = settings.get("auto_map") or {}
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = [named] if isinstance(named, str) else named or []
    return next((name for name in reversed(classes) if name), None)  # The fast tokenizer is the last.


def _tokenizer_class_of(folder: Path) -> PreTrainedConfig:
    """The model's type, and its name if it has one: transformers chooses the tokenizer's class by them.

    Read here, because transformers warns of every type that it has no model of, such as internlm2, and of every key of
    config.json that it would write differently; neither matters to the tokenizer.
    """
    content = read_config_json(folder)
    model_type = content.get("model_type")
    if model_type in CONFIG_MAPPING:
        config = AutoConfig.for_model(model_type)
    else:
        config = PreTrainedConfig()
        config.model_type = model_type
    config.name_or_path = str(folder)
    config.tokenizer_class = content.get("tokenizer_class")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
