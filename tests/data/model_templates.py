"""Chat templates as models write them, shortened, and a tokenizer with their special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.data.tokenizer_kinds import byte_level_bpe

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
)  # fmt: skip
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added tokens that are no special ones, as in Qwen's tokenizers."""

_CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'\n<tool_call>\n\' }}{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}{{ '\n</tool_call>' }}{% endfor %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
QWEN = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _CALLS + "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The thought of the last answer alone is written, and an empty one where the prompt turns thinking off.
QWEN_3 = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# A tool call is written in the place of the content, and ends with a token of its own.
LLAMA_3 = (
    "{{ bos_token }}{% if tools is not none and tools is defined %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eom_id|>'
    "{% else %}{{ m.content.strip() }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Refuses two answers in a row and a tool's result without a call; the call begins with a special token.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(was='') %}{% for m in messages %}"
    "{% if m.role == 'tool' and ns.was != 'call' %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{% if m.role == 'assistant' and ns.was == 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{% if tools and loop.last or tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% set ns.was = 'call' if m.tool_calls else m.role %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The end of the whole text has the eos token, behind the end of the turn.
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


@dataclass(frozen=True)
class ModelTemplate:
    """A template with the eos token of its tokenizer, and the token that ends an answer and a tool call."""

    source: str
    eos: str
    end: str
    end_of_call: str | None = None
    """None for a template without tool calls."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer that has this template."""
        tokenizer = byte_level_bpe()
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
        tokenizer.eos_token = self.eos
        tokenizer.chat_template = self.source
        return tokenizer


MODELS = {
    "Qwen 2.5": ModelTemplate(QWEN, "<|im_end|>", "<|im_end|>", "<|im_end|>"),
    "Qwen 2.5, base": ModelTemplate(QWEN, "<|endoftext|>", "<|im_end|>", "<|im_end|>"),
    "Qwen 3": ModelTemplate(QWEN_3, "<|endoftext|>", "<|im_end|>", "<|im_end|>"),
    "Llama 3": ModelTemplate(LLAMA_3, "</s>", "<|eot_id|>", "<|eom_id|>"),
    "Mistral": ModelTemplate(MISTRAL, "</s>", "</s>", "</s>"),
    "Gemma": ModelTemplate(GEMMA, "<|endoftext|>", "<end_of_turn>"),
    "Phi 3": ModelTemplate(PHI_3, "<|endoftext|>", "<|end|>"),
}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONVERSATION_WITH_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "add them"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "it is 12"},
]
