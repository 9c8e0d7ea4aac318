"""A type checker follows a call across the wire: what mypy says of short programs, right ones and wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.isolation import ROOT

PROGRAM = '''
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll.algorithms import LossTerm
from roll.pipelines.roles import Roles
from roll.protocol import DataProto
from roll.strategies import Metrics
from roll.workers import Dispatch, Placement, Role, Worker, as_batch, register
from roll.workers.model_roles import Actor, ActorWorker


class EchoWorker(Worker):
    @register(Dispatch.RANK_ZERO)
    async def first(self, text: str, *, times: int = 1) -> str:
        return text * times

    @register(Dispatch.ONE_TO_ALL)
    async def each(self, text: str) -> list[str]:
        reveal_type(self.rows)  # rank of its own
        return [text, await self.first(text)]

    @register(Dispatch.ALL_TO_ALL)
    def add(self, left: int, right: int) -> int:
        return left + right

    @register(Dispatch.STAGE_LEADERS)
    def stages(self) -> int:
        return self.rank

    @register(Dispatch.DP_MP_COMPUTE, returns_batch=True)
    def rows(self, data: DataProto) -> DataProto | None:
        return data

    @register(Dispatch.DP_MP_COMPUTE)
    def lengths(self, data: DataProto) -> int:
        return len(data)


class LouderWorker(EchoWorker):
    def lengths(self, data: DataProto) -> int:
        return 2 * super().lengths(data)


class Louder(Role, LouderWorker):
    """All ranks."""


def drive(roles: Roles, echo: Louder, worker: ActorWorker, batch: DataProto, terms: Sequence[LossTerm]) -> None:
    reveal_type(roles.actor.train)  # a method
    reveal_type(roles.actor.train(batch, terms))  # list
    reveal_type(roles.actor.train.submit(batch, terms).result())  # list
    assert roles.critic is not None
    reveal_type(roles.critic.compute_values(batch))  # rows
    reveal_type(roles.critic.compute_values.submit_remote(batch).result())  # remote
    reveal_type(echo.first("a", times=2))  # str
    reveal_type(echo.each("a"))  # list of lists
    reveal_type(echo.add([1], [2]))  # ints
    reveal_type(echo.stages())  # ints
    reveal_type(echo.rows(as_batch(echo.rows.submit_remote(batch).result())))  # rows
    reveal_type(worker.train)  # rank
    roles.actor.save_hf(Path("model"))


def refused(roles: Roles, echo: Louder, batch: DataProto, terms: Sequence[LossTerm], placement: Placement) -> None:
    roles.actor.train(batch)  # missing
    roles.actor.train(terms, batch)  # swapped
    roles.actor.trian(batch, terms)  # misspelt
    metrics: Metrics = roles.actor.train(batch, terms)  # not one
    roles.rollout.generate(batch, seed=1).scores  # not an attribute
    roles.rollout.generate.submit(batch, seed=1).union(batch)  # not waited for
    roles.rollout.generate(batch, sead=3, seed=1)  # unknown keyword
    roles.actor.train.submit_remote(batch, terms)  # no rows
    echo.rows(echo.rows.submit_remote(batch).result())  # remote rows
    echo.first(3)  # wrong type
    len(roles.reference.compute_log_probs(batch))  # maybe none
    Actor(role="actor", placement=placement)  # no degrees


class WrongWorker(Worker):
    @register(Dispatch.DP_MP_COMPUTE, returns_batch=True)  # promised rows
    def lengths(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.ONE_TO_ALL, fields=["x"])  # splits nothing
    def alone(self) -> None: ...
'''

SETTINGS = f"""
[mypy]
strict = True
mypy_path = {ROOT}
follow_imports = skip
error_summary = False
[mypy-roll.*]
follow_imports = silent
"""
"""Other packages are left alone, torch above all: what they are does not matter here, and reading them takes half a
minute."""

BATCH, REMOTE = "roll.protocol.data_proto.DataProto", "roll.protocol.future.DataProtoFuture"
METRICS = "dict[str, float]"
TERMS = "typing.Sequence[roll.algorithms.loss_term.LossTerm]"
REVEALED = {
    "rank of its own": f"def (data: {BATCH}) -> {BATCH} | None",
    "a method": f"roll.workers.method.RemoteMethod[[batch: {BATCH}, terms: {TERMS}], list[{METRICS}]]",
    "list": f"list[{METRICS}]",
    "rows": BATCH,
    "remote": REMOTE,
    "str": "str",
    "list of lists": "list[list[str]]",
    "ints": "list[int]",
    "rank": f"def (batch: {BATCH}, terms: {TERMS}) -> {METRICS}",
}
REFUSED = {
    "missing": 'Missing positional argument "terms"',
    "swapped": 'incompatible type "DataProto"; expected "Sequence[LossTerm]"',
    "misspelt": '"Actor" has no attribute "trian"',
    "not one": 'expression has type "list[dict[str, float]]", variable has type "dict[str, float]"',
    "not an attribute": '"DataProto" has no attribute "scores"',
    "not waited for": '"PendingCall[DataProto]" has no attribute "union"',
    "unknown keyword": 'Unexpected keyword argument "sead"',
    "no rows": 'Invalid self argument "RemoteMethod[[DataProto, Sequence[LossTerm]], list[dict[str, float]]]"',
    "remote rows": 'incompatible type "DataProtoFuture"; expected "DataProto"',
    "wrong type": 'incompatible type "int"; expected "str"',
    "maybe none": 'Item "None" of "Reference | None" has no attribute "compute_log_probs"',
    "no degrees": 'Missing named argument "degrees"',
    "promised rows": 'incompatible type "Callable[[WrongWorker, DataProto], int]"',
    "splits nothing": 'No overload variant of "register" matches',
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """What mypy --strict says of each line of the program that has a comment, by the comment."""
    folder = tmp_path_factory.mktemp("types")
    program, settings = folder / "program.py", folder / "mypy.ini"
    program.write_text(PROGRAM)
    settings.write_text(SETTINGS)
    # In a process of its own: mypy raises the recursion limit of its process, beyond what the stack has room for.
    options = [f"--config-file={settings}", f"--cache-dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not outcome.stderr, outcome.stderr
    found: dict[str, list[tuple[str, str]]] = {}
    lines = PROGRAM.splitlines()
    for line in outcome.stdout.splitlines():
        match = re.fullmatch(r".*program\.py:(\d+): (\w+): (.*)", line)
        assert match is not None, line
        name = lines[int(match[1]) - 1].partition("  # ")[2]
        found.setdefault(name, []).append((match[2], match[3]))
    return found


def test_both_sides_have_their_types(said: dict[str, list[tuple[str, str]]]) -> None:
    revealed = {name: set(messages) for name, messages in said.items() if name in REVEALED}
    assert revealed == {name: {("note", f'Revealed type is "{text}"')} for name, text in REVEALED.items()}


def test_wrong_calls_are_refused(said: dict[str, list[tuple[str, str]]]) -> None:
    errors = {name: [text for kind, text in messages if kind == "error"] for name, messages in said.items()}
    errors = {name: texts for name, texts in errors.items() if texts}
    assert errors.keys() == REFUSED.keys()
    assert {name: texts for name, texts in errors.items() if not any(REFUSED[name] in text for text in texts)} == {}
