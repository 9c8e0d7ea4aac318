"""Templates of models: where answers end, and what of a row changes the text of its conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from roll.data import TextFiles
from roll.data.prompts import encode_answers, encode_prompts, prompt_ids
from roll.data.sources.chat_template import template_variables
from roll.data.sources.conversation import encode_conversations, encode_messages
from roll.data.sources.learned_text import EncodedText
from roll.data.task_answers import TaskAnswers
from tests.data.model_templates import CALL, CONVERSATION_WITH_CALL, GEMMA, MODELS, QWEN, TOOL, ModelTemplate
from tests.data.test_conversation import USER, learned
from tests.data.test_prompts import item
from tests.data.tokenizer_kinds import KINDS

TURNS = [
    {"role": "user", "content": "what is a cat ?"},
    {"role": "assistant", "content": "the cat is an animal"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "2"},
]


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> EncodedText:
    return encode_conversations([("here", row)], tokenizer)[0]


def with_blocks(model: ModelTemplate) -> ModelTemplate:
    """The template with `{% generation %}` around each content of an answer and the end token behind it."""
    content = "{{ m.content | trim }}" if "{{ m.content | trim }}" in model.source else "{{ m.content }}"
    before, behind = model.source.split(content + model.end)
    block = f"{{% generation %}}{content}{model.end}{{% endgeneration %}}"
    choice = f"{{% if m.role == 'assistant' %}}{block}{{% else %}}{content}{model.end}{{% endif %}}{{{{ '' }}}}"
    return ModelTemplate(before + choice + behind, model.eos, model.end)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_ends_with_its_first_end_token(name: str) -> None:
    model = MODELS[name]
    tokenizer = model.tokenizer()
    for number in (2, 4):
        encoded = encode_messages(TURNS[:number], tokenizer, "here")
        assert encoded.ids == tokenizer.apply_chat_template(TURNS[:number], return_dict=False)
        last = [f"{TURNS[turn]['content']}{model.end}" for turn in range(1, number, 2)]
        thought = "<think>\n\n</think>\n\n" if name == "Qwen 3" else ""
        space = " " if name == "Mistral" else ""
        expected = [space + run for run in last[:-1]] + [space + thought + last[-1]]
        assert learned(encoded, tokenizer)[1] == expected


@pytest.mark.parametrize("name", ["Gemma", "Phi 3"])
def test_an_answer_without_blocks_is_what_transformers_masks_with_them(name: str) -> None:
    model = MODELS[name]
    blocks = with_blocks(model).tokenizer()
    masked = blocks.apply_chat_template(TURNS, return_assistant_tokens_mask=True, return_dict=True)
    assert sum(masked["assistant_masks"]) > 4
    for tokenizer in (blocks, model.tokenizer()):
        encoded = encode_messages(TURNS, tokenizer, "here")
        assert encoded.ids == masked["input_ids"]
        assert encoded.in_loss == [bool(one) for one in masked["assistant_masks"]]


def test_the_end_token_is_one_token_for_a_tokenizer_that_reads_none() -> None:
    tokenizer = MODELS["Qwen 2.5, base"].tokenizer()
    tokenizer.split_special_tokens = True
    ids, in_loss = encode_messages(TURNS[:2], tokenizer, "here")
    expected = [*tokenizer.encode("the cat is an animal", add_special_tokens=False)]
    run = [token for token, is_learned in zip(ids, in_loss, strict=True) if is_learned]
    assert tokenizer.decode(run) == "the cat is an animal<|im_end|>"
    assert run == [*expected, tokenizer.convert_tokens_to_ids("<|im_end|>")]


@pytest.mark.parametrize("content", ["2<|endoftext|>", "2"])
def test_a_content_may_bring_its_end_token_along(content: str) -> None:
    model = ModelTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}", "<|endoftext|>", "")
    messages = [USER, {"role": "assistant", "content": content}]
    tokenizer = model.tokenizer()
    expected = content if content != "2" else "2\n"
    assert learned(encode_messages(messages, tokenizer, "here"), tokenizer)[1] == [expected]


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.end_of_call])
def test_tools_and_tool_calls_are_written_and_learned(name: str) -> None:
    model = MODELS[name]
    tokenizer = model.tokenizer()
    row = {"messages": CONVERSATION_WITH_CALL, "tools": [TOOL]}
    encoded = encode(row, tokenizer)
    assert encoded.ids == tokenizer.apply_chat_template(CONVERSATION_WITH_CALL, tools=[TOOL], return_dict=False)
    text, (call, answer) = learned(encoded, tokenizer)
    assert '"parameters"' in text and '"type": "object"' in text
    assert call.endswith((f"}}{model.end_of_call}", f"}}\n</tool_call>{model.end_of_call}"))
    assert '"name": "add"' in call and '{"a": 1, "b": "two"}' in call
    assert answer.endswith(f"it is 12{model.end}") and answer.count(model.end) == 1
    # Alone, as the last answer, it is learned as far.
    alone = encode({**row, "messages": CONVERSATION_WITH_CALL[:2]}, tokenizer)
    assert learned(alone, tokenizer)[1] == [call if name != "Qwen 3" else f"<think>\n\n</think>\n\n{call}"]


def test_a_special_token_inside_a_tool_call_does_not_end_it() -> None:
    model = MODELS["Qwen 2.5"]
    tokenizer = model.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert "</tool_call>" in tokenizer.all_special_tokens
    calls = learned(encode({"messages": CONVERSATION_WITH_CALL[:2]}, tokenizer), tokenizer)[1]
    assert len(calls) == 1 and calls[0].endswith("</tool_call><|im_end|>")


def test_a_template_may_demand_tool_calls() -> None:
    demanding = QWEN.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
        "{{ raise_exception('call') }}{% endif %}",
        1,
    )
    tokenizer = ModelTemplate(demanding, "<|endoftext|>", "<|im_end|>").tokenizer()
    (call,) = learned(encode({"messages": CONVERSATION_WITH_CALL[:2]}, tokenizer), tokenizer)[1]
    assert call.endswith("}\n</tool_call><|im_end|>")


THOUGHT = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}


def test_reasoning_is_learned_where_the_template_writes_it() -> None:
    tokenizer = MODELS["Qwen 3"].tokenizer()
    for key in ("reasoning_content", "reasoning", "thinking"):
        message = {"role": "assistant", "content": "2", key: "1 and 1"}
        encoded = encode({"messages": [USER, message]}, tokenizer)
        assert encoded.ids == tokenizer.apply_chat_template([USER, message], return_dict=False)
        assert learned(encoded, tokenizer)[1] == ["<think>\n1 and 1\n</think>\n\n2<|im_end|>"]


def test_variables_and_documents_go_to_the_template() -> None:
    source = (
        "{{ mode | default('slow') }} {% for d in documents or [] %}{{ d.title }} {% endfor %}"
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer = ModelTemplate(source, "</s>", "</s>").tokenizer()
    row = {"messages": TURNS[:2], "documents": [{"title": "cats"}], "chat_template_kwargs": {"mode": "fast"}}
    encoded = encode(row, tokenizer)
    expected = tokenizer.apply_chat_template(TURNS[:2], documents=row["documents"], mode="fast", return_dict=False)
    assert encoded.ids == expected and learned(encoded, tokenizer)[0].startswith("fast cats what")
    pair = {"prompt": "what is a cat ?", "response": "the cat is an animal"}
    assert encode({**row, "messages": None, **pair}, tokenizer) == encoded
    # Nulls and empty lists are what they are without the key.
    nothing = {"documents": None, "tools": [], "chat_template_kwargs": {}, "enable_thinking": True, "mode": None}
    plain = encode({"messages": TURNS[:2]}, tokenizer)
    assert encode({"messages": TURNS[:2], **nothing}, tokenizer) == plain != encoded


def test_variables_of_a_template_are_found() -> None:
    source = (
        "{% if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}{% set ns = namespace(a=1) %}"
        "{% for m in messages %}{% if loop.first and tools_in_user %}{{ raise_exception('no') }}{% endif %}"
        "{% generation %}{{ m.content + bos_token }}{% endgeneration %}{% break %}{% endfor %}{{ range(ns.a) }}"
    )
    assert template_variables(source) == {"date", "messages", "tools_in_user", "bos_token"}


def test_several_templates_are_chosen_from_as_transformers_does() -> None:
    tokenizer = MODELS["Gemma"].tokenizer()
    tokenizer.chat_template = {"default": GEMMA, "tool_use": QWEN}
    with_tools = encode({"messages": TURNS, "tools": [TOOL]}, tokenizer)
    assert with_tools.ids == tokenizer.apply_chat_template(TURNS, tools=[TOOL], return_dict=False)
    assert encode({"messages": TURNS}, tokenizer).ids == tokenizer.apply_chat_template(TURNS, return_dict=False)


REFUSED_ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma", {"tools": [TOOL]}, "the chat template writes nothing of the row's tools: use a template"),
    ("Gemma", {"documents": [{"title": "a"}]}, "the chat template writes nothing of the row's documents"),
    ("Qwen 3", {"tools": "[]"}, r"tools must be a list of objects, got the text '\[\]'$"),
    ("Qwen 3", {"tools": ["add"]}, r"tools must be a list of objects, got the list \['add'\]$"),
    ("Qwen 3", {"documents": {"a": 1}}, "documents must be a list of objects, got the object"),
    ("Qwen 3", {"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object, got the text 'x'$"),
    ("Qwen 3", {"chat_template_kwargs": {"enable_thinkin": False}},
     "the chat template does not read enable_thinkin of chat_template_kwargs; its variables are enable_thinking$"),
    ("Qwen 3", {"chat_template_kwargs": {"tools": [TOOL], "messages": []}},
     "chat_template_kwargs must not hold messages, tools: the row itself"),
    ("Qwen 3", {"enable_thinking": False},
     "enable_thinking is a variable of the chat template: put it into chat_template_kwargs$"),
    ("Gemma", {"messages": [USER, THOUGHT]}, "the chat template writes nothing of reasoning_content: use a templ"),
    ("Gemma", {"messages": [USER, {"role": "assistant", "content": "2", "thinking": "1"}]},
     "the chat template writes nothing of thinking: use a template that does, or remove thinking$"),
    ("Gemma", {"messages": [USER, {"role": "assistant", "content": "2", "tool_calls": [CALL]}]},
     "the chat template writes nothing of tool_calls: use a template that does, or remove tool_calls$"),
    ("Llama 3", {"messages": [USER, {"role": "assistant", "content": "I add", "tool_calls": [CALL]}]},
     "the chat template does not write the answer of message 2 into the whole conversation"),
    ("Qwen 3", {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
     "content of message 2 must be text, got null$"),
    ("Qwen 3", {"messages": [USER, {"role": "assistant", "tool_calls": "add(1)"}]},
     r"tool_calls of message 2 must be a list of objects, got the text 'add\(1\)'$"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "message"), REFUSED_ROWS)
def test_rows_that_lose_a_part_are_refused(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^here: {message}"):
        encode({"messages": TURNS, **row}, MODELS[name].tokenizer())


def test_a_message_that_is_not_written_is_refused() -> None:
    source = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    tokenizer = ModelTemplate(source, "</s>", "</s>").tokenizer()
    for system in ("", " \n"):
        assert encode({"messages": [{"role": "system", "content": system}, *TURNS]}, tokenizer)
    with pytest.raises(ValueError, match=r"^here: the chat template writes nothing of message 1 of role system: use a"):
        encode({"messages": [{"role": "system", "content": "be kind !"}, *TURNS]}, tokenizer)
    # A text that is changed on its way is written.
    upper = "{% if m.role == 'system' %}{{ m.content | upper }}{% else %}"
    tokenizer.chat_template = source.replace("{% if m.role != 'system' %}", upper)
    encoded = encode({"messages": [{"role": "system", "content": "be kind !"}, *TURNS]}, tokenizer)
    assert learned(encoded, tokenizer)[0].startswith("BE KIND !what is a cat ?")


def test_arguments_need_a_template() -> None:
    tokenizer = KINDS["byte_level_bpe"]()
    pair = {"prompt": "1", "response": "2"}
    assert encode({**pair, "tools": []}, tokenizer) == encode(pair, tokenizer)
    for name, value in {"tools": [TOOL], "documents": [{}], "chat_template_kwargs": {"a": 1}}.items():
        with pytest.raises(ValueError, match=f"^here: {name} need a chat template, and the tokenizer has none$"):
            encode({**pair, name: value}, tokenizer)


def test_keys_that_are_not_read_are_counted(tmp_path: Path) -> None:
    tokenizer = MODELS["Qwen 3"].tokenizer()
    early = [USER, THOUGHT, *TURNS[2:]]
    rows = [
        {"messages": TURNS, "id": 1},
        {"messages": [{**TURNS[0], "name": "Ann", "weight": 0}, *TURNS[1:]], "prompt": "what is a cat ?"},
        {"messages": [{**TURNS[0], "name": "Bob", "tags": None}, {**TURNS[1], "name": ""}]},
        {"messages": early},
        {"messages": [{**USER, "name": "Cy"}, THOUGHT]},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    note = (
        "the chat template does not read: prompt (1 of 5 rows), name of messages (3 of 5 rows), "
        "weight of messages (1 of 5 rows), reasoning_content of messages (1 of 5 rows)"
    )
    for _ in range(2):  # The second time from the cache.
        assert TextFiles(file, tokenizer, cache_dir=tmp_path / "cache").notes == (note,)
    # A template that writes whole messages reads all of their keys.
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{{ eos_token }}{% endfor %}"
    assert TextFiles(file, tokenizer, cache_dir=tmp_path / "cache").notes == (
        "the chat template does not read: prompt (1 of 5 rows)",
    )


def test_columns_of_a_table_go_to_the_template(tmp_path: Path) -> None:
    tokenizer = MODELS["Qwen 3"].tokenizer()
    other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "required": ["a"]}}}
    rows: list[dict[str, Any]] = [
        {"messages": TURNS[:2], "tools": [TOOL]},
        {"messages": CONVERSATION_WITH_CALL, "tools": [TOOL, other]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = TextFiles(tmp_path / "a.parquet", tokenizer, cache_dir=tmp_path / "cache")
    for number, row in enumerate(rows):
        # The struct of all rows' keys has a null where a row has none.
        assert source[number].ids.tolist() == encode(row, tokenizer).ids
    pq.write_table(pa.Table.from_pylist([{"messages": TURNS, "enable_thinking": False}]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet row 1: enable_thinking is a variable of the chat template"):
        TextFiles(tmp_path / "a.parquet", tokenizer, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_a_task_are_turns_of_the_template(name: str) -> None:
    model = MODELS[name]
    tokenizer = model.tokenizer()
    turn = [{"role": "user", "content": "what is a cat ?"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    items = [item("what is a cat ?", "the cat")]
    assert prompt_ids(items, tokenizer, 100) == [ids]
    assert ids.count(1) == int("bos_token" in model.source), "the begin token is there once"
    assert encode_prompts(items, tokenizer, 100).batch["input_ids"][0, -len(ids) :].tolist() == ids
    # Bare text gets the begin token of the tokenizer.
    assert prompt_ids(items, tokenizer, 100, "none") == [tokenizer.encode("what is a cat ?")]
    # Where the warm start learns an answer, it stands behind the same prompt.
    sample = TaskAnswers(items, tokenizer, max_prompt_tokens=100)[0]
    assert sample.ids[: len(ids)].tolist() == ids and not sample.in_loss[: len(ids)].any()
    assert encode_answers(items, tokenizer)[0].ids == sample.ids.tolist()
    assert tokenizer.decode(sample.ids[sample.in_loss]).endswith(f"the cat{model.end}")
    bare = TaskAnswers(items, tokenizer, 100, "none")[0]
    assert bare.ids.tolist() == [*tokenizer.encode("what is a cat ?the cat"), tokenizer.eos_token_id]


def test_prompts_that_are_refused() -> None:
    tokenizer = MODELS["Gemma"].tokenizer()
    ids = prompt_ids([item("1")], tokenizer, 100)[0]
    assert prompt_ids([item("1")], tokenizer, len(ids)) == [ids]
    with pytest.raises(ValueError, match=f"prompt 0 has {len(ids)} tokens, max_prompt_tokens is {len(ids) - 1}: '1'"):
        prompt_ids([item("1")], tokenizer, len(ids) - 1)
    with pytest.raises(ValueError, match=r"^answer 0 has 4 tokens with its end token, max_new_tokens is 3: '123'"):
        encode_answers([item("1", "123")], tokenizer, 3)
    tokenizer.chat_template = "{{ raise_exception('no user') }}"
    with pytest.raises(ValueError, match=r"^prompt 0: the chat template refuses the conversation: no user"):
        prompt_ids([item("1")], tokenizer, 9)
    tokenizer.chat_template = "nothing{% if add_generation_prompt %}:{% endif %}"
    with pytest.raises(ValueError, match=r"^prompt 0: the chat template writes nothing of message 1 of role user"):
        prompt_ids([item("1")], tokenizer, 9)
