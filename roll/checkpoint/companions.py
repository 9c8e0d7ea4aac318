"""Files of a model folder beside its weights, copied when the model is written elsewhere.

config.json keeps every key that does not change, with those that only other libraries read (`auto_map`). Tokenizer,
chat templates, generation_config.json and the code that `auto_map` names are copied byte by byte, so that a library
that loaded the one folder loads the other. Left behind are weights, their indexes, the model card (README), and what a
trainer left (its state, its results, an adapter).

A model that is written over the folder it came from loses nothing but its old weights. A model whose folder is gone by
then is written all the same, with its weights and a config.json of what the weights need, and a warning.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from roll.checkpoint.weight_files import INDEX, OLD_INDEX, indexed_files
from roll.config import ConfigError, ModelConfig
from roll.config.hf_config import read_config_json
from roll.errors import UserError

logger = logging.getLogger(__name__)

CONFIG = "config.json"
WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"}
)  # fmt: skip
MODEL_WEIGHTS = ("model", "pytorch_model", "tf_model", "flax_model")
"""Beginnings of the names of weight files that a library takes for those of the model."""
TEXTS = frozenset({".json", ".jinja", ".py", ".txt", ".model", ".tiktoken", ".vocab", ".bpe"})
ALWAYS = ("tokenizer", "special_tokens", "added_tokens", "license", "notice")
"""Beginnings of names that are copied whatever their suffix."""
LEFT_BEHIND = ("readme", "requirements", "trainer_state", "adapter_config")
"""Beginnings of names that are never copied."""
TEMPLATE_FOLDERS = ("chat_templates", "additional_chat_templates")


def announced_companions(source: Path, *, speaks: bool = True) -> tuple[Path, ...]:
    """Files that will go along with a model from `source`, as the folder is when the model is loaded.

    Args:
        speaks: whether this rank logs them, at level INFO.
    """
    known = (Path(CONFIG), *companions(source))
    if speaks:
        logger.info("saved models get these files of %s: %s", source, ", ".join(map(str, known)))
    return known


def write_companions(
    unfinished: Path,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    source: Path | None,
    known: Iterable[Path] = (),
) -> None:
    """Write into `unfinished`, which will be `folder`, everything but the weights.

    A file of `source` that cannot be read is left out, and a warning names it: the weights are worth more.

    Args:
        dtype: of the weights, for config.json.
        source: folder that the model came from; None if there is none, and then nothing is copied.
        known: files that `source` had when the model was loaded, from `announced_companions`.

    Raises:
        OSError: a file cannot be written.
    """
    lost: list[Path] = []
    if source is not None and folder.exists() and source.exists() and os.path.samefile(source, folder):
        for name in _all_but_weights(source):
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source / name, unfinished / name)
    elif source is not None:
        now = companions(source) if source.is_dir() else ()
        lost = [name for name in sorted({*known, *now}) if not _copied(source / name, unfinished / name)]
    _write_config(unfinished / CONFIG, config, dtype, None if Path(CONFIG) in lost else source)
    if lost:
        names = ", ".join(map(str, lost))
        logger.warning("%s: saved without files of %s that cannot be read any more: %s", folder, source, names)


def _copied(path: Path, target: Path) -> bool:
    """Copy a file. Returns whether it could be read; raises OSError if it cannot be written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return True


def refuse_to_delete(source: Path | None, folder: Path) -> None:
    """Raise ValueError if `source` lies inside `folder`, which is replaced as a whole."""
    if source is not None and folder.resolve() in source.resolve().parents:
        raise UserError(f"the model came from {source}, inside of {folder}, which writing it there would replace")


def companions(source: Path) -> Iterator[Path]:
    """The files of a model folder, seen from it, that go along with the model. config.json is not among them."""
    for path in sorted(source.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file() and _goes_along(path.name):
            yield path.relative_to(source)
        elif path.name in TEMPLATE_FOLDERS:
            yield from (found.relative_to(source) for found in sorted(path.rglob("*.jinja")))
        elif (path / "__init__.py").is_file():  # A package that the code beside it imports.
            yield from (found.relative_to(source) for found in sorted(path.rglob("*.py")))


def _goes_along(name: str) -> bool:
    low = name.lower()
    if low == CONFIG or low.endswith((".index.json", "_results.json")) or low.startswith(LEFT_BEHIND):
        return False
    if low.startswith(ALWAYS):
        return Path(low).suffix != ".safetensors"
    return Path(low).suffix in TEXTS or ("token" in low and Path(low).suffix not in WEIGHTS)


def _all_but_weights(source: Path) -> Iterator[Path]:
    """Every file of the folder, at any depth, that the new weights and config.json do not replace."""
    replaced = {CONFIG, *indexed_files(source / INDEX), *indexed_files(source / OLD_INDEX)}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_weights = path.suffix in WEIGHTS or name.name.endswith(".index.json")
        if path.is_dir() and not path.is_symlink():
            continue
        if str(name) in replaced or (len(name.parts) == 1 and is_weights and name.name.startswith(MODEL_WEIGHTS)):
            continue
        yield name


def _link_or_copy(path: Path, target: Path) -> None:
    """The same file under another name where the file system can do that: it may be large, and is about to move."""
    if path.is_symlink():
        target.symlink_to(os.readlink(path))  # Links that lead out of the folder still do: the depth is the same.
        return
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)


def _write_config(file: Path, config: ModelConfig, dtype: torch.dtype, source: Path | None) -> None:
    """config.json, as it was where it describes this model, with the type of the weights under both of its names."""
    given = None if source is None else _config_of(source, config)
    content = config.to_hf_dict() if given is None else dict(given)
    if config.family.architecture not in (content.get("architectures") or ()):
        content["architectures"] = [config.family.architecture]
    # transformers 5 reads `dtype`; all older libraries read `torch_dtype`.
    content |= dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    if source is not None and content == given:
        shutil.copy2(source / CONFIG, file)
    else:
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config_of(source: Path, config: ModelConfig) -> dict[str, Any] | None:
    """The content of the folder's config.json; None if it describes another model, or none."""
    try:
        same = ModelConfig.from_folder(source, config.model_type) == config
        return read_config_json(source) if same else None
    except ConfigError:
        return None
