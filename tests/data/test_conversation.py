"""Conversations as tokens: those of the whole text, of which the answers are learned; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from roll.data.sources.conversation import encode_conversations, encode_messages, encode_response
from roll.data.sources.learned_text import EncodedText
from roll.data.tokenizer import build_char_tokenizer, check_characters
from tests.data.tokenizer_kinds import KINDS, byte_level_bpe, sentencepiece_bpe, unigram, word_level

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Leaves out the earlier answers, as templates do that drop reasoning from the history.
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['role'] }}:{{ m['content'] }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# Templates of models, with spaces wherever a word-level tokenizer needs them.
TEMPLATES = {
    "special tokens around turns": (
        "{{ bos_token }}{% for m in messages %}<|im_start|> {{ m['role'] }} \n {{ m['content'] }} {{ eos_token }} \n "
        "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant \n {% endif %}"
    ),
    "a space in front of the answer": (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}"
        "{{ ' ' + eos_token if m['role'] == 'assistant' else '' }} {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    ),
    "content stripped": (
        "{% for m in messages %}{{ m['role'] }} : {{ m['content'].strip() }} {{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    ),
    "nothing behind the answer": (
        "{% for m in messages %}{{ '\n ' + m['role'] }} : {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n assistant : ' }}{% endif %}"
    ),
    "generation blocks": (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }} {{ eos_token }}{% endgeneration %} "
        "{% else %}{{ m['content'] }} \n {% endif %}{% endfor %}"
    ),
}
SYSTEM, QUESTION = {"role": "system", "content": "be kind !"}, {"role": "user", "content": "what is a cat ?"}
ANSWER, THANKS = {"role": "assistant", "content": "the cat is an animal"}, {"role": "user", "content": "thanks"}
CONVERSATIONS = {
    "one turn": ([QUESTION, ANSWER], ["the cat is an animal"]),
    "system, two turns": (
        [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}],
        ["the cat is an animal", "2"],
    ),
    "a question that is left open": ([QUESTION, ANSWER, THANKS], ["the cat is an animal"]),
    "two answers in a row": ([QUESTION, ANSWER, {"role": "assistant", "content": "2"}], ["the cat is an animal", "2"]),
    "the answer begins": ([ANSWER, THANKS], ["the cat is an animal"]),
    "an empty question": ([{"role": "user", "content": ""}, ANSWER], ["the cat is an animal"]),
}


def chat_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per character, with the end token read as one token, as tokenizers with a chat template do."""
    tokenizer = build_char_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = template
    return tokenizer


def learned(encoded: EncodedText, tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[str]]:
    """The whole text, and the runs of it that are learned."""
    runs: list[list[int]] = [[]]
    for token, is_learned in zip(*encoded, strict=True):
        if is_learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return tokenizer.decode(encoded.ids), [tokenizer.decode(run) for run in runs if run]


# As Qwen3's: the empty thought is written in front of the last answer alone.
THOUGHTFUL = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n' }}{% endif %}{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As DeepSeek-R1's: a model is asked to begin with a thought, which the history does not hold.
REASONING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}"
)
END_ONCE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% else %}{{ eos_token }}{% endif %}"
)
# Closes the last turn with another token, which begins as the next turn does.
LAST_IS_OTHER = (
    "{% for m in messages %}<bos>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% else %}<pad>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "first", "last"),
    [
        (THOUGHTFUL, "23<eos>", "<think>\n\n</think>\n45<eos>"),
        (REASONING, "23<eos>", "45<eos>"),
        (END_ONCE, "23\n", "45\n<eos>"),
        (LAST_IS_OTHER, "23", "45<pad>"),
    ],
)
def test_answers_are_found_where_earlier_turns_are_written_differently(template: str, first: str, last: str) -> None:
    tokenizer = chat_tokenizer(template)
    questions = [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]
    replies = [{"role": "assistant", "content": "23"}, {"role": "assistant", "content": "45"}]
    whole = [questions[0], replies[0], questions[1], replies[1]]
    encoded = encode_messages(whole, tokenizer, "here")
    assert encoded.ids == tokenizer.apply_chat_template(whole, return_dict=False)
    assert learned(encoded, tokenizer)[1] == [first, last]
    assert learned(encode_messages([questions[1], replies[1]], tokenizer, "here"), tokenizer)[1] == [last]


def test_a_thought_is_learned_where_the_template_writes_it() -> None:
    tokenizer = chat_tokenizer(REASONING)
    reply = {"role": "assistant", "content": "<think>7</think>8"}
    messages = [USER, reply, USER, reply]
    assert learned(encode_messages(messages, tokenizer, "here"), tokenizer)[1] == ["8<eos>", "8<eos>"]
    tokenizer.chat_template = REASONING.replace(".split('</think>')[-1]", "")
    reply["content"] = "<think>\n7</think>8"
    # The model is given the beginning of the thought.
    assert learned(encode_messages(messages, tokenizer, "here"), tokenizer)[1] == ["7</think>8<eos>"] * 2


@pytest.mark.parametrize("space", ["", "\n"])
def test_generation_blocks_are_encoded_as_every_answer(space: str) -> None:
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        f"{{{{ eos_token }}}}{space}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    )
    for split in (False, True):
        tokenizer.split_special_tokens = split
        ids, in_loss = encode_messages([USER, REPLY, USER, REPLY], tokenizer, "here")
        expected = [*tokenizer.encode("2"), tokenizer.eos_token_id, *tokenizer.encode(space)] * 2
        assert [token for token, is_learned in zip(ids, in_loss, strict=True) if is_learned] == expected
    with pytest.raises(ValueError, match="here holds text that the tokenizer does not know: 'é'"):
        encode_messages([USER, {"role": "assistant", "content": "2é"}], tokenizer, "here")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_whole_text(kind: str, template: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = TEMPLATES[template]
    closing = "" if template == "nothing behind the answer" else "</s>"
    for title, (messages, answers) in CONVERSATIONS.items():
        encoded = encode_messages(messages, tokenizer, "here")
        assert encoded.ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False), title
        _, runs = learned(encoded, tokenizer)
        if template == "nothing behind the answer" and title == "two answers in a row":
            continue  # What stands between the two is written by the template as part of the second.
        # White space is each decoder's own affair.
        expected = [(answer + closing).replace(" ", "") for answer in answers]
        assert ["".join(run.split()) for run in runs] == expected, title


def test_the_tokens_of_a_sentencepiece_tokenizer_by_hand() -> None:
    tokenizer = sentencepiece_bpe()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "the cat"}]
    encoded = encode_messages(messages, tokenizer, "here")
    tokens = tokenizer.convert_ids_to_tokens(encoded.ids)
    # `▁` in front of the text alone, and the answer's first word with the space in front of it.
    assert tokens == [*"▁user:", "▁cat", "\n", *"assistant:", "▁the", "▁cat", "</s>", "\n"]
    assert encoded.in_loss == [False] * 18 + [True, True, True, False]


def test_transformers_mask_agrees_where_the_template_has_one() -> None:
    """The same text with and without generation blocks: the same tokens are learned."""
    blocks = TEMPLATES["generation blocks"]
    plain = blocks.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    plain += "{% if add_generation_prompt %}assistant : {% endif %}"
    for kind, build in KINDS.items():
        encoded = []
        for template in (blocks, plain):
            tokenizer = build()
            tokenizer.chat_template = template
            encoded.append(encode_messages(CONVERSATIONS["system, two turns"][0], tokenizer, "here"))
        assert encoded[0] == encoded[1], kind


def test_trimmed_offsets_learn_the_same_tokens() -> None:
    """`ByteLevel()` takes white space off the offsets unless told otherwise; a token of a space has none left."""
    plain, trimmed = byte_level_bpe(), byte_level_bpe()
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    spaced = ([QUESTION, {"role": "assistant", "content": "  1  cat  "}, THANKS, ANSWER], [])
    for template in TEMPLATES.values():
        plain.chat_template = trimmed.chat_template = template
        for messages, _ in (*CONVERSATIONS.values(), spaced):
            assert encode_messages(messages, trimmed, "here") == encode_messages(messages, plain, "here")
    empty = [span for span in trimmed(" 1  cat ", return_offsets_mapping=True)["offset_mapping"] if span[0] == span[1]]
    assert len(empty) == 2
    trimmed.chat_template = None
    # "1", " " and " 1": the space behind the prompt's end is a token of the prompt.
    assert encode_response("1 ", "cat", trimmed, "here").in_loss == [False, True, True]
    assert encode_response("1 ", " 1", trimmed, "here").in_loss == [False, False, True, True]
    assert encode_response("1", "  1", trimmed, "here").in_loss == [False, True, True, True]


def test_many_rows_are_encoded_as_each_alone() -> None:
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = TEMPLATES["special tokens around turns"]
    rows: list[tuple[str, dict[str, Any]]] = [
        (title, {"messages": messages}) for title, (messages, _) in CONVERSATIONS.items()
    ]
    rows.insert(2, ("pair", {"messages": None, "prompt": "1 + 1 =", "response": "2"}))
    together = encode_conversations(rows, tokenizer)
    assert together == [encode_conversations([row], tokenizer)[0] for row in rows]
    assert len({tuple(encoded.ids) for encoded in together}) == len(rows)


def test_a_token_over_the_border_is_learned() -> None:
    # This tokenizer has a token ">8", of which ">" is the prompt's and "8" the answer's.
    vocabulary = {character: index for index, character in enumerate("<>asitnuer78o\n")} | {">8": 14}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, [(">", "8")])), eos_token="<eos>")
    tokenizer.chat_template = CHATML
    messages = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
    encoded = encode_messages(messages, tokenizer, "here")
    assert encoded.ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert encoded.ids[-3:] == [vocabulary[">8"], tokenizer.eos_token_id, vocabulary["\n"]]
    assert encoded.in_loss == [False] * (len(encoded.ids) - 3) + [True, True, False]


def test_a_prompt_and_its_response_without_a_template() -> None:
    tokenizer = build_char_tokenizer()
    assert encode_response("1+", "02", tokenizer, "here") == ([5, 15, 4, 6, 2], [False, False, True, True, True])
    assert encode_response("1+", "", tokenizer, "here") == ([5, 15, 2], [False, False, True])
    assert encode_response("", "2", tokenizer, "here") == ([6, 2], [True, True])
    # Text stays text: this tokenizer reads no end token out of a response.
    assert len(encode_response("1", "<eos>", tokenizer, "here").ids) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_without_a_template_is_one_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    encoded = encode_response("what is a cat ? ", "the cat", tokenizer, "here")
    front = [1] if kind in ("byte_level_bpe", "old_llama") else []
    assert encoded.ids == [*front, *tokenizer.encode("what is a cat ? the cat", add_special_tokens=False), 2]
    assert "".join(learned(encoded, tokenizer)[1][0].split()) == "thecat</s>"
    # A prompt that has the begin token already gets no second one, and a response with its end token no second one.
    again = encode_response("<s> what is a cat ? ", "the cat </s>", tokenizer, "here")
    assert (again.ids.count(1), again.ids.count(2)) == (1, 1)
    assert again.ids[0] == 1 and again.ids[-1] == 2 and again.in_loss[-1]


def test_a_prompt_and_its_response_in_a_template() -> None:
    tokenizer = chat_tokenizer()
    text, runs = learned(encode_response("1+1", "2", tokenizer, "here"), tokenizer)
    assert text == "<user>1+1<eos>\n<assistant>2<eos>\n"
    assert runs == ["2<eos>"]


def test_the_end_of_an_answer_is_the_end_token_for_a_tokenizer_that_reads_none() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.split_special_tokens = True
    messages = [{"role": role, "content": "1"} for role in ("user", "assistant", "user", "assistant")]
    ids, in_loss = encode_messages(messages, tokenizer, "here")
    one, end = tokenizer.encode("1")[0], tokenizer.eos_token_id
    assert [token for token, is_learned in zip(ids, in_loss, strict=True) if is_learned] == [one, end, one, end]
    assert len(ids) == len(tokenizer.apply_chat_template(messages, return_dict=False)) - 2 * len("eos>")
    # Where it shares a token with what follows, there is no such token.
    vocabulary = {character: index for index, character in enumerate("<>asitnuer1o\n")} | {">\n": 13}
    joined = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocabulary, [(">", "\n")])), eos_token="<eos>", split_special_tokens=True
    )
    joined.chat_template = CHATML
    with pytest.raises(ValueError, match="here: the tokenizer joins the end token '<eos>' of an answer to other text"):
        encode_messages(messages, joined, "here")


def test_an_empty_answer_is_its_end_token() -> None:
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]
    assert learned(encode_messages(messages, tokenizer, "here"), tokenizer)[1] == ["<eos>"]
    tokenizer.chat_template = TEMPLATES["nothing behind the answer"]
    with pytest.raises(ValueError, match="here: the chat template writes nothing for its answers"):
        encode_messages(messages, tokenizer, "here")
    blocks = byte_level_bpe()
    blocks.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}"
    with pytest.raises(ValueError, match="here: the chat template writes nothing for its answers"):
        encode_messages([QUESTION, ANSWER], blocks, "here")


USER, REPLY = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no message of role assistant, so there is nothing to learn: there is no message at all"),
        ([USER], "no message of role assistant, so there is nothing to learn: the roles are user$"),
        ([{"role": "human", "content": "1"}, {"role": "gpt", "content": "2"}], "nothing to learn: the roles are human"),
        ('[{"role": "user"}]', r"messages must be a list of objects with role and content, got the text '\["),
        ({"role": "user"}, "messages must be a list of objects with role and content, got the object"),
        (5, "messages must be a list of objects with role and content, got 5$"),
        (["hi", "ho"], "message 1 must be an object with role and content, got the text 'hi'"),
        ([USER, None], "message 2 must be an object with role and content, got null"),
        ([USER, {"role": "assistant"}], "message 2 has no content; it has role"),
        ([{"from": "human", "value": "1"}], "message 1 has no role; it has from, value"),
        ([USER, {"role": "assistant", "content": None}], "content of message 2 must be text, got null"),
        ([USER, {"role": "assistant", "content": 7}], "content of message 2 must be text, got 7$"),
        ([{"role": 1, "content": "1"}], "role of message 1 must be text, got 1$"),
        ([{"role": "user", "content": [{"type": "text", "text": "1"}]}, REPLY],
         r"content of message 1 must be text, got the list \[\{'type'"),
        ([{"role": "user", "content": "1\ud800"}, REPLY],
         r"content of message 1 holds half of a surrogate pair, '\\ud800' at character 2"),
        ([USER, {"role": "assistant", "content": "é"}], "holds text that the tokenizer does not know: 'é'"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^a row:? .*{message}"):
        encode_messages(messages, chat_tokenizer(), "a row")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only user and assistant') }}", "refuses the conversation: only user and assistant"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the conversation: can only concatenate str"),
        ("{{ messages[9]['content'] }}", "refuses the conversation: .* no element 9"),
        ("{% for m in messages %}", "refuses the conversation: Unexpected end of template"),
    ],
)
def test_a_template_that_raises_names_the_row(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"here: the chat template {message}"):
        encode_messages([USER, REPLY], chat_tokenizer(template), "here")


def test_templates_and_tokenizers_that_are_refused() -> None:
    forgetful = chat_tokenizer(FORGETFUL)
    assert learned(encode_messages([USER, REPLY], forgetful, "here"), forgetful)[1] == ["2;"]
    for later in ([USER, REPLY], [USER]):
        with pytest.raises(ValueError, match="here: the chat template does not write the answer of message 2 into the"):
            encode_messages([USER, REPLY, *later], forgetful, "here")
    backwards = chat_tokenizer("{% for m in messages | reverse %}{{ m['content'] }};{% endfor %}")
    with pytest.raises(ValueError, match=r"here: the chat template does not write the answer of message 4 .* its own"):
        encode_messages([USER, REPLY, USER, REPLY], backwards, "here")
    several = chat_tokenizer()
    several.chat_template = {"tool_use": CHATML, "rag": CHATML}
    with pytest.raises(
        ValueError, match="here: the tokenizer has no chat template called 'default': it has 'tool_use', 'rag'"
    ):
        encode_messages([USER, REPLY], several, "here")
    several.chat_template = {"default": CHATML, "rag": "{{ 1 }}"}
    assert learned(encode_messages([USER, REPLY], several, "here"), several)[1] == ["2<eos>"]
    with pytest.raises(ValueError, match="here: messages need a chat template, and the tokenizer has none"):
        encode_messages([USER, REPLY], build_char_tokenizer(), "here")
    no_end = build_char_tokenizer()
    no_end.eos_token = None
    with pytest.raises(ValueError, match="here: the tokenizer has neither a chat template nor an end token"):
        encode_response("1", "2", no_end, "here")
    slow = ByT5Tokenizer()
    for template in (None, CHATML):
        slow.chat_template = template
        with pytest.raises(ValueError, match="ByT5Tokenizer gives no offsets"):
            encode_response("1", "2", slow, "here")


def without_unknown(alphabet: str, *, spaces: bool = False) -> PreTrainedTokenizerFast:
    """BPE of single characters, which leaves out every other one."""
    backend = Tokenizer(BPE({one: index for index, one in enumerate(alphabet)}, []))
    if spaces:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


def test_text_that_a_tokenizer_leaves_out_is_refused() -> None:
    digits, words = without_unknown("0123456789+= "), without_unknown("▁thecab\n", spaces=True)
    assert encode_response("1 + 2=", "3", digits, "here").in_loss == [False] * 6 + [True, True]
    with pytest.raises(ValueError, match="here holds text that the tokenizer does not know: 'é'"):
        encode_response("1 + 2=", "3é", digits, "here")
    # The offsets of what stands behind the lost character are another's; white space hides that at the end.
    for prompt, response in (("the é cat ", "the cat"), ("the cat ", "the é\n"), ("é \n", "cat")):
        with pytest.raises(ValueError, match=r"here holds text that the tokenizer does not know: 'é'$"):
            encode_response(prompt, response, words, "here")
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    question = {"role": "user", "content": "a cat"}
    tokens = encode_messages([question, {"role": "assistant", "content": "the"}], words, "here")
    assert learned(tokens, words)[1][0].replace("▁", "").replace(" ", "") == "the</s>"
    with pytest.raises(ValueError, match=r"here holds text that the tokenizer does not know: '\['$"):
        encode_messages([question, {"role": "assistant", "content": "the["}], words, "here")
    with pytest.raises(ValueError, match="prompts hold characters that the tokenizer does not know: 'é'"):
        check_characters(["1é"], digits, what="prompts")


def test_text_that_no_offset_covers_is_refused() -> None:
    tokenizer = word_level()
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("!", behavior="removed")])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    assert encode_response("what ", "cat", tokenizer, "here").in_loss == [False, True, True]
    with pytest.raises(ValueError, match="here holds text that the tokenizer does not know: '!'"):
        encode_response("what ", "cat!", tokenizer, "here")


def test_unknown_text_is_named_as_it_stands() -> None:
    tokenizer = word_level()
    with pytest.raises(ValueError, match="here holds text that the tokenizer does not know: 'dog', 'no'"):
        encode_response("what is no ", "dog", tokenizer, "here")
    # Spelled out it is a token of the text.
    assert encode_response("what is <unk> ", "cat", unigram(), "here").ids.count(0) == 1
