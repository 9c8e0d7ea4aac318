"""A Hugging Face folder with random tensors, written without the library's writer, and its bytes read back."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.config import ModelConfig
from roll.models.hf_layout import hf_shapes

INDEX = "model.safetensors.index.json"
MODEL = ModelConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    initializer_range=0.3,
)
TOKENIZER_FILES = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "special_tokens_map.json": "{}"}


def random_tensors(model: ModelConfig, head: str) -> dict[str, Tensor]:
    """Every tensor drawn at random, norms and value head too, so that no two are alike."""
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        for name, shape in hf_shapes(model, head).items()
    }


def write_folder(folder: Path, model: ModelConfig, tensors: dict[str, Tensor], files: int = 1) -> Path:
    """config.json, tokenizer files and the tensors, dealt to `files` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.to_hf_dict()))
    for name, text in TOKENIZER_FILES.items():
        (folder / name).write_text(text)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    file_of = {name: f"part-{number % files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors, from the files that are there; the index, if any, must say the same."""
    tensors: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not part.keys() & tensors.keys()
        tensors |= part
        file_of |= dict.fromkeys(part, file.name)
    if (folder / INDEX).exists():
        assert json.loads((folder / INDEX).read_text())["weight_map"] == file_of
    else:
        assert set(file_of.values()) == {"model.safetensors"}
    return tensors


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
