"""A tokenizer's chat template: the text that it writes of a conversation or of a prompt.

Conversations to learn from and prompts of a rollout are written here, with the arguments of `apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta
from transformers.utils.chat_template_utils import render_jinja_template

from roll.data.special_tokens import special_tokens
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}` and more keys that a template may read; role assistant is what is learned."""
Messages = Sequence[Message]
Span = tuple[int, int]
"""First character, and the one behind the last."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors of templates: jinja2's own, `raise_exception` among them, and those of a template's expressions."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_FIRST_PRIVATE = 0xE000
"""First of the characters that Unicode gives no meaning: one that a text does not hold stands for another content."""


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template."""

    messages: Messages
    origin: str
    """Place that the conversation comes from, for messages: a row of a file, say."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """`tools`, `documents` and the template's own variables, by name."""

    def with_messages(self, messages: Messages) -> Conversation:
        """The same input with other messages."""
        return replace(self, messages=messages)

    def with_message(self, turn: int, message: Message) -> Conversation:
        """The same input with another message `turn`, counted from 0."""
        return self.with_messages([*self.messages[:turn], message, *self.messages[turn + 1 :]])

    def first(self, turns: int) -> Conversation:
        """The same input without the messages behind the first `turns`."""
        return self.with_messages(self.messages[:turns])


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the tokenizer's special tokens, longest first."""
        return special_tokens(self.tokenizer)

    def source(self, conversation: Conversation) -> str:
        """The template in use: `default`, or with tools `tool_use`, where the tokenizer has several.

        Raises ValueError, beginning with the conversation's origin, if there is none.
        """
        named, tools = self.tokenizer.chat_template, conversation.given.get("tools")
        if named is None:
            raise UserError(f"{conversation.origin}: messages need a chat template, and the tokenizer has none")
        if isinstance(named, dict) and not named.keys() & ({"default"} if tools is None else {"default", "tool_use"}):
            names = ", ".join(map(repr, named)) or "none at all"
            raise UserError(
                f"{conversation.origin}: the tokenizer has no chat template called 'default': it has {names}"
            )
        return self.tokenizer.get_chat_template(tools=tools)

    def has_generation_blocks(self, conversation: Conversation) -> bool:
        """Tell whether the template marks answers by `{% generation %}`."""
        return _GENERATION.search(self.source(conversation)) is not None

    def text(self, conversation: Conversation) -> str:
        """The text of a conversation. Raises ValueError, beginning with its origin, if the template refuses it."""
        return self._rendered(conversation)[0]

    def text_and_blocks(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation, and its generation blocks in order. Raises ValueError as `text` does."""
        return self._rendered(conversation, return_assistant_tokens_mask=True)

    def prompt(self, conversation: Conversation) -> str:
        """The text that a model is asked to continue: the messages, and the beginning of an answer.

        Raises ValueError as `text` does.
        """
        return self._rendered(conversation, add_generation_prompt=True)[0]

    def changes(self, text: str, other: Conversation) -> bool:
        """Tell whether the template writes another text than `text` of another conversation, or refuses that one."""
        try:
            return self.text(other) != text
        except UserError:
            return True

    def _rendered(self, conversation: Conversation, **options: Any) -> tuple[str, list[Span]]:
        # A null stands for a missing key in the columns of a table; apply_chat_template reads it so too.
        messages = [{key: value for key, value in one.items() if value is not None} for one in conversation.messages]
        source = self.source(conversation)
        try:
            texts, blocks = render_jinja_template(
                conversations=[messages],
                chat_template=source,
                **{**self.tokenizer.special_tokens_map, **conversation.given, **options},
            )
        except TEMPLATE_ERRORS as error:
            raise UserError(f"{conversation.origin}: the chat template refuses the conversation: {error}") from error
        return texts[0], blocks[0] if blocks else []


@cache
def template_variables(source: str) -> frozenset[str]:
    """Names of the variables that a template reads, but for the functions that every template has.

    Raises jinja2.TemplateError for a template that cannot be parsed.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    found = meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", source)))
    return frozenset(found) - environment.globals.keys() - {"raise_exception", "strftime_now"}


def variables_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names of the variables of all templates of a tokenizer; a template that cannot be parsed has none.

    Its error is raised, with the row, when it is used.
    """
    named = tokenizer.chat_template or {}
    found: frozenset[str] = frozenset()
    for source in named.values() if isinstance(named, dict) else [named]:
        with suppress(TemplateError):
            found |= template_variables(source)
    return found


def unused_character(text: str, number: int = 0) -> str:
    """A character that `text` does not hold; another one for each `number`."""
    unused = (chr(code) for code in range(_FIRST_PRIVATE, 0x110000) if chr(code) not in text)
    return [next(unused) for _ in range(number + 1)][-1]
