"""An output answers a loss that is a plain function: the same under every split, once over the vocabulary, or not at
all for a head that has no such answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from roll.config import MicroBatchSettings
from roll.errors import UserError
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import HfStrategy, MegatronTrainStrategy, ModelOutput
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, make_batch, merge_stages, settings, share_of, write_tiny

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (2, {"mode": "isp", "sp": 2, "wp": 2}),
    (2, {"cp": 2, "cp_comm": "ring"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def answers_of(kind: str, data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
    """All answers of a model with this head, each asked for by itself first."""
    ids, mask = data["input_ids"], data["response_mask"]
    if kind == "value":
        return {"values": output.values(mask)}
    log_probs, entropy = output.log_probs(ids, mask), output.entropy(mask)
    both = output.log_probs_and_entropy(ids, mask)
    return {"log_probs": log_probs, "entropy": entropy, "both 0": both[0], "both 1": both[1]}


def plain_loss(data: DataProto, output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss through log-probs and entropies, every token with a weight of its own."""
    assert data.normalizers is not None
    answers = answers_of("lm", data, output)
    per_token = answers["log_probs"] * data["weights"] + answers["entropy"].square() + answers["both 0"].exp()
    tokens = data.normalizers.tokens
    return per_token.sum() / tokens, {"both": answers["both 1"].sum() / tokens}


def same_by_both_names(strategy: Any, data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
    """Whether every `op_compute_*` gives what the output answers."""
    ids, mask = data["input_ids"], data["response_mask"]
    if strategy.settings.head == "value":
        pairs = [(strategy.op_compute_values(output, mask), output.values(mask))]
    else:
        pairs = [
            (strategy.op_compute_log_probs(output, ids, mask), output.log_probs(ids, mask)),
            (strategy.op_compute_entropy(output, mask), output.entropy(mask)),
            *zip(
                strategy.op_compute_log_probs_and_entropy(output, ids, mask),
                output.log_probs_and_entropy(ids, mask),
                strict=True,
            ),
            (strategy.op_compute_logits(output), output.logits()),
            (strategy.op_compute_row_logits(output), output.row_logits()),
        ]
    assert all(answer.any() for _, answer in pairs) or not mask.any()
    same = torch.tensor([torch.equal(one, other) for one, other in pairs])
    return {"same": same.repeat(len(mask), 1)}


def train(strategy: Any, batch: DataProto) -> dict[str, Any]:
    """Results under both names, then a step of the plain loss: its metrics and gradients."""
    same = strategy.forward_step(batch, lambda data, output: same_by_both_names(strategy, data, output))
    answers = strategy.forward_step(batch, lambda data, output: answers_of("lm", data, output))
    metrics = strategy.train_step(batch, plain_loss)
    return {"same": same, "answers": answers, "metrics": metrics, "gradients": dict(strategy.gradients())}


def train_layout(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    config = settings(folder, temperature=0.7, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        outcome = train(strategy, share_of(make_batch(), state.at.dp, state.degrees.dp))
        return outcome | {"gradients": merge_stages(outcome["gradients"]), "reports": state.is_reporter}


def test_a_loss_outside_of_any_class_trains_the_same_under_every_split(ranks: RankPool, folder: Path) -> None:
    reference = HfStrategy(settings(folder, "hf", temperature=0.7))
    reference.initialize()
    expected = train(reference, make_batch())
    assert expected["same"]["same"].all()
    for world_size, layout in LAYOUTS:
        for outcome in ranks.run(train_layout, folder, layout, world_size=world_size):
            # The tolerances of fp32, as in test_against_one_process.
            assert outcome["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
            assert outcome["gradients"].keys() == expected["gradients"].keys()
            for name, gradient in expected["gradients"].items():
                error = (outcome["gradients"][name] - gradient).abs().max() / gradient.abs().max()
                assert error <= 1e-5, f"{name_of(layout)} {name}: relative error {error:.2e}"
            if outcome["reports"]:
                assert outcome["same"]["same"].all()
                assert outcome["metrics"]["both"] == pytest.approx(expected["metrics"]["both"], rel=1e-6)
                for name, answer in expected["answers"].items():
                    torch.testing.assert_close(outcome["answers"][name], answer, rtol=1e-6, atol=1e-5)


def value_results(folder: Path) -> dict[str, Tensor]:
    """Whether both names of values are the same, and the values, of a head that is not zero."""
    config = settings(folder, head="value")
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        torch.nn.init.constant_(strategy.gpt.output_layer.weight, 0.1)
        return strategy.forward_step(make_batch(), lambda data, output: same_by_both_names(strategy, data, output))


def test_values_have_two_names(ranks: RankPool, folder: Path) -> None:
    (outcome,) = ranks.run(value_results, folder, world_size=1)
    assert outcome["same"].all()


def logits_of(data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
    """Packed logits, a row of them for each row of the micro-batch, and those at their rows."""
    logits = output.logits()
    return {"packed": logits.repeat(len(data), 1, 1), "rows": output.row_logits()}


def megatron_logits(folder: Path) -> dict[str, Tensor]:
    config = settings(folder, temperature=0.7, micro_batch=MicroBatchSettings(rows=6))
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        return strategy.forward_step(make_batch(), logits_of)


def test_logits_are_those_of_the_real_tokens_row_by_row(ranks: RankPool, folder: Path) -> None:
    reference = HfStrategy(settings(folder, "hf", temperature=0.7, micro_batch=MicroBatchSettings(rows=6)))
    reference.initialize()
    (theirs,) = ranks.run(megatron_logits, folder, world_size=1)
    ours, real = reference.forward_step(make_batch(), logits_of), make_batch()["attention_mask"].bool()
    for logits in (ours, theirs):
        assert logits["packed"].shape == (6, int(real.sum()), TINY.vocab_size)
        assert torch.equal(logits["packed"][0], logits["rows"][real])
        assert not logits["rows"][~real].any()
    torch.testing.assert_close(ours["packed"], theirs["packed"], rtol=1e-6, atol=1e-5)  # fp32


ASKED: dict[str, Callable[[DataProto, ModelOutput], Any]] = {
    "log-probs": lambda data, output: output.log_probs(data["input_ids"], data["response_mask"]),
    "entropy": lambda data, output: output.entropy(data["response_mask"]),
    "values": lambda data, output: output.values(data["response_mask"]),
    "logits": lambda data, output: output.logits(),
    "logits at rows": lambda data, output: output.row_logits(),
    "both": lambda data, output: output.log_probs_and_entropy(data["input_ids"], data["response_mask"]),
}


def refusals(strategy: Any) -> dict[str, str]:
    """Messages of all questions that the head has no answer to."""
    told = {}

    def ask(data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
        for asked, question in ASKED.items():
            try:
                question(data, output)
            except UserError as error:
                told[asked] = str(error)
        return {"row": data["input_ids"]}

    strategy.forward_step(make_batch(), ask)
    return told


def megatron_refusals(folder: Path, head: str) -> dict[str, str]:
    config = settings(folder, head=head)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        return refusals(strategy)


def test_a_head_refuses_what_it_has_no_answer_to(ranks: RankPool, folder: Path) -> None:
    no_logits = "a model with head 'value' has no logits, log-probs or entropies; one with head 'lm' has"
    of_value_head = {asked: no_logits for asked in ASKED if asked != "values"}
    of_vocabulary = {"values": "a model with head 'lm' has no values; one with head 'value' has"}
    for head, expected in (("value", of_value_head), ("lm", of_vocabulary)):
        reference = HfStrategy(settings(folder, "hf", head=head))
        reference.initialize()
        assert refusals(reference) == expected
        assert ranks.run(megatron_refusals, folder, head, world_size=1) == [expected]


class Passes(TorchFunctionMode):
    """Counts passes over the vocabulary: products with the head's weight, and in the reference soft-maxes of logits."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_pass = func is torch.Tensor.log_softmax if self.weight is None else func is linear and args[1] is self.weight
        self.count += is_pass
        return func(*args, **(kwargs or {}))


SEQUENCES = {
    "log-probs": 1,
    "log-probs log-probs": 1,
    "entropy": 1,
    "entropy entropy": 1,
    "both": 1,
    "both log-probs entropy both": 1,
    "other log-probs": 2,  # Log-probs of other tokens are others.
    "other both entropy": 2,
    "log-probs entropy log-probs": 2,  # What `log_probs_and_entropy` is for.
}
OTHER: dict[str, Callable[[DataProto, ModelOutput], Any]] = {
    "other": lambda data, output: output.log_probs(data["input_ids"].flip(1), data["response_mask"])
}


def passes(strategy: Any, weight: Tensor | None) -> dict[str, int]:
    """Passes over the vocabulary that questions one after the other take, about one micro-batch that is one chunk."""
    counts = {}
    for sequence in SEQUENCES:
        counted = Passes(weight)

        def ask(
            data: DataProto, output: ModelOutput, questions: str = sequence, counted: Passes = counted
        ) -> dict[str, Tensor]:
            with counted:
                for question in questions.split(" "):
                    (ASKED | OTHER)[question](data, output)
            return {"row": data["input_ids"]}

        strategy.forward_step(make_batch(), ask)
        counts[sequence] = counted.count
    return counts


ONE_CHUNK: dict[str, Any] = {"micro_batch": MicroBatchSettings(rows=6), "token_chunk": 1024}


def megatron_passes(folder: Path) -> dict[str, int]:
    config = settings(folder, **ONE_CHUNK)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        return passes(strategy, strategy.gpt.head.weight)


def test_the_vocabulary_is_passed_over_once(ranks: RankPool, folder: Path) -> None:
    assert ranks.run(megatron_passes, folder, world_size=1) == [SEQUENCES]
    reference = HfStrategy(settings(folder, "hf", **ONE_CHUNK))
    reference.initialize()
    assert passes(reference, None) == dict.fromkeys(SEQUENCES, 1)  # It keeps the logits, and what comes of them.
