"""Tasks of reasoning-gym as prompts, and the functions that reward answers to them.

A reward function is `function(responses: list[str], entries: list[dict]) -> list[float]`: one reward per response,
where the entry is the reasoning-gym entry (`question`, `answer`, `metadata`) the response answers.

An entry of `chain_sum` with two terms, and the two prompts one would make of it:

    {"question": "State the final answer to the following arithmetic problem: 12 + 45 =",
     "answer": "57",
     "metadata": {"source_dataset": "chain_sum", "source_index": 0, "num_terms": 2, "num_digits": 2,
                  "expression": "12 + 45", "difficulty": {...}}}

    prompt_template "{question}"      State the final answer to the following arithmetic problem: 12 + 45 =
    prompt_template "{expression} ="  12 + 45 =
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from roll.config import ConfigError, Problem, TaskSettings
from roll.errors import UserError
from roll.named import load_named

Entry = dict[str, Any]
RewardFunction = Callable[[list[str], list[Entry]], list[float]]

# How often the wanted number of entries is drawn before a task counts as too small for its split.
MAX_DRAWS = 20


@dataclass(frozen=True)
class TaskItem:
    """One prompt, the entry it was made from and the entry's own answer.

    `answer` is None for the few tasks of reasoning-gym that accept many answers and name none (e.g. graph_color).
    """

    prompt: str
    answer: str | None
    entry: Entry


class ReasoningTask:
    """A task of reasoning-gym, split into `train` and `eval` items, no prompt of `eval` occurring in `train`.

    Entries keep the generator's own distribution: `eval` is the first `eval_size` distinct prompts drawn, `train` the
    next `train_size` draws whose prompt is not in `eval` (a prompt may occur several times in `train`). The same
    arguments give the same items. Different seeds give unrelated items, which reasoning-gym's own seeds do not: there,
    entry i of seed s is entry i - 1 of seed s + 1.

    `prompt_template` may use `{question}` and every key of the entries' metadata, e.g. `"{expression} ="`.

    Raises ValueError for an unknown task, bad params, an unknown template field, or a task with too few prompts.

    Example: `ReasoningTask("chain_sum", {"min_terms": 2, "max_terms": 2}, train_size=100, eval_size=10)`.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        *,
        train_size: int,
        eval_size: int,
        seed: int = 0,
        prompt_template: str = "{question}",
    ) -> None:
        for setting, size in (("train_size", train_size), ("eval_size", eval_size)):
            if size < 1:
                raise UserError(f"{setting} must be at least 1, got {size}")
        self.name = name
        self.params = dict(params or {})
        self.seed = seed
        self.prompt_template = prompt_template
        _check_params(name, self.params)
        self._fields = _template_fields(prompt_template)
        self.train, self.eval = self._split(train_size, eval_size)

    @classmethod
    def of(cls, settings: TaskSettings, section: str = "task") -> ReasoningTask:
        """The task that the settings ask for. Raises ConfigError, which names their section."""
        try:
            return cls(
                settings.name,
                settings.params,
                train_size=settings.train_size,
                eval_size=settings.eval_size,
                seed=settings.seed,
                prompt_template=settings.prompt,
            )
        except ValueError as error:
            raise ConfigError([Problem(section, str(error))]) from error

    def _split(self, train_size: int, eval_size: int) -> tuple[tuple[TaskItem, ...], tuple[TaskItem, ...]]:
        held_out: dict[str, TaskItem] = {}
        train: list[TaskItem] = []
        for item in self._draw(train_size + eval_size):
            if item.prompt in held_out:
                continue
            if len(held_out) < eval_size:
                held_out[item.prompt] = item
            else:
                train.append(item)
            if len(train) == train_size:
                return tuple(train), tuple(held_out.values())
        raise UserError(
            f"task {self.name} with params {self.params} has too few different prompts: eval_size {eval_size} and "
            f"train_size {train_size} were asked for, {MAX_DRAWS * (train_size + eval_size)} draws gave "
            f"{len(held_out)} eval items and then {len(train)} train items with other prompts"
        )

    def _draw(self, size: int) -> Iterator[TaskItem]:
        """`MAX_DRAWS` datasets of `size` entries, one after the other, each with a seed of its own."""
        for chunk in range(MAX_DRAWS):
            seed = random.Random(f"{self.seed}/{chunk}").getrandbits(31)
            for entry in _entries(self.name, self.params, size=size, seed=seed):
                yield TaskItem(prompt=self._prompt(entry), answer=entry["answer"], entry=entry)

    def _prompt(self, entry: Entry) -> str:
        values = {**entry["metadata"], "question": entry["question"]}
        unknown = sorted(self._fields - values.keys())
        if unknown:
            raise UserError(
                f"prompt template {self.prompt_template!r} uses {', '.join(unknown)}, "
                f"entries of {self.name} have {', '.join(sorted(values))}"
            )
        return self.prompt_template.format(**values)


def _check_params(name: str, params: Mapping[str, Any]) -> None:
    # Imported where it is used: it takes a second, which ranks of a model do without.
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        all_tasks = f"known: {', '.join(sorted(DATASETS))}"
        raise UserError(f"unknown task {name!r}; " + (f"near names: {', '.join(near)}" if near else all_tasks))
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for param in params:
        if param in ("seed", "size"):
            raise UserError(f"params of task {name} may not set {param!r}: it follows from the task's own settings")
        if param not in known:
            near = difflib.get_close_matches(param, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"unknown param {param!r} of task {name}; {hint}known: {', '.join(sorted(known))}")


def _entries(name: str, params: Mapping[str, Any], *, size: int, seed: int) -> Iterator[Entry]:
    import reasoning_gym

    try:
        yield from reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as error:  # how reasoning-gym refuses values, some while drawing
        raise UserError(f"task {name} refuses params {dict(params)}: {error}") from error


def _template_fields(template: str) -> set[str]:
    """The field names of a template. Raises ValueError for a malformed template or one without a field."""
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise UserError(f"prompt template {template!r} is malformed: {error}") from error
    if not parts:
        raise UserError(f"prompt template {template!r} has no field: every prompt would be the same")
    fields = set()
    for _, field, spec, conversion in parts:
        if field is None or not field.isidentifier() or spec or conversion:
            raise UserError(f"prompt template {template!r}: a field is a plain name in braces, such as {{question}}")
        fields.add(field)
    return fields


def score_responses(responses: list[str], entries: list[Entry]) -> list[float]:
    """The score of reasoning-gym's own verifier for each response, in [0, 1]. The default reward function.

    The verifier decides what counts: that of chain_sum compares numbers (`"+07.0"` scores 1 for the answer `"7"`) and
    gives part of the score to a longer response that contains the answer (`"17"` scores 0.5). A response that a
    verifier cannot parse scores 0, as a wrong answer does.
    """
    return [_score(response, entry) for response, entry in zip(responses, entries, strict=True)]


def _score(response: str, entry: Entry) -> float:
    verifier = _verifier(entry["metadata"]["source_dataset"])
    try:
        return float(verifier(response, entry))
    # Third-party verifiers parse what a model wrote, and few guard it: that of prime_factorization calls int() on the
    # response, that of game_of_life looks for keys in it, that of boxnet takes its parts for dicts.
    except (ValueError, ArithmeticError, SyntaxError, LookupError, AttributeError, TypeError):
        return 0.0


@functools.cache
def _verifier(name: str) -> Callable[[str, Entry], float]:
    import reasoning_gym

    verifier: Callable[[str, Entry], float] = reasoning_gym.get_score_answer_fn(name)
    return verifier


def exact_match(responses: list[str], entries: list[Entry]) -> list[float]:
    """1.0 where a response, without the white space around it, is the entry's answer character by character, else 0.0.

    Where a task names no answer because many are right, its verifier alone knows them: then its full score is a match.
    """
    return [float(_is_exact(response, entry)) for response, entry in zip(responses, entries, strict=True)]


def _is_exact(response: str, entry: Entry) -> bool:
    if entry["answer"] is None:
        return _score(response, entry) >= 1.0
    return bool(response.strip() == entry["answer"].strip())


class RewardError(UserError):
    """A reward function raised, or did not return one finite number per response."""


def load_reward_function(path: str) -> RewardFunction:
    """Import a reward function given as `"module:function"`.

    Raises ValueError when there is no such module or function, the module cannot be imported, or the function cannot
    take (responses, entries).
    """
    function: RewardFunction = load_named(path, "reward.function", "function")
    if not callable(function):
        raise UserError(f"reward.function {path!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind([], [])
    except TypeError as error:
        raise UserError(f"reward.function {path!r} must accept (responses, entries): {error}") from error
    return function


def checked_rewards(function: RewardFunction, responses: list[str], entries: list[Entry]) -> list[float]:
    """Call a reward function and check what it returns: one finite number per response.

    A list, tuple, NumPy array or tensor of numbers (or booleans) is accepted. Raises RewardError otherwise, naming the
    function; an exception of the function is its cause.
    """
    name = f"reward function {getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
    try:
        returned: Any = function(responses, entries)
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
    # The function is the user's: whatever it raises is reported under its name. SystemExit is what code of a response
    # raises that calls exit(); it would end the thread that answers the driver, and leave the driver waiting.
    except (Exception, SystemExit) as error:
        raise RewardError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, list | tuple):
        raise RewardError(f"{name} must return a list of numbers, got {type(returned).__name__}")
    if len(returned) != len(responses):
        raise RewardError(f"{name} returned {len(returned)} rewards for {len(responses)} responses")
    return [checked_reward(value, f"{name} returned for response {index}") for index, value in enumerate(returned)]


def checked_reward(value: Any, context: str) -> float:
    """The finite number that a user's code gave; `context` says which code. Raises RewardError for anything else."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy scalar or a 0-dim tensor
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{context} {value!r}, which is not a number")
    try:
        number = float(value)
    except OverflowError:  # An int or a fraction that is too large.
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{context} {number}, which is not finite")
    return number
