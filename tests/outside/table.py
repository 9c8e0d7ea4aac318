"""An engine as a user would bring one: it draws its responses from a table, whatever the weights are."""

import random
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from roll.config import EngineSettings
from roll.generation.generator import Generator
from roll.generation.records import Request, Response, Stop


class TableSettings(EngineSettings):
    answers: list[list[int]]


class Table(Generator):
    settings_type = TableSettings
    settings: TableSettings

    def start(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in tensors.items()}

    def answer(self, requests: Sequence[Request]) -> Iterator[Response]:
        assert self.version is not None
        for request in requests:
            limit, ends = request.sampling.max_new_tokens, request.sampling.end_token_ids
            tokens = tuple(random.Random(request.seed).choice(self.settings.answers))[:limit]
            stop = Stop.END if tokens[-1] in ends else Stop.LENGTH
            yield Response(request.row, tokens, log_probs=None, stop=stop, version=self.version)


NOT_AN_ENGINE = TableSettings
