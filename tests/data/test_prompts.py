"""Prompts and answers as batches, and the order in which prompts are drawn."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from roll.data.prompts import PromptSampler, encode_answers, encode_prompts, prompt_ids
from roll.data.task_answers import TaskAnswers
from roll.data.tasks import ReasoningTask, TaskItem
from roll.data.tokenizer import build_char_tokenizer
from tests.data.tokenizer_kinds import KINDS

TOKENIZER = build_char_tokenizer("0123456789 +-=")  # '0' is 4, ' ' is 14, '+' 15, '-' 16, '=' 17


def item(prompt: str, answer: str | None = "0") -> TaskItem:
    entry: dict[str, Any] = {"question": prompt, "answer": answer, "metadata": {"source_dataset": "chain_sum"}}
    return TaskItem(prompt=prompt, answer=answer, entry=entry)


def test_prompts_are_padded_on_the_left() -> None:
    items = [item("1+2="), item("10+2="), item("=")]
    data = encode_prompts(items, TOKENIZER, max_prompt_tokens=5)
    assert len(data) == 3
    assert data.batch["input_ids"].tolist() == [[0, 5, 15, 6, 17], [5, 4, 15, 6, 17], [0, 0, 0, 0, 17]]
    assert data.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert data.batch["input_ids"].dtype == data.batch["attention_mask"].dtype == torch.int64
    assert data.non_tensor_batch["prompt"].tolist() == ["1+2=", "10+2=", "="]
    assert data.non_tensor_batch["entry"].tolist() == [i.entry for i in items]


def test_answers_and_their_ends_are_learned() -> None:
    source = TaskAnswers([item("1+2=", "3"), item("9-10=", "-1")], TOKENIZER, max_prompt_tokens=5)
    assert len(source) == 2 and source.lengths.tolist() == [6, 8]
    assert source[0].ids.tolist() == [5, 15, 6, 17, 7, 2]
    assert source[0].in_loss.tolist() == [False] * 4 + [True] * 2
    assert source[1].ids.tolist() == [13, 16, 5, 4, 17, 16, 5, 2]
    assert source[1].in_loss.tolist() == [False] * 5 + [True] * 3


def test_one_item_and_no_item() -> None:
    assert encode_prompts([item("1")], TOKENIZER, 3).non_tensor_batch["entry"].shape == (1,)
    assert encode_prompts([], TOKENIZER, 3).batch["input_ids"].shape == (0, 3)
    assert len(TaskAnswers([], TOKENIZER, 3)) == len(TaskAnswers([], TOKENIZER, 3).lengths) == 0


def test_special_tokens_of_the_tokenizer_come_before_the_prompt_only() -> None:
    tokenizer = build_char_tokenizer("0123456789 +-=")
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    assert TaskAnswers([item("1=", "1")], tokenizer, max_prompt_tokens=4)[0].ids.tolist() == [1, 5, 17, 5, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_tokenizers_begin_token_once_and_no_end_token(kind: str) -> None:
    tokenizer = KINDS[kind]()
    begin = [1] if kind in ("byte_level_bpe", "old_llama") else []
    bare = tokenizer.encode("what is a cat ?", add_special_tokens=False)
    assert prompt_ids([item("what is a cat ?")], tokenizer, 100) == [[*begin, *bare]]
    templated = prompt_ids([item("<s> what is a cat ?")], tokenizer, 100)[0]
    assert templated.count(1) == 1 and templated[0] == 1
    # The answer's tokens are those of the whole text.
    whole = [*begin, *tokenizer.encode("what is a cat ? the cat", add_special_tokens=False), 2]
    assert encode_answers([item("what is a cat ? ", "the cat")], tokenizer)[0].ids == whole


def test_what_a_tokenizer_puts_behind_a_text_is_no_part_of_a_prompt() -> None:
    tokenizer = ByT5Tokenizer()  # One id a byte, behind 3 special ones, and </s> behind every text.
    assert tokenizer.encode("ab") == [100, 101, 1]
    assert prompt_ids([item("ab")], tokenizer, 100) == [[100, 101]]
    both_ends = build_char_tokenizer("0123456789 +-=")
    both_ends.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert prompt_ids([item("1=")], both_ends, 100) == [[1, 5, 17]]
    assert TaskAnswers([item("1=", "1")], both_ends, max_prompt_tokens=4)[0].ids.tolist() == [1, 5, 17, 5, 2]


def test_a_tokenizer_that_reads_no_letter_has_its_begin_token_too() -> None:
    vocabulary = {one: index for index, one in enumerate(("<s>", "</s>", *"0123456789+="))}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    assert tokenizer.encode("a") == [0]
    assert prompt_ids([item("1+=")], tokenizer, 100) == [[0, 3, 12, 13]]
    assert encode_answers([item("1=", "2")], tokenizer)[0] == ([0, 3, 13, 4, 1], [False, False, False, True, True])
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"<s>": 0}, [])), bos_token="<s>")
    with pytest.raises(ValueError, match="reads no text, not even that of its own tokens"):
        prompt_ids([], empty, 100)


def test_words_may_be_known_where_their_characters_are_not() -> None:
    tokenizer = KINDS["word_level"]()
    assert len(prompt_ids([item("what is a cat ?")], tokenizer, 5)[0]) == 5
    with pytest.raises(ValueError, match="prompts hold characters that the tokenizer does not know: 'no'"):
        prompt_ids([item("what is"), item("what is no")], tokenizer, 5)


def test_a_real_task_reads_back() -> None:
    task = ReasoningTask(
        "chain_sum", {"min_terms": 2, "max_terms": 2}, train_size=20, eval_size=5, prompt_template="{expression} ="
    )
    source = TaskAnswers(task.train, build_char_tokenizer(), max_prompt_tokens=13)
    rows = [source[index].ids.tolist() for index in range(len(source))]
    texts = build_char_tokenizer().batch_decode(rows, skip_special_tokens=True)
    assert texts == [i.prompt + (i.answer or "") for i in task.train]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (item("100+200="), r"prompt 1 has 8 tokens, max_prompt_tokens is 6: '100\+200='"),
        (item(""), "prompt 1 is empty"),
        (item("1ß2"), "prompts hold characters .*'ß'"),
    ],
)
def test_bad_prompts_are_refused(bad: TaskItem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_prompts([item("1"), bad], TOKENIZER, max_prompt_tokens=6)
    with pytest.raises(ValueError, match=message):
        TaskAnswers([item("1"), bad], TOKENIZER, max_prompt_tokens=6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (item("1", None), "item 1 has no answer"),
        (item("1", "π"), "answers hold characters .*'π'"),
    ],
)
def test_bad_answers_are_refused(bad: TaskItem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskAnswers([item("1"), bad], TOKENIZER, max_prompt_tokens=6)


def test_an_answer_that_is_no_response_is_refused() -> None:
    assert encode_answers([item("1", "12")], TOKENIZER, 3) == [([5, 5, 6, 2], [False, True, True, True])]
    with pytest.raises(ValueError, match="answer 1 has 4 tokens with its end token, max_new_tokens is 3: '123'"):
        encode_answers([item("1"), item("1", "123")], TOKENIZER, 3)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    no_eos = build_char_tokenizer("1")
    no_eos.eos_token = None
    with pytest.raises(ValueError, match=r"no eos_token, .*: name one in its tokenizer_config\.json"):
        TaskAnswers([item("1", "1")], no_eos, 2)


@settings(deadline=None)
@given(num_items=st.integers(1, 30), data=st.data(), seed=st.integers(0, 1000))
def test_every_epoch_holds_every_item_once(num_items: int, data: st.DataObject, seed: int) -> None:
    sampler = PromptSampler(num_items, data.draw(st.integers(1, num_items)), seed)
    stream = list(itertools.chain.from_iterable(itertools.islice(sampler, 3 * num_items)))
    for start in range(0, len(stream) - num_items + 1, num_items):
        assert sorted(stream[start : start + num_items]) == list(range(num_items))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    sampler = PromptSampler(100, 100, seed=0)
    first, second = next(sampler), next(sampler)
    assert first != second != list(range(100)) != first
    assert next(PromptSampler(100, 100, seed=1)) != first
    assert next(PromptSampler(100, 100, seed=0)) == first


@settings(deadline=None)
@given(batches=st.integers(0, 20), other_size=st.integers(1, 7))
def test_a_loaded_sampler_continues_the_stream(batches: int, other_size: int) -> None:
    original = PromptSampler(7, 3, seed=4)
    for _ in range(batches):
        next(original)
    state = json.loads(json.dumps(original.state_dict()))
    loaded = PromptSampler(7, other_size, seed=4)
    loaded.load_state_dict(state)
    expected = list(itertools.chain.from_iterable(itertools.islice(original, 10)))
    continued = list(itertools.chain.from_iterable(itertools.islice(loaded, 30)))
    assert continued[: len(expected)] == expected[: len(continued)]


def test_bad_samplers_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be between 1 and num_items = 4, got 5"):
        PromptSampler(4, 5, seed=0)
    with pytest.raises(ValueError, match="got 0"):
        PromptSampler(4, 0, seed=0)
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        PromptSampler(4, 2, seed=-1)
    state = PromptSampler(4, 2, seed=0).state_dict()
    with pytest.raises(ValueError, match="saved num_items is 4, this sampler's is 5"):
        PromptSampler(5, 2, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="saved seed is 0, this sampler's is 1"):
        PromptSampler(4, 2, seed=1).load_state_dict(state)
