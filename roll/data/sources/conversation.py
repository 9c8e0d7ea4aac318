"""A conversation, or a prompt with its response, as tokens of which only the answers are learned.

Text is cut where a rollout would cut it, in front of each answer, and the parts are tokenized one by one: so the model
learns from the same tokens that it will be asked to continue. What stands behind the end token of an answer (the line
break of ChatML, say) belongs to the next part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from roll.data.tokenizer import check_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""`{"role": ..., "content": ...}` each; role assistant is what is learned."""


class EncodedText(NamedTuple):
    """Token ids, and of each whether it is learned."""

    ids: list[int]
    in_loss: list[bool]


def encode_messages(messages: Messages, tokenizer: PreTrainedTokenizerBase, origin: str) -> EncodedText:
    """The chat template's text of a conversation, learned in the assistant's answers and their end tokens.

    Raises ValueError, beginning with `origin`, for a tokenizer without a chat template, a message without role and
    content as text, a conversation without an answer, a template that writes earlier turns differently once later ones
    follow (then no single text shows what the model sees at each answer), and characters that the tokenizer does not
    know.
    """
    if tokenizer.chat_template is None:
        raise ValueError(f"{origin}: messages need a chat template, and the tokenizer has none")
    for turn, message in enumerate(messages or ()):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f"{origin}: message {turn + 1} must have {name} as text, got {message.get(name)!r}")
    if not messages or not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{origin}: no message of role assistant, so there is nothing to learn")
    return _encode(_template_parts(messages, tokenizer, origin), tokenizer, origin)


def encode_response(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, origin: str) -> EncodedText:
    """A prompt and the response to learn: one turn of the chat template; without one, prompt, response, end token.

    Raises ValueError as `encode_messages` does, and for a tokenizer that has neither template nor end token.
    """
    for name, text in {"prompt": prompt, "response": response}.items():
        if not isinstance(text, str):
            raise ValueError(f"{origin}: {name} must be text, got {text!r}")
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return encode_messages(messages, tokenizer, origin)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{origin}: the tokenizer has neither a chat template nor an end token")
    encoded = _encode([(response, True)], tokenizer, origin)
    check_characters([prompt], tokenizer, what=f"{origin}: prompt and response")
    before = tokenizer.encode(prompt)  # with whatever the tokenizer itself puts in front, as in a rollout
    ids = [*before, *encoded.ids, tokenizer.eos_token_id]
    return EncodedText(ids, [False] * len(before) + [True] * (len(ids) - len(before)))


def _template_parts(messages: Messages, tokenizer: PreTrainedTokenizerBase, origin: str) -> Iterator[tuple[str, bool]]:
    """The template's text of the whole conversation in parts, and of each whether it is an answer."""
    done = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _rendered(messages[:turn], tokenizer, ask=True)
        answered = _rendered(messages[: turn + 1], tokenizer)
        if not prompt.startswith(done) or not answered.startswith(prompt):
            raise ValueError(
                f"{origin}: the chat template does not write the answer of message {turn + 1} behind the text that the "
                "model is asked to continue; make one row of each answer, or use another template"
            )
        end = _end_of_answer(answered, len(prompt), tokenizer)
        yield prompt[len(done) :], False
        yield answered[len(prompt) : end], True
        done = answered[:end]
    whole = _rendered(messages, tokenizer)
    if not whole.startswith(done):
        raise ValueError(f"{origin}: the chat template writes earlier answers differently in the whole conversation")
    yield whole[len(done) :], False


def _rendered(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, ask: bool = False) -> str:
    if not messages:
        return ""
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
    return text


def _end_of_answer(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where an answer that begins at `start` ends: behind its last end token, if the template writes one."""
    end_token = tokenizer.eos_token
    found = text.rfind(end_token, start) if end_token else -1
    return found + len(end_token) if found >= 0 else len(text)


def _encode(parts: Iterator[tuple[str, bool]] | list[tuple[str, bool]], tokenizer: Any, origin: str) -> EncodedText:
    ids: list[int] = []
    in_loss: list[bool] = []
    end_token = tokenizer.eos_token
    for text, learned in parts:
        # The end token is one token, also for a tokenizer that reads no special tokens out of texts.
        ends = learned and end_token and text.endswith(end_token)
        text = text.removesuffix(end_token) if ends else text
        part = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * bool(ends)
        if tokenizer.unk_token_id in part:
            check_characters([text], tokenizer, what=f"{origin}: prompt and response")
        ids += part
        in_loss += [learned] * len(part)
    return EncodedText(ids, in_loss)
