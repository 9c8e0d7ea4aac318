"""The architecture of a model: InternLM2, under the names of its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from roll.config.explain import schema_problems
from roll.config.problems import Check, ConfigError, Problem
from roll.config.settings import Settings, find_problems, usable_part

MODEL_TYPE = "internlm2"
ARCHITECTURE = "InternLM2ForCausalLM"

# What InternLM2Config of Hugging Face means by a key that config.json leaves out (configuration_internlm2.py of
# internlm/internlm2-7b). Sizes have defaults there too, but a file without them is broken rather than brief.
HF_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Keys that change what the model computes, with the only value that is supported; a file may leave them out.
HF_FIXED: dict[str, Any] = {"hidden_act": "silu", "rope_scaling": None}


class ModelConfig(Settings):
    """An InternLM2: decoder-only, RMSNorm, SwiGLU, RoPE, grouped-query attention."""

    vocab_size: PositiveInt
    """Rows of the embedding and of the output layer."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width inside the MLP."""
    num_hidden_layers: PositiveInt
    """Number of decoder layers."""
    num_attention_heads: PositiveInt
    """Query heads of a layer."""
    num_key_value_heads: PositiveInt
    """Key and value heads of a layer; each serves num_attention_heads / num_key_value_heads query heads."""
    max_position_embeddings: PositiveInt
    """Longest sequence in tokens, prompt and response together."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: PositiveFloat = 1e6
    """Base of the rotary position embedding."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random weights."""
    bias: Literal[False] = False
    """Whether linear layers have biases (not supported)."""
    tie_word_embeddings: Literal[False] = False
    """Whether the output layer is the embedding (not supported)."""
    bos_token_id: NonNegativeInt | None = None
    """Id of the begin-of-sequence token; null: whatever the tokenizer says."""
    eos_token_id: NonNegativeInt | None = None
    """Id of the token that ends a response; null: whatever the tokenizer says."""
    pad_token_id: NonNegativeInt | None = None
    """Id that fills up rows; null: whatever the tokenizer says."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def query_key_value_size(self) -> int:
        """Rows of wqkv: every query, key and value head."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def checks(self) -> Iterable[Check]:
        yield self._heads_divide_hidden
        yield self._key_value_heads_divide_heads
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            yield partial(self._id_is_in_vocabulary, name)

    def _heads_divide_hidden(self) -> Iterator[Problem]:
        if self.hidden_size % self.num_attention_heads:
            sizes = f"{self.num_attention_heads} does not divide hidden_size {self.hidden_size}"
            yield Problem("num_attention_heads", sizes)
        elif self.head_dim % 2:
            sizes = f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} = {self.head_dim}"
            yield Problem("num_attention_heads", f"{sizes} is odd; rotary embeddings turn pairs")

    def _key_value_heads_divide_heads(self) -> Iterator[Problem]:
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}"
            yield Problem("num_key_value_heads", heads)

    def _id_is_in_vocabulary(self, name: str) -> Iterator[Problem]:
        token_id = getattr(self, name)
        if token_id is not None and token_id >= self.vocab_size:
            yield Problem(name, f"{token_id} is not below vocab_size {self.vocab_size}")

    @classmethod
    def from_folder(cls, path: Path | str) -> ModelConfig:
        """The architecture that `path`/config.json describes. Keys that do not change the computation are ignored.

        Raises:
            ConfigError: a ValueError that names the file, and every key that is missing, wrong or not supported.
        """
        file = Path(path) / "config.json"
        data = _read_json(file)
        if data.get("model_type") != MODEL_TYPE:  # what the other keys mean is up to that architecture
            given = f"only {MODEL_TYPE!r} is supported, got {data.get('model_type')!r}"
            raise ConfigError([Problem(str(file), f"model_type: {given}")])
        problems = list(_unsupported(data))
        known = HF_DEFAULTS | {name: data[name] for name in cls.model_fields if name in data}
        rope = data.get("rope_parameters") or {}  # how transformers 5 writes rope_theta and rope_scaling
        known["rope_theta"] = rope.get("rope_theta", known["rope_theta"])
        if known.get("num_key_value_heads") is None and "num_attention_heads" in known:
            known["num_key_value_heads"] = known["num_attention_heads"]
        try:
            model = cls.model_validate(known)
        except ValidationError as error:
            found = schema_problems(cls, error) + find_problems(usable_part(cls, known))
            named = {problem.path for problem in problems}
            problems += [problem for problem in found if problem.path not in named]
        if problems:
            raise ConfigError([Problem(str(file), str(problem)) for problem in problems])
        return model

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of config.json for these weights; `from_folder` reads it back."""
        return {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "hidden_act": "silu"} | self.model_dump()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise ConfigError([Problem(str(file.parent), "there is no such model folder")])
    if not file.is_file():
        raise ConfigError([Problem(str(file.parent), "the model folder has no config.json")])
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError([Problem(str(file), f"is not JSON: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem(str(file), f"must hold a JSON object, got {type(data).__name__}")])
    return data


def _unsupported(data: dict[str, Any]) -> Iterator[Problem]:
    """The keys of config.json that ask for a computation this library does not have."""
    for key, only in HF_FIXED.items():
        if data.get(key, only) != only:
            yield Problem(key, f"only {json.dumps(only)} is supported, got {json.dumps(data[key])}")
    for key in ("bias", "tie_word_embeddings"):
        if data.get(key, HF_DEFAULTS[key]):
            given = json.dumps(data[key]) if key in data else "no value, which means true"
            yield Problem(key, f"only false is supported, got {given}")
    rope_type = (data.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type != "default":
        yield Problem("rope_parameters.rope_type", f"only 'default' is supported, got {rope_type!r}")
