"""The text that a chat template writes of a conversation, and the characters of it that are answers.

The template's `{% generation %}` blocks say where answers are. Without them an answer is found in the text of the whole
conversation: the text is the same up to the answer, and behind it, when another answer stands there. An answer begins
behind the text that a model is asked to continue, where the whole begins with that text, and else with its content. It
ends behind its end token; without one, behind everything that the template writes after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from roll.data.sources.learned_text import Span
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""`{"role": ..., "content": ...}` each; role assistant is what is learned."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises: jinja2's own errors, `raise_exception` among them, and those of its expressions."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FIRST_PRIVATE = 0xE000
"""First of the characters that Unicode gives no meaning: one that a text does not hold stands for another answer."""


class ChatTemplate:
    """A tokenizer's chat template at work on one conversation after another."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, origin: str) -> None:
        """Find the template. Raises ValueError, beginning with `origin`, if there is none, or none that is the default.

        Args:
            origin: where the conversation comes from, for messages: a row of a file, say.
        """
        self._tokenizer = tokenizer
        self._origin = origin
        if tokenizer.chat_template is None:
            raise UserError(f"{origin}: messages need a chat template, and the tokenizer has none")
        named = tokenizer.chat_template
        if isinstance(named, dict) and "default" not in named:
            names = ", ".join(map(repr, named)) or "none at all"
            raise UserError(f"{origin}: the tokenizer has no chat template called 'default': it has {names}")
        self._template = tokenizer.get_chat_template()

    def text_and_answers(self, messages: Messages) -> tuple[str, tuple[Span, ...]]:
        """The text of a conversation, and where its answers are, in order.

        Raises ValueError, beginning with the origin, for a conversation that the template refuses, and an answer that
        does not stand in the text of the whole conversation.
        """
        if _GENERATION.search(self._template):
            text, blocks = self._rendered(messages, return_assistant_tokens_mask=True)
            return text, tuple(blocks)
        whole, _ = self._rendered(messages)
        spans: list[Span] = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                spans.append(self._answer(messages, turn, whole, spans[-1][1] if spans else 0))
        return whole, tuple(spans)

    def _answer(self, messages: Messages, turn: int, whole: str, done: int) -> Span:
        content = self._content(messages, turn, whole)
        if content is None or content[0] < done:
            raise UserError(
                f"{self._origin}: the chat template does not write the answer of message {turn + 1} into the whole "
                "conversation, at a place of its own: use a template that writes every answer"
            )
        stop = self._end_of_turn(messages, turn, whole, content[1])
        start = content[0]
        if turn:
            prompt, _ = self._rendered(messages[:turn], add_generation_prompt=True)
            if whole.startswith(prompt) and done <= len(prompt) <= stop:
                start = len(prompt)
        end_token = self._tokenizer.eos_token
        found = whole.rfind(end_token, max(start, content[1] - len(end_token)), stop) if end_token else -1
        return start, found + len(end_token) if found >= 0 else stop

    def _content(self, messages: Messages, turn: int, text: str) -> Span | None:
        """Where the text of `messages` has the content of a message; None if the text is the same without it."""
        mark = next(chr(code) for code in range(_FIRST_PRIVATE, 0x110000) if chr(code) not in text)
        other = [*messages[:turn], {**messages[turn], "content": mark}, *messages[turn + 1 :]]
        marked, _ = self._rendered(other)
        if mark not in marked:
            return None
        start = _shared_length(text, marked)
        behind = _shared_length(text[start:][::-1], marked[::-1])
        return start, max(start, len(text) - behind)

    def _end_of_turn(self, messages: Messages, turn: int, whole: str, start: int) -> int:
        """Where the text ends that the template writes behind an answer, whatever follows; it begins at `start`."""
        if turn + 1 == len(messages):
            return len(whole)
        alone, _ = self._rendered(messages[: turn + 1])
        if whole.startswith(alone) and start <= len(alone):
            return len(alone)
        content = self._content(messages[: turn + 1], turn, alone)
        if content is None:
            return start
        tails = alone[content[1] :], whole[start:]
        shared = _shared_length(*tails)
        for token in self._special_tokens():
            for tail in tails:  # The two may begin different special tokens with the same characters.
                first = tail.rfind(token, 0, shared + len(token) - 1)
                if first < shared < first + len(token) and first >= 0:
                    shared = first
        return start + shared

    def _special_tokens(self) -> Iterator[str]:
        yield from sorted(set(self._tokenizer.get_added_vocab()) | set(self._tokenizer.all_special_tokens))

    def _rendered(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        """The text of messages, and with `return_assistant_tokens_mask` its generation blocks."""
        # A null stands for a missing key in the columns of a table; apply_chat_template reads it so too.
        conversation = [{key: value for key, value in one.items() if value is not None} for one in messages]
        try:
            texts, blocks = render_jinja_template(
                conversations=[conversation],
                chat_template=self._template,
                **self._tokenizer.special_tokens_map | options,
            )
        except TEMPLATE_ERRORS as error:
            raise UserError(f"{self._origin}: the chat template refuses the conversation: {error}") from error
        return texts[0], blocks[0] if blocks else []


def _shared_length(one: str, other: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
