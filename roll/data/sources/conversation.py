"""A conversation, or a prompt with its response, as a text of which only the answers are learned.

The text is the whole that the chat template writes, and its tokens are those of the whole, as
`apply_chat_template(tokenize=True)` gives them, with the row's `tools`, `documents` and `chat_template_kwargs`. Text
behind an answer's end token (the line break of ChatML, say) is not learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roll.data.sources.answers import text_and_answers
from roll.data.sources.chat_template import ChatTemplate, Conversation, Messages
from roll.data.sources.learned_text import EncodedText, LearnedText, check_offsets, encode_learned
from roll.data.sources.row_keys import (
    ARGUMENTS,
    VARIABLES,
    check_nothing_lost,
    check_variables,
    given_in,
    named,
    unread_keys,
)
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_conversations(
    rows: Sequence[tuple[str, Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> list[EncodedText]:
    """Tokens of rows with `messages`, or with `prompt` and `response`, each given with its origin.

    Raises ValueError, beginning with the row's origin, as `encode_messages` and `encode_response` do.
    """
    return encode_learned(conversation_texts(rows, tokenizer), tokenizer)


def conversation_texts(
    rows: Sequence[tuple[str, Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> list[LearnedText]:
    """Texts of rows, before they are tokenized. Raises ValueError as `encode_conversations` does."""
    template = ChatTemplate(tokenizer)
    return [_of_row(origin, row, template) for origin, row in rows]


def encode_messages(messages: Messages, tokenizer: PreTrainedTokenizerBase, origin: str) -> EncodedText:
    """Tokens of a conversation, learned in the assistant's answers and their end tokens.

    Raises ValueError, beginning with `origin`, for a tokenizer without a chat template or without offsets, messages
    without role and content as text, a conversation that the template refuses or in which nothing is learned, a
    template that leaves out an answer once others follow, and text that the tokenizer does not know or loses.
    """
    return encode_conversations([(origin, {"messages": messages})], tokenizer)[0]


def encode_response(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, origin: str) -> EncodedText:
    """Tokens of a prompt and the response to learn: one turn of the chat template; without one, both and an end token.

    Raises ValueError as `encode_messages` does, and for a tokenizer that has neither template nor end token.
    """
    return encode_conversations([(origin, {"prompt": prompt, "response": response})], tokenizer)[0]


def plain_text(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, origin: str) -> LearnedText:
    """Prompt, response and end token, without a template. Raises ValueError for a tokenizer without an end token."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"{origin}: the tokenizer has neither a chat template nor an end token")
    text = prompt + response
    return LearnedText(text, ((len(prompt), len(text)),), from_template=False, origin=origin)


def _of_row(origin: str, row: Mapping[str, Any], template: ChatTemplate) -> LearnedText:
    if row.get("messages") is not None:
        beside = [name for name in ("prompt", "response") if row.get(name) is not None]
        return _of_messages(row["messages"], row, template, origin, beside)
    if not {"prompt", "response"} <= row.keys():
        found = ", ".join(map(str, row)) or "nothing"
        raise UserError(f"{origin} must have messages, or prompt and response; it has {found}")
    for name in ("prompt", "response"):
        _check_text(row[name], name, origin)
    if template.tokenizer.chat_template is not None:
        turn = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        return _of_messages(turn, row, template, origin)
    for name in (*ARGUMENTS, VARIABLES):
        if row.get(name):
            raise UserError(f"{origin}: {name} need a chat template, and the tokenizer has none")
    return plain_text(row["prompt"], row["response"], template.tokenizer, origin)


def _of_messages(
    messages: Any, row: Mapping[str, Any], template: ChatTemplate, origin: str, beside: Sequence[str] = ()
) -> LearnedText:
    """The text of messages; `beside` names what the row has instead of them, which is not read."""
    _check_messages(messages, origin)
    check_offsets(template.tokenizer)
    conversation = Conversation(messages, origin, given_in(row, origin))
    text = template.text(conversation)
    check_variables(row, template, conversation)
    check_nothing_lost(template, conversation, text)
    unread = [f"{key} of messages" for key in unread_keys(template, conversation, text)]
    text, answers = text_and_answers(template, conversation)
    if not any(start < stop for start, stop in answers):
        raise UserError(f"{origin}: the chat template writes nothing for its answers, so there is nothing to learn")
    return LearnedText(text, answers, from_template=True, origin=origin, unread=(*beside, *unread))


def _check_messages(messages: Any, origin: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UserError(f"{origin}: messages must be a list of objects with role and content, got {named(messages)}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = named(message)
            raise UserError(f"{origin}: message {turn + 1} must be an object with role and content, got {found}")
        calls = _check_calls(message.get("tool_calls"), turn, origin)
        for name in ("role", "content"):
            if name == "content" and calls and message.get(name) is None:
                continue  # An answer may be tool calls alone.
            if name not in message:
                keys = ", ".join(map(str, message)) or "nothing"
                raise UserError(f"{origin}: message {turn + 1} has no {name}; it has {keys}")
            _check_text(message[name], f"{name} of message {turn + 1}", origin)
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        found = f"the roles are {', '.join(roles)}" if roles else "there is no message at all"
        raise UserError(f"{origin}: no message of role assistant, so there is nothing to learn: {found}")


def _check_calls(calls: Any, turn: int, origin: str) -> bool:
    """Tell whether there are tool calls. Raises ValueError for anything but a list of objects."""
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise UserError(f"{origin}: tool_calls of message {turn + 1} must be a list of objects, got {named(calls)}")
    return bool(calls)


def _check_text(value: Any, name: str, origin: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{origin}: {name} must be text, got {named(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!r} at character {error.start + 1}"
        raise UserError(f"{origin}: {name} holds half of a surrogate pair, {half}, which is no character") from error
