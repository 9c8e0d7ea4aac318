"""An algorithm that reads what nothing makes is refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from roll.algorithms import Algorithm, AlgorithmSettings, Credit, LossTerm, policy_term
from roll.config import ConfigError, ReferenceSettings
from roll.pipelines.data_flow import check_data_flow, fields_of
from roll.pipelines.prompt_data import load_prompt_data
from tests.outside.table import Table
from tests.pipelines.grpo_run import grpo_config


class Plain(Algorithm):
    """Reads and makes what a subclass says."""

    settings: AlgorithmSettings
    reads = frozenset({"scores", "response_mask", "group", "entry", "prompt", "response"})
    makes = frozenset({"advantages"})
    loss_of = "actor"

    def credit(self, batch: Any) -> Credit:
        raise AssertionError("nothing is started")

    def losses(self) -> dict[str, list[LossTerm]]:
        return {self.loss_of: [policy_term(0.2, 0.2, per=1.0)]}


class ReadsValues(Plain):
    reads = frozenset({"scores", "values"})


class ReadsReference(Plain):
    def losses(self) -> dict[str, list[LossTerm]]:
        term = LossTerm(function=print, reads=frozenset({"ref_log_probs", "advantages", "taste"}))  # type: ignore[arg-type]
        return {"actor": [term]}


class ReadsTheEnginesLogProbs(Plain):
    reads = frozenset({"rollout_log_probs"})


class MakesNothing(Plain):
    makes = frozenset()


class NeedsATeacher(Plain):
    roles = frozenset({"actor", "teacher"})


class TrainsTheCritic(Plain):
    loss_of = "critic"


class NeedsTheCritic(Plain):
    roles = frozenset({"actor", "critic"})


class ReadsText(Plain):
    def losses(self) -> dict[str, list[LossTerm]]:
        return {"actor": [LossTerm(function=print, reads=frozenset({"entry", "scores"}))]}  # type: ignore[arg-type]


class HasNoTerms(Plain):
    def losses(self) -> dict[str, list[LossTerm]]:
        return {"actor": []}


class TrainsNothing(Plain):
    def losses(self) -> dict[str, list[LossTerm]]:
        return {}


class MakesAMask(Plain):
    makes = frozenset({"advantages", "response_mask"})


class FrozenCriticSettings(AlgorithmSettings):
    critic: ReferenceSettings = ReferenceSettings()


class TrainsAFrozenCritic(TrainsTheCritic):
    settings: FrozenCriticSettings
    roles = frozenset({"actor", "critic"})


class NamesNoActor(Plain):
    roles = frozenset({"reference"})


@pytest.mark.parametrize(
    ("algorithm", "lines"),
    [
        (ReadsValues, ["credit reads 'values', which the role critic makes, and {name} does not name this role"]),
        (
            ReadsReference,
            [
                "loss of actor reads 'ref_log_probs', which the role reference makes, "
                "and {name} does not name this role",
                "loss of actor reads 'taste', which neither a role nor its credit makes",
            ],
        ),
        (
            ReadsTheEnginesLogProbs,
            ["credit reads 'rollout_log_probs', which rollout.engine 'tests.outside.table:Table' does not provide"],
        ),
        (ReadsText, ["loss of actor reads 'entry', which is no tensor; a loss is sent tensors only"]),
        (HasNoTerms, ["loss of actor has no terms"]),
        (TrainsNothing, ["losses train no role"]),
        (MakesAMask, ["credit makes 'response_mask', which the role rollout makes"]),
        (MakesNothing, ["loss of actor reads 'advantages', which neither a role nor its credit makes"]),
    ],
)
def test_a_field_that_nobody_makes_is_refused(algorithm: type[Plain], lines: list[str]) -> None:
    name = f"{__name__}:{algorithm.__name__}"
    engine = "rollout.engine={name: 'tests.outside.table:Table', answers: [[2]]}"
    config = grpo_config(f"algorithm={{name: '{name}'}}", engine)
    with pytest.raises(ConfigError) as refused:
        load_prompt_data(config)
    assert str(refused.value).splitlines() == [f"algorithm.name: {name}'s {line.format(name=name)}" for line in lines]


def test_roles_that_a_run_does_not_have_are_refused() -> None:
    name = f"algorithm={{name: '{__name__}:NeedsATeacher'}}"
    with pytest.raises(ConfigError, match=r"needs a role 'teacher'; a run has actor, critic, reference$"):
        check_data_flow(grpo_config(name))
    with pytest.raises(ConfigError, match="trains 'critic', which is not a trained role that it needs"):
        check_data_flow(grpo_config(f"algorithm={{name: '{__name__}:TrainsTheCritic'}}"))
    with pytest.raises(ConfigError, match="trains 'critic', whose settings have no optimizer"):
        check_data_flow(grpo_config(f"algorithm={{name: '{__name__}:TrainsAFrozenCritic'}}"))
    with pytest.raises(ConfigError, match=r"^algorithm\.critic: .*NeedsTheCritic needs this role, and has no section"):
        grpo_config(f"algorithm={{name: '{__name__}:NeedsTheCritic'}}")


class ReadsAList(Plain):
    reads = ("scores",)  # type: ignore[assignment]


class GivesATerm(Plain):
    def losses(self) -> Any:
        return {"actor": policy_term(0.2, 0.2, per=1.0)}


class ProvidesAString(Table):
    provides = "rollout_log_probs"  # type: ignore[assignment]


class HasADictForSettings(Table):
    settings_type = dict  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm={{name: '{}:ReadsAList'}}", r"ReadsAList': reads must be a set of names, got \('scores',\)"),
        ("algorithm={{name: '{}:GivesATerm'}}", "GivesATerm's losses must give a list of LossTerm for each role"),
        (
            "rollout.engine={{name: '{}:ProvidesAString', answers: [[2]]}}",
            "ProvidesAString': provides must be a set of names, got 'rollout_log_probs'",
        ),
        (
            "rollout.engine={{name: '{}:HasADictForSettings'}}",
            "HasADictForSettings': settings_type must be a class of EngineSettings, got <class 'dict'>",
        ),
    ],
)
def test_a_declaration_of_another_kind_is_told(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_data_flow(grpo_config(override.format(__name__)))


class ProvidesWhatNoResponseHas(Table):
    provides = frozenset({"routed_experts"})


def test_an_engine_that_provides_what_no_response_has_is_refused() -> None:
    engine = f"rollout.engine={{name: '{__name__}:ProvidesWhatNoResponseHas', answers: [[2]]}}"
    message = r"^rollout\.engine\.name: .* provides 'routed_experts'; a response has rollout_log_probs$"
    with pytest.raises(ConfigError, match=message):
        check_data_flow(grpo_config(engine))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.kl_coef=0"],
        [f"algorithm={{name: '{__name__}:Plain'}}"],
        [f"algorithm={{name: '{__name__}:ReadsTheEnginesLogProbs'}}"],
    ],
)
def test_what_is_made_is_accepted(overrides: list[str]) -> None:
    check_data_flow(grpo_config(*overrides))


def test_the_actor_is_started_without_being_named() -> None:
    assert grpo_config(f"algorithm={{name: '{__name__}:NamesNoActor'}}").model_roles == ("actor", "reference")


def test_the_fields_of_a_loss_are_those_of_its_terms() -> None:
    terms = [policy_term(0.2, 0.2, per=1.0), LossTerm(function=print, reads=frozenset({"returns"}))]  # type: ignore[arg-type]
    assert fields_of(terms) == ["advantages", "attention_mask", "input_ids", "log_probs", "response_mask", "returns"]
