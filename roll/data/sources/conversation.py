"""A conversation, or a prompt with its response, as a text of which only the answers are learned.

The text is the whole that the chat template writes, and its tokens are those of the whole, as
`apply_chat_template(tokenize=True)` gives them. The template's `{% generation %}` blocks say where answers are. Without
them, an answer is what the template writes behind the text that a model is asked to continue, up to its end token.
Text behind the end token (the line break of ChatML, say) is not learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from roll.data.sources.learned_text import EncodedText, LearnedText, Span, check_offsets, encode_learned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""`{"role": ..., "content": ...}` each; role assistant is what is learned."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises: jinja2's own errors, `raise_exception` among them, and those of its expressions."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_conversations(
    rows: Sequence[tuple[str, Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase
) -> list[EncodedText]:
    """Tokens of rows with `messages`, or with `prompt` and `response`, each given with its origin.

    Raises ValueError, beginning with the row's origin, as `encode_messages` and `encode_response` do.
    """
    encoded: list[EncodedText | LearnedText] = [_of_row(origin, row, tokenizer) for origin, row in rows]
    texts = iter(encode_learned([text for text in encoded if isinstance(text, LearnedText)], tokenizer))
    return [next(texts) if isinstance(one, LearnedText) else one for one in encoded]


def encode_messages(messages: Messages, tokenizer: PreTrainedTokenizerBase, origin: str) -> EncodedText:
    """Tokens of a conversation, learned in the assistant's answers and their end tokens.

    Raises ValueError, beginning with `origin`, for a tokenizer without a chat template or without offsets, messages
    without role and content as text, a conversation that the template refuses or in which nothing is learned, a
    template that writes earlier turns differently once later ones follow (then no single text shows what the model sees
    at each answer), and characters that the tokenizer does not know.
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
        raise ValueError(f"{origin}: the tokenizer has neither a chat template nor an end token")
    text = prompt + response
    return LearnedText(text, ((len(prompt), len(text)),), from_template=False, origin=origin)


def _of_row(origin: str, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> EncodedText | LearnedText:
    if row.get("messages") is not None:
        return _of_messages(row["messages"], tokenizer, origin)
    if not {"prompt", "response"} <= row.keys():
        found = ", ".join(map(str, row)) or "nothing"
        raise ValueError(f"{origin} must have messages, or prompt and response; it has {found}")
    for name in ("prompt", "response"):
        _check_text(row[name], name, origin)
    if tokenizer.chat_template is None:
        return plain_text(row["prompt"], row["response"], tokenizer, origin)
    turn = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return _of_messages(turn, tokenizer, origin)


def _of_messages(messages: Any, tokenizer: PreTrainedTokenizerBase, origin: str) -> EncodedText | LearnedText:
    """The template's text, or its tokens where the template says itself what an assistant writes."""
    _check_messages(messages, origin)
    check_offsets(tokenizer)
    if tokenizer.chat_template is None:
        raise ValueError(f"{origin}: messages need a chat template, and the tokenizer has none")
    encoded: EncodedText | LearnedText
    if _GENERATION.search(tokenizer.get_chat_template()):
        tokens = _applied(messages, tokenizer, origin, return_dict=True, return_assistant_tokens_mask=True)
        in_loss = list(map(bool, tokens["assistant_masks"]))
        encoded, learned = EncodedText(list(tokens["input_ids"]), in_loss), any(in_loss)
    else:
        text, spans = _spans(messages, tokenizer, origin)
        encoded = LearnedText(text, spans, from_template=True, origin=origin)
        learned = any(start < stop for start, stop in spans)
    if not learned:
        raise ValueError(f"{origin}: the chat template writes nothing for its answers, so there is nothing to learn")
    return encoded


def _spans(messages: Messages, tokenizer: PreTrainedTokenizerBase, origin: str) -> tuple[str, tuple[Span, ...]]:
    """The template's text of the whole conversation, and where its answers are."""
    whole = done = ""
    spans: list[Span] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        whole = _applied(messages[: turn + 1], tokenizer, origin)
        if turn:
            prompt = _applied(messages[:turn], tokenizer, origin, add_generation_prompt=True)
        else:
            prompt = _in_front_of_first_answer(whole, message, tokenizer, origin)
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise ValueError(
                f"{origin}: the chat template does not write the answer of message {turn + 1} behind the text that the "
                "model is asked to continue; make one row of each answer, or use another template"
            )
        end = _end_of_answer(whole, len(prompt), tokenizer)
        spans.append((len(prompt), end))
        done = whole[:end]
    if messages[-1]["role"] != "assistant":
        whole = _applied(messages, tokenizer, origin)
    if not whole.startswith(done):
        raise ValueError(f"{origin}: the chat template writes earlier answers differently in the whole conversation")
    return whole, tuple(spans)


def _in_front_of_first_answer(
    text: str, answer: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, origin: str
) -> str:
    """The text of a conversation that begins with an answer, up to that: it is the same for any answer."""
    content = "1" if answer["content"].lstrip().startswith("0") else "0"  # It begins differently.
    other = _applied([{**answer, "content": content}], tokenizer, origin)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return text[: sum(1 for _ in same)]


def _applied(messages: Messages, tokenizer: PreTrainedTokenizerBase, origin: str, **options: Any) -> Any:
    """The template's text of messages, or with `return_dict` its tokens, to which no special tokens are added."""
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize="return_dict" in options, **options)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"{origin}: the chat template refuses the conversation: {error}") from error


def _end_of_answer(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where an answer that begins at `start` ends: behind its last end token, if the template writes one."""
    end_token = tokenizer.eos_token
    found = text.rfind(end_token, start) if end_token else -1
    return found + len(end_token) if found >= 0 else len(text)


def _check_messages(messages: Any, origin: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"{origin}: messages must be a list of objects with role and content, got {_named(messages)}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = _named(message)
            raise ValueError(f"{origin}: message {turn + 1} must be an object with role and content, got {found}")
        for name in ("role", "content"):
            if name not in message:
                keys = ", ".join(map(str, message)) or "nothing"
                raise ValueError(f"{origin}: message {turn + 1} has no {name}; it has {keys}")
            _check_text(message[name], f"{name} of message {turn + 1}", origin)
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        found = f"the roles are {', '.join(roles)}" if roles else "there is no message at all"
        raise ValueError(f"{origin}: no message of role assistant, so there is nothing to learn: {found}")


def _check_text(value: Any, name: str, origin: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{origin}: {name} must be text, got {_named(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!r} at character {error.start + 1}"
        raise ValueError(f"{origin}: {name} holds half of a surrogate pair, {half}, which is no character") from error


def _named(value: Any) -> str:
    """A value of a file as its readers know it, shortened."""
    kinds: dict[type, str] = {str: "the text ", list: "the list ", dict: "the object ", bytes: "the bytes "}
    if value is None:
        return "null"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return f"{kinds.get(type(value), '')}{text}"
