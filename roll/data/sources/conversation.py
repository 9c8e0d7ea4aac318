"""A conversation, or a prompt with its response, as a text of which only the answers are learned.

The text is the whole that the chat template writes, and its tokens are those of the whole, as
`apply_chat_template(tokenize=True)` gives them. Text behind an answer's end token (the line break of ChatML, say) is
not learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roll.data.sources.chat_template import ChatTemplate, Messages
from roll.data.sources.learned_text import EncodedText, LearnedText, check_offsets, encode_learned
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_conversations(
    rows: Sequence[tuple[str, Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> list[EncodedText]:
    """Tokens of rows with `messages`, or with `prompt` and `response`, each given with its origin.

    Raises ValueError, beginning with the row's origin, as `encode_messages` and `encode_response` do.
    """
    return encode_learned([_of_row(origin, row, tokenizer) for origin, row in rows], tokenizer)


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


def _of_row(origin: str, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> LearnedText:
    if row.get("messages") is not None:
        return _of_messages(row["messages"], tokenizer, origin)
    if not {"prompt", "response"} <= row.keys():
        found = ", ".join(map(str, row)) or "nothing"
        raise UserError(f"{origin} must have messages, or prompt and response; it has {found}")
    for name in ("prompt", "response"):
        _check_text(row[name], name, origin)
    if tokenizer.chat_template is None:
        return plain_text(row["prompt"], row["response"], tokenizer, origin)
    turn = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return _of_messages(turn, tokenizer, origin)


def _of_messages(messages: Any, tokenizer: PreTrainedTokenizerBase, origin: str) -> LearnedText:
    _check_messages(messages, origin)
    check_offsets(tokenizer)
    text, answers = ChatTemplate(tokenizer, origin).text_and_answers(messages)
    if not any(start < stop for start, stop in answers):
        raise UserError(f"{origin}: the chat template writes nothing for its answers, so there is nothing to learn")
    return LearnedText(text, answers, from_template=True, origin=origin)


def _check_messages(messages: Any, origin: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UserError(f"{origin}: messages must be a list of objects with role and content, got {_named(messages)}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = _named(message)
            raise UserError(f"{origin}: message {turn + 1} must be an object with role and content, got {found}")
        for name in ("role", "content"):
            if name not in message:
                keys = ", ".join(map(str, message)) or "nothing"
                raise UserError(f"{origin}: message {turn + 1} has no {name}; it has {keys}")
            _check_text(message[name], f"{name} of message {turn + 1}", origin)
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        found = f"the roles are {', '.join(roles)}" if roles else "there is no message at all"
        raise UserError(f"{origin}: no message of role assistant, so there is nothing to learn: {found}")


def _check_text(value: Any, name: str, origin: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{origin}: {name} must be text, got {_named(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!r} at character {error.start + 1}"
        raise UserError(f"{origin}: {name} holds half of a surrogate pair, {half}, which is no character") from error


def _named(value: Any) -> str:
    """A value of a file as its readers know it, shortened."""
    kinds: dict[type, str] = {str: "the text ", list: "the list ", dict: "the object ", bytes: "the bytes "}
    if value is None:
        return "null"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return f"{kinds.get(type(value), '')}{text}"
