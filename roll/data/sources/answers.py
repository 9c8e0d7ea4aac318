"""Answers in the text that a chat template writes of a conversation.

The template's `{% generation %}` blocks say where answers are. Without them an answer is found in the text of the whole
conversation: the text is the same up to the answer, and behind it, when another answer stands there. An answer begins
behind the text that a model is asked to continue, where the whole begins with that text, and else with its content. It
ends with the first special token behind its content and tool calls: there a model stops. Without one it ends behind
everything that the template writes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from roll.data.sources.chat_template import ChatTemplate, Conversation, Span, unused_character
from roll.errors import UserError


def text_and_answers(template: ChatTemplate, conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
    """The text of a conversation, and the places of its answers, in order.

    Raises ValueError, beginning with the conversation's origin, if the template refuses the conversation or leaves one
    of its answers out.
    """
    if template.has_generation_blocks(conversation):
        text, blocks = template.text_and_blocks(conversation)
        return text, tuple(blocks)
    whole = template.text(conversation)
    spans: list[Span] = []
    for turn, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            spans.append(_answer(template, conversation, turn, whole, spans[-1][1] if spans else 0))
    return whole, tuple(spans)


def _answer(template: ChatTemplate, conversation: Conversation, turn: int, whole: str, done: int) -> Span:
    """The place of answer `turn` behind character `done`."""
    content = _content(template, conversation, turn, whole)
    if content is None or content[0] < done:
        raise UserError(
            f"{conversation.origin}: the chat template does not write the answer of message {turn + 1} into the whole "
            "conversation, at a place of its own: use a template that writes every answer"
        )
    start, own_stop = content
    stop = _end_of_turn(template, conversation, turn, whole, own_stop)
    if conversation.messages[turn].get("tool_calls"):
        own_stop = max(own_stop, _stop_of_calls(template, conversation, turn, whole[:stop]))
    if turn:
        prompt = template.prompt(conversation.first(turn))
        if whole.startswith(prompt) and done <= len(prompt) <= stop:
            start = len(prompt)
    return start, _behind_end_token(template, whole, start, own_stop, stop)


def _behind_end_token(template: ChatTemplate, whole: str, start: int, own_stop: int, stop: int) -> int:
    """The end of an answer with a content that ends at `own_stop`, in a turn that ends at `stop`."""
    found = [(whole.find(token, own_stop, stop), -len(token)) for token in template.special_tokens]
    first = min((place for place in found if place[0] >= 0), default=None)
    if first is not None:
        return first[0] - first[1]
    end = template.tokenizer.eos_token
    # The content may bring its end token along.
    return own_stop if end and whole.endswith(end, start, own_stop) else stop


def _content(template: ChatTemplate, conversation: Conversation, turn: int, text: str) -> Span | None:
    """The place of a message's content and tool calls in `text`; None if the text is the same without them."""
    message, in_content, in_calls = conversation.messages[turn], unused_character(text), unused_character(text, 1)
    other = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") or not calls:
        other["content"] = in_content
    if calls:
        other["tool_calls"] = _other_calls(calls, in_calls)
    marked = template.text(conversation.with_message(turn, other))
    if marked == text or ("content" in other and other["content"] == in_content and in_content not in marked):
        return None
    start = _shared_length(text, marked)
    behind = _shared_length(text[start:][::-1], marked[start:][::-1])
    return start, len(text) - behind


def _other_calls(calls: Any, mark: str) -> Any:
    """Tool calls with another name and other arguments, of the types that the given ones have."""
    if isinstance(calls, Mapping):
        others = {"name": mark, "arguments": {mark: mark} if isinstance(calls.get("arguments"), Mapping) else mark}
        return {key: others.get(key) or _other_calls(value, mark) for key, value in calls.items()}
    return [_other_calls(one, mark) for one in calls] if isinstance(calls, list) else calls


def _stop_of_calls(template: ChatTemplate, conversation: Conversation, turn: int, until: str) -> int:
    """The end of an answer's tool calls in `until`, the conversation's text up to the end of its turn.

    It stands before the text that the template writes behind an answer without tool calls; 0 if that text is another.
    """
    mark = unused_character(until)
    plain = {"role": conversation.messages[turn]["role"], "content": mark}
    try:
        text = template.text(conversation.with_messages([*conversation.messages[:turn], plain]))
    except UserError:  # Some templates demand tool calls here.
        return 0
    _, found, closing = text.rpartition(mark)
    return len(until) - len(closing) if found and until.endswith(closing) else 0


def _end_of_turn(template: ChatTemplate, conversation: Conversation, turn: int, whole: str, start: int) -> int:
    """The end of the text that the template writes behind an answer, whatever follows; the text begins at `start`."""
    if turn + 1 == len(conversation.messages):
        return len(whole)
    until = conversation.first(turn + 1)
    alone = template.text(until)
    if whole.startswith(alone) and start <= len(alone):
        return len(alone)
    content = _content(template, until, turn, alone)
    if content is None:
        return start
    tails = alone[content[1] :], whole[start:]
    shared = _shared_length(*tails)
    for token in sorted({*template.special_tokens, *template.tokenizer.get_added_vocab()}):
        for tail in tails:  # The two may begin different special tokens with the same characters.
            first = tail.rfind(token, 0, shared + len(token) - 1)
            if first < shared < first + len(token) and first >= 0:
                shared = first
    return start + shared


def _shared_length(one: str, other: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
