"""The problems that a model learns to solve."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt

from roll.config.settings import Seed, Settings
from roll.errors import UserError

PromptForm = Literal["auto", "none"]
"""auto: a turn of the tokenizer's chat template, if it has one. none: the bare text."""


def _prompt_template(value: str) -> str:
    try:
        fields = [field for field in Formatter().parse(value) if field[1] is not None]
    except ValueError as error:
        raise UserError(f"is not a format string ({error})") from error
    plain = all(name is not None and name.isidentifier() and not (spec or how) for _, name, spec, how in fields)
    if not (fields and plain):
        raise UserError("must say what is filled in, by plain names in braces such as {question}")
    return value


class TaskSettings(Settings):
    """The problems: a data set of reasoning-gym."""

    name: str = "chain_sum"
    """Name of the data set in reasoning-gym."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of that data set, as reasoning-gym names them."""
    prompt: Annotated[str, AfterValidator(_prompt_template)] = "{question}"
    """Template of a prompt: {question} is the problem's text, and each key of its metadata has a name as well."""
    chat_template: PromptForm = "auto"
    """Form of a prompt: a user's turn in the tokenizer's chat template, if it has one (auto), or bare text (none)."""
    max_prompt_tokens: PositiveInt
    """Longest prompt in tokens; a longer one is refused."""
    train_size: PositiveInt
    """Problems to train on."""
    eval_size: PositiveInt
    """Held-out problems, none of which is trained on."""
    seed: Seed = 0
    """Seed of the problems and of which are held out; not the run's, so that all runs have the same."""
