"""The architecture of a model of any family, under the names that most Hugging Face config.json files use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, Strict

from roll.config.family_name import FamilyName
from roll.config.hf_config import (
    TOKEN_IDS,
    RopeReading,
    family_of,
    read_config_json,
    stated_values,
    under_field_names,
    under_keys,
    unsupported,
)
from roll.config.paths import expand_path
from roll.config.problems import Check, ConfigError, Problem
from roll.config.rope import RopeScaling
from roll.config.settings import Settings
from roll.families import FAMILIES, Family, find_family


def _equal_share(sizes: Mapping[str, Any]) -> int:
    """The head size that most models have; any number where what it follows from has problems of its own."""
    return sizes.get("hidden_size", 0) // sizes.get("num_attention_heads", 1)


class ModelConfig(Settings):
    """A decoder-only model with RMSNorm, SwiGLU, RoPE and grouped-query attention."""

    model_type: FamilyName = "internlm2"
    """The family: what config.json and the tensors are called, and which parts the network has. One of your own is
    named as module:Name; config.json has its `model_type`."""
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
    head_dim: PositiveInt = Field(default_factory=_equal_share)
    """Size of one attention head; by default hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt
    """Longest sequence in tokens, prompt and response together; linear and dynamic rope_scaling go beyond it."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: PositiveFloat = 1e6
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling | None = None
    """Scaling of RoPE beyond the trained context; null: none."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random weights."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    bias: bool = False
    """Whether q, k, v and the attention's output have biases. Its key in config.json is the family's; q, k and v of
    Qwen2 have biases without it."""
    bos_token_id: NonNegativeInt | None = None
    """Id of the begin-of-sequence token; null: whatever the tokenizer says."""
    eos_token_id: NonNegativeInt | Annotated[tuple[NonNegativeInt, ...], Strict(False)] | None = None
    """Id of the token that ends a response, or several; null: whatever the tokenizer says."""
    pad_token_id: NonNegativeInt | None = None
    """Id that fills up rows; null: whatever the tokenizer says."""

    @property
    def family(self) -> Family:
        """Properties common to all models of this family."""
        return find_family(self.model_type)

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases; `bias` alone speaks of the attention's output."""
        return self.bias or self.family.qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head goes through an RMSNorm before RoPE."""
        return self.family.qk_norm

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens that RoPE, scaled, gives positions to."""
        scaling = self.rope_scaling
        # llama3 counts its scaling in max_position_embeddings; linear and dynamic leave the trained length there.
        if scaling is None or scaling.rope_type == "llama3":
            return self.max_position_embeddings
        return int(self.max_position_embeddings * scaling.factor)

    @property
    def query_key_value_size(self) -> int:
        """Rows of wqkv: every query, key and value head."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def checks(self) -> Iterable[Check]:
        yield self._head_dim_fits
        yield self._key_value_heads_divide_heads
        yield self._family_has_rope_type
        yield self._family_has_bias
        for name in TOKEN_IDS:
            yield partial(self._id_is_in_vocabulary, name)

    def _head_dim_fits(self) -> Iterator[Problem]:
        share, rest = divmod(self.hidden_size, self.num_attention_heads)
        quotient = f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads}"
        if self.head_dim == share and rest:
            sizes = f"{self.num_attention_heads} does not divide hidden_size {self.hidden_size}"
            yield Problem("num_attention_heads", sizes)
        elif self.head_dim == share and share % 2:
            yield Problem("num_attention_heads", f"{quotient} = {share} is odd; rotary embeddings turn pairs")
        elif self.head_dim % 2:
            yield Problem("head_dim", f"{self.head_dim} is odd; rotary embeddings turn pairs")
        elif self.head_dim != share and not self.family.free_head_dim:
            yield Problem("head_dim", f"{self.family.model_type} has {quotient} = {share}, got {self.head_dim}")

    def _key_value_heads_divide_heads(self) -> Iterator[Problem]:
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}"
            yield Problem("num_key_value_heads", heads)

    def _family_has_rope_type(self) -> Iterator[Problem]:
        if self.rope_scaling is not None and self.rope_scaling.rope_type not in self.family.rope_types:
            known = ", ".join(repr(name) for name in self.family.rope_types)
            given = f"{self.family.model_type} has only {known} here, got {self.rope_scaling.rope_type!r}"
            yield Problem("rope_scaling.rope_type", given)

    def _family_has_bias(self) -> Iterator[Problem]:
        if self.bias and self.family.key("bias") is None:
            having = ", ".join(repr(name) for name, family in FAMILIES.items() if family.key("bias"))
            yield Problem("bias", f"{self.family.model_type} has only false; true is of {having}")

    def _id_is_in_vocabulary(self, name: str) -> Iterator[Problem]:
        given = getattr(self, name)
        for token_id in given if isinstance(given, tuple) else (given,):
            if token_id is not None and token_id >= self.vocab_size:
                yield Problem(name, f"{token_id} is not below vocab_size {self.vocab_size}")

    @classmethod
    def from_folder(cls, path: Path | str, family: str | None = None) -> ModelConfig:
        """The architecture that `path`/config.json describes. Keys that do not change the computation are ignored.

        Args:
            family: name of its family, as `model_type` takes it; None: the one that config.json names.

        Raises:
            ConfigError: a ValueError that names the file, and every key that is missing, wrong or not supported.
        """
        folder = expand_path(path)
        file = folder / "config.json"
        content = read_config_json(folder)
        found = family_of(content, family)
        if isinstance(found, Problem):  # what the other keys mean is up to the family
            raise ConfigError([Problem(str(file), str(found))])
        name, declared = found
        stated, defaults = (under_field_names(x, declared, cls.model_fields) for x in (content, declared.defaults))
        rope = RopeReading(stated, declared, defaults.get("rope_theta"))
        known = {name: value for name, value in defaults.items() if name in cls.model_fields}
        known |= stated_values(stated, cls.model_fields) | {"model_type": name, **rope.values}
        # A null undoes the family's default of these: heads and their size follow from the sizes, and torch's layers
        # take a null for no bias.
        for each in ("num_key_value_heads", "head_dim", "bias"):
            if each in stated and stated[each] is None:
                known.pop(each, None)
        if "num_key_value_heads" not in known and "num_attention_heads" in known:
            known["num_key_value_heads"] = known["num_attention_heads"]
        problems = [*unsupported(content, declared), *(under_keys(problem, declared) for problem in rope.problems)]
        try:
            model = cls.model_validate(known)
        except ConfigError as error:
            named = {problem.path for problem in problems}
            own = [under_keys(rope.as_named_in_file(problem), declared) for problem in error.problems]
            problems += [problem for problem in own if problem.path not in named]
        if problems:
            raise ConfigError([Problem(str(file), str(problem)) for problem in problems])
        return model

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of config.json for these weights; `from_folder` reads it back.

        RoPE is written as `rope_theta` and `rope_scaling`, which both older and newer libraries read.
        """
        family = self.family
        fields = self.model_dump(mode="json") | {"model_type": family.model_type}
        if not family.free_head_dim:
            del fields["head_dim"]  # Its own config class does not know the key.
        if self.rope_scaling is not None:
            scaling = {name: value for name, value in fields["rope_scaling"].items() if value is not None}
            accepted = family.rope_scaling_keys or {name: name for name in scaling}
            fields["rope_scaling"] = {key: scaling[name] for name, key in accepted.items()}
        own = {key: value for name, value in fields.items() if (key := family.key(name)) is not None}
        return {"architectures": [family.architecture], **family.only, **own}
