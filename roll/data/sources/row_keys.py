"""Keys beside a row's texts that change what a chat template writes; none of them is left out without a word.

`tools`, `documents` and the variables of `chat_template_kwargs` go to the template as arguments of
`apply_chat_template`. A row is refused if the template leaves out a part of the conversation: tools, documents, tool
calls, reasoning, a message. A model would learn to call functions that it was never told of. Other keys of messages,
such as `name`, are often there for another reader, so they are counted and named in a note.

Keys of a row that belong to nothing here (`id`, `source`) are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from roll.data.sources.chat_template import ChatTemplate, Conversation, template_variables, unused_character
from roll.data.sources.text_rows import COLUMNS
from roll.errors import UserError

ARGUMENTS = ("tools", "documents")
"""Lists of objects, each with an argument of its own in `apply_chat_template`."""
VARIABLES = "chat_template_kwargs"
"""An object of further variables, such as `enable_thinking`."""
RESERVED = frozenset({"messages", "add_generation_prompt", *ARGUMENTS})
"""Variables of a template that are no setting of a row."""
PARTS = (("tool_calls",), ("reasoning_content", "reasoning", "thinking"))
"""Keys of a message that are part of its answer; transformers gives reasoning to the template under all its names."""
NOTHING: tuple[Any, ...] = (None, "", [], {})


def given_in(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The arguments of the template in a row. Raises ValueError, beginning with `origin`, for another type of value."""
    given: dict[str, Any] = {}
    for name in ARGUMENTS:
        value = row.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            raise UserError(f"{origin}: {name} must be a list of objects, got {named(value)}")
        given[name] = value
    variables = row.get(VARIABLES)
    if variables is None:
        return given
    if not isinstance(variables, Mapping):
        raise UserError(f"{origin}: {VARIABLES} must be an object, got {named(variables)}")
    reserved = ", ".join(sorted(RESERVED & variables.keys()))
    if reserved:
        raise UserError(f"{origin}: {VARIABLES} must not hold {reserved}: the row itself says what they are")
    return given | dict(variables)


def check_variables(row: Mapping[str, Any], template: ChatTemplate, conversation: Conversation) -> None:
    """Refuse variables that the template does not read, and those that stand beside `chat_template_kwargs`.

    A row's own key may be no more than a note on its source, and would change the text all the same.

    Raises ValueError, beginning with the conversation's origin.
    """
    read = template_variables(template.source(conversation)) - RESERVED
    unread = sorted(set(row.get(VARIABLES) or ()) - read)
    if unread:
        known = ", ".join(sorted(read)) or "none"
        raise UserError(
            f"{conversation.origin}: the chat template does not read {', '.join(unread)} of {VARIABLES}; its variables "
            f"are {known}"
        )
    beside = sorted(key for key, value in row.items() if key in read - set(COLUMNS) and value is not None)
    if beside:
        found = ", ".join(beside)
        raise UserError(f"{conversation.origin}: {found} is a variable of the chat template: put it into {VARIABLES}")


def check_nothing_lost(template: ChatTemplate, conversation: Conversation, text: str) -> None:
    """Refuse a conversation of which a part makes no difference to its text: tools, documents, or a message.

    Raises ValueError, beginning with the conversation's origin.
    """
    for name in ARGUMENTS:
        if not conversation.given.get(name):
            continue
        without = Conversation(conversation.messages, conversation.origin, {**conversation.given, name: []})
        if not template.changes(text, without):
            raise UserError(
                f"{conversation.origin}: the chat template writes nothing of the row's {name}: use a template that "
                f"does, or remove {name}"
            )
    for turn, message in enumerate(conversation.messages):
        content = message.get("content")
        if message["role"] == "assistant" or not content or content.strip() in text:
            continue  # An answer that is not written is refused where answers are found.
        other = conversation.with_message(turn, {**message, "content": unused_character(text)})
        if not template.changes(text, other):
            raise UserError(
                f"{conversation.origin}: the chat template writes nothing of message {turn + 1} of role "
                f"{message['role']}: use a template that does, or remove the message"
            )


def unread_keys(template: ChatTemplate, conversation: Conversation, text: str) -> Iterator[str]:
    """Keys of the messages that make no difference to the text.

    Raises ValueError, beginning with the conversation's origin, if one of `PARTS` is unknown to the template. A
    template that knows it may leave it out on purpose, as that of Qwen3 does with the reasoning of earlier turns.
    """
    keys = {key: None for one in conversation.messages for key, value in one.items() if not _is_nothing(value)}
    others = [key for key in keys if key not in ("role", "content")]
    if not others:
        return
    groups = [tuple(key for key in part if key in keys) for part in PARTS]
    groups += [(key,) for key in others if not any(key in part for part in PARTS)]
    some_read = template.changes(text, _without(conversation, others))
    for group in filter(None, groups):
        if some_read and template.changes(text, _without(conversation, group)):
            continue
        part = next((part for part in PARTS if group[0] in part), ())
        if part and not any(re.search(rf"\b{name}\b", template.source(conversation)) for name in part):
            raise UserError(
                f"{conversation.origin}: the chat template writes nothing of {group[0]}: use a template that does, or "
                f"remove {group[0]}"
            )
        yield from group


def _is_nothing(value: Any) -> bool:
    return any(value is nothing or (type(value) is type(nothing) and value == nothing) for nothing in NOTHING)


def _without(conversation: Conversation, keys: list[str] | tuple[str, ...]) -> Conversation:
    return conversation.with_messages(
        [{key: value for key, value in one.items() if key not in keys} for one in conversation.messages]
    )


def named(value: Any) -> str:
    """A value of a file as its readers know it, shortened."""
    kinds: dict[type, str] = {str: "the text ", list: "the list ", dict: "the object ", bytes: "the bytes "}
    if value is None:
        return "null"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return f"{kinds.get(type(value), '')}{text}"
