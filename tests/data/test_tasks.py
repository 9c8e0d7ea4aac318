"""Tasks of reasoning-gym: prompts, the split, the default reward, and what a reward function may return."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import torch

from roll.data.tasks import (
    ReasoningTask,
    RewardError,
    checked_rewards,
    exact_match,
    load_reward_function,
    score_responses,
)
from roll.data.tokenizer import build_char_tokenizer, check_characters

TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def chain_sum(**changes: Any) -> ReasoningTask:
    settings: dict[str, Any] = {"train_size": 300, "eval_size": 50, "prompt_template": "{expression} ="}
    return ReasoningTask("chain_sum", TWO_TERMS, **(settings | changes))


def entry(answer: str | None, source: str = "chain_sum") -> dict[str, Any]:
    return {"question": "?", "answer": answer, "metadata": {"source_dataset": source}}


def test_short_prompts_and_their_answers() -> None:
    task = chain_sum()
    assert (len(task.train), len(task.eval)) == (300, 50)
    for item in task.train + task.eval:
        left, operator, right, equals = item.prompt.split(" ")
        assert equals == "="
        assert item.answer == str(int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert item.entry["question"].endswith(item.prompt)


def test_the_default_prompt_is_the_question() -> None:
    item = chain_sum(prompt_template="{question}").train[0]
    assert item.prompt == item.entry["question"]
    assert item.prompt.startswith("State the final answer")


def test_eval_prompts_are_distinct_and_never_in_train() -> None:
    # 200 one-digit and 16,200 two-digit problems exist, each kind half of the draws: repeats are certain.
    task = chain_sum(train_size=2000, eval_size=100)
    held_out = [item.prompt for item in task.eval]
    train = [item.prompt for item in task.train]
    assert len(set(held_out)) == 100
    assert not set(held_out) & set(train)
    assert len(set(train)) < len(train)  # train keeps the generator's own distribution
    one_digit = sum(item.entry["metadata"]["num_digits"] == 1 for item in task.train)
    assert 700 < one_digit < 1100


def test_the_same_seed_gives_the_same_items_and_another_seed_unrelated_ones() -> None:
    prompts = [item.prompt for item in chain_sum(seed=5).train]
    assert [item.prompt for item in chain_sum(seed=5).train] == prompts
    params = {**TWO_TERMS, "min_digits": 2}
    first, second = (
        {item.prompt for item in ReasoningTask("chain_sum", params, train_size=300, eval_size=50, seed=seed).train}
        for seed in (5, 6)
    )
    assert len(first & second) < 30  # the generator's own neighbouring seeds would share all but a few


def test_eval_does_not_depend_on_the_size_of_train() -> None:
    assert [item.prompt for item in chain_sum().eval] == [item.prompt for item in chain_sum(train_size=400).eval]


@pytest.mark.filterwarnings("ignore:.*randrange:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sums", {}, "unknown task 'chain_sums'; near names: .*chain_sum"),
        ("qqqq", {}, "unknown task 'qqqq'; known: .*chain_sum"),
        ("chain_sum", {"min_term": 2}, "unknown param 'min_term' .* did you mean 'min_terms'"),
        ("chain_sum", {"size": 2}, "may not set 'size'"),
        ("chain_sum", {"seed": 2}, "may not set 'seed'"),
        ("chain_sum", {"min_terms": 0}, r"chain_sum refuses params \{'min_terms': 0\}: min_terms must be positive"),
        ("chain_sum", {"min_terms": "two"}, r"refuses params \{'min_terms': 'two'\}"),
        ("chain_sum", {"min_terms": 2.5}, r"refuses params \{'min_terms': 2.5\}"),
    ],
)
def test_bad_tasks_are_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningTask(name, params, train_size=10, eval_size=2)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{expresion} =", "uses expresion, entries of chain_sum have .*expression.*question"),
        ("{expression", "malformed"),
        ("{}", "plain name"),
        ("{expression.upper}", "plain name"),
        ("{expression:>9}", "plain name"),
        ("{expression!r}", "plain name"),
        ("1 + 1 =", "has no field"),
    ],
)
def test_bad_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_sum(prompt_template=template)


def test_a_task_with_too_few_prompts_is_refused() -> None:
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 different prompts
    with pytest.raises(ValueError, match=r"too few .* eval_size 201 and train_size 10 .* gave 200 eval items"):
        ReasoningTask("chain_sum", one_digit, train_size=10, eval_size=201)
    task = ReasoningTask("chain_sum", one_digit, train_size=400, eval_size=100)
    assert len({item.prompt for item in task.train}) <= 100
    with pytest.raises(ValueError, match="eval_size must be at least 1, got 0"):
        ReasoningTask("chain_sum", one_digit, train_size=400, eval_size=0)


@pytest.mark.parametrize(
    "name",
    [
        "chain_sum",
        "decimal_chain_sum",
        "basic_arithmetic",
        "products",
        "gcd",
        "lcm",
        "simple_equations",
        "number_format",
        "leg_counting",
    ],
)
def test_the_default_alphabet_holds_the_short_arithmetic_tasks(name: str) -> None:
    task = ReasoningTask(name, train_size=100, eval_size=10)
    texts = [text for item in task.train + task.eval for text in (item.prompt, item.answer or "")]
    check_characters(texts, build_char_tokenizer(), what=name)


def test_scores_are_those_of_the_verifier() -> None:
    responses = ["7", " 7", "+07.0", "17", "8", "", "no"]
    # chain_sum compares numbers; a longer response that holds the answer gets len(answer) / len(response).
    assert score_responses(responses, [entry("7")] * 7) == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    task = ReasoningTask("chain_sum", train_size=20, eval_size=5)
    answers = [item.answer or "" for item in task.train]
    entries = [item.entry for item in task.train]
    assert score_responses(answers, entries) == [1.0] * 20


def test_each_entry_is_scored_by_its_own_task() -> None:
    # prime_factorization accepts the factors in any order, chain_sum knows nothing of factors.
    factors = reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)[0]
    backwards = " ".join(reversed(factors["answer"].split(" ")))
    assert score_responses([backwards, "3"], [factors, entry("3")]) == [1.0, 1.0]


def test_a_response_that_a_verifier_cannot_parse_scores_zero() -> None:
    factors = reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)[0]
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.get_score_answer_fn("prime_factorization")("abc", factors)
    assert score_responses(["abc"], [factors]) == [0.0]


@pytest.mark.parametrize(("task", "response"), [("game_of_life", "[{}]"), ("boxnet", "[[1]]"), ("boxnet", "[1]")])
def test_a_response_of_another_shape_than_a_verifier_expects_scores_zero(task: str, response: str) -> None:
    asked = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    with pytest.raises((KeyError, AttributeError, TypeError), match=r"^0|has no attribute|not iterable"):
        reasoning_gym.get_score_answer_fn(task)(response, asked)
    assert score_responses([response], [asked]) == [0.0]


def test_exact_match() -> None:
    assert exact_match(["7", " 7\n", "07", "17", ""], [entry("7")] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_exact_match_of_a_task_that_names_no_answer_is_its_verifiers_full_score() -> None:
    # Three vertices in a row, two colours: the ends must be alike, whatever the colours.
    row = entry(None, "graph_color")
    row["metadata"]["puzzle"] = {"vertices": [0, 1, 2], "edges": [(0, 1), (1, 2)], "color_options": [1, 2]}
    right, other, wrong = '{"0": 1, "1": 2, "2": 1}', '{"0": 2, "1": 1, "2": 2}', '{"0": 1, "1": 2, "2": 2}'
    assert exact_match([right, other, wrong, "no"], [row] * 4) == [1.0, 1.0, 0.0, 0.0]
    # A part of the score is no match: "17" is half right for 7.
    assert exact_match(["17", "7"], [entry("7")] * 2) == [0.0, 1.0]


def raising(responses: list[str], entries: list[dict[str, Any]]) -> list[float]:
    raise KeyError("colour")


def test_a_reward_function_that_raises_is_named_and_its_error_kept() -> None:
    with pytest.raises(RewardError, match=r"reward function .*test_tasks:raising raised KeyError: 'colour'") as caught:
        checked_rewards(raising, ["a"], [entry("1")])
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # it crosses processes


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 responses"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 responses"),
        (None, "must return a list of numbers, got NoneType"),
        (1.0, "must return a list of numbers, got float"),
        (np.float64(1.0), "must return a list of numbers, got float"),
        ("ab", "must return a list of numbers, got str"),
        ({"a": 1.0, "b": 2.0}, "must return a list of numbers, got dict"),
        ([1.0, "2"], "for response 1 '2', which is not a number"),
        ([None, 1.0], "for response 0 None, which is not a number"),
        ([1.0, float("nan")], "for response 1 nan, which is not finite"),
        ([float("-inf"), 1.0], "for response 0 -inf, which is not finite"),
        (torch.ones(2, 1), r"for response 0 \[1.0\], which is not a number"),
    ],
)
def test_bad_rewards_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        checked_rewards(lambda responses, entries: returned, ["a", "b"], [entry("1")] * 2)


@pytest.mark.parametrize(
    "returned",
    [[1, 0.5], (True, 0.5), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), [torch.tensor(1.0), np.float32(0.5)]],
)
def test_good_rewards_become_floats(returned: Any) -> None:
    rewards = checked_rewards(lambda responses, entries: returned, ["a", "b"], [entry("1")] * 2)
    assert rewards == [1.0, 0.5]
    assert all(type(reward) is float for reward in rewards)


def test_reward_functions_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def length(responses, entries):\n    return [len(response) for response in responses]\n"
        "def unary(responses):\n    return []\n"
    )
    (tmp_path / "mistyped_rewards.py").write_text("def score(responses, entries:\n")
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward_function("roll.data.tasks:score_responses") is score_responses
    function = load_reward_function("my_rewards:length")
    assert checked_rewards(function, ["abc", ""], [entry("1")] * 2) == [3.0, 0.0]
    for path, message in [
        ("my_rewards", "must be 'module:function'"),
        ("my_rewards:", "must be 'module:function'"),
        (".my_rewards:length", "must be 'module:function'"),
        ("no_such_module_here:f", "cannot import module 'no_such_module_here'"),
        ("broken_rewards:f", "cannot import module 'broken_rewards': No module named 'a_module_that_is_missing'"),
        ("mistyped_rewards:score", r"cannot import module 'mistyped_rewards': .*mistyped_rewards.py, line 1"),
        ("my_rewards:lenght", "has no function 'lenght'; near names: length"),
        ("my_rewards:unary", r"must accept \(responses, entries\): too many positional arguments"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_reward_function(path)
    sys.modules.pop("my_rewards", None)
