"""transformers' own `generate` in this process: slow, on every device, for every family.

torch and transformers are loaded where an engine starts: settings are read without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from roll.config import EngineSettings, ModelConfig
from roll.generation.generator import Generator
from roll.generation.records import LOG_PROBS, Request, Response, Sampling, Stop

if TYPE_CHECKING:
    from torch import Tensor


class TransformersSettings(EngineSettings):
    """Settings of the engine."""

    name: str = "transformers"
    batch_size: PositiveInt | None = None
    """Rows per generate call; null: all rows of the rank at once."""


class TransformersGenerator(Generator):
    """Generates in batches, padded on the left.

    One random generator draws for all rows of a call of `generate`; its seed is that of the first request. So the same
    requests give the same responses, and what a request draws depends on the requests around it.
    """

    settings_type = TransformersSettings
    provides = frozenset({LOG_PROBS})
    settings: TransformersSettings

    def start(self) -> None:
        import torch

        from roll.models.transformers_model import build_transformers_model
        from roll.platform import get_platform

        self.config = ModelConfig.from_folder(self.model.folder, self.model.family)
        network = build_transformers_model(self.config, getattr(torch, self.model.dtype))
        self.network = network.to(get_platform().device())

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        from roll.models.transformers_model import load_tensors

        load_tensors(self.network, self.config, tensors.items())

    def free(self) -> None:
        self._sizes = {name: parameter.shape for name, parameter in self.network.named_parameters()}
        for parameter in self.network.parameters():
            parameter.data = parameter.new_empty(0)

    def allocate(self) -> None:
        for name, parameter in self.network.named_parameters():
            parameter.data = parameter.new_empty(self._sizes[name])

    def answer(self, requests: Sequence[Request]) -> Iterator[Response]:
        from roll.platform import get_platform

        if requests:
            get_platform().manual_seed(requests[0].seed)
        size = self.settings.batch_size or max(1, len(requests))
        for _, alike in groupby(requests, key=lambda request: _way(request.sampling)):
            group = list(alike)
            for start in range(0, len(group), size):
                yield from self._generate_batch(group[start : start + size])

    def _generate_batch(self, requests: list[Request]) -> list[Response]:
        """Responses to requests that differ in nothing but tokens and length."""
        import torch
        from transformers import GenerationConfig

        temperature, end_token_ids = _way(requests[0].sampling)
        longest = max(request.sampling.max_new_tokens for request in requests)
        # As wide as rows can be, so that the rounding of a row does not depend on the lengths of its neighbours.
        width = max(self.model.max_tokens - longest, *(len(request.token_ids) for request in requests))
        pads = [width - len(request.token_ids) for request in requests]
        rows = [[self.model.pad_token_id] * pad + [*one.token_ids] for pad, one in zip(pads, requests, strict=True)]
        masks = [[0] * pad + [1] * (width - pad) for pad in pads]
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature is not None:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        sampled = _SampledLogProbs(1.0 if temperature is None else temperature)
        device = self.network.device
        generated: Tensor = self.network.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            generation_config=GenerationConfig(
                max_new_tokens=longest,
                eos_token_id=list(end_token_ids),
                pad_token_id=self.model.pad_token_id,
                **sampling,
            ),
            logits_processor=[sampled],
        )[:, width:]
        log_probs = sampled.of(generated)
        return [
            self._response(request, tokens.tolist(), row.tolist())
            for request, tokens, row in zip(requests, generated, log_probs, strict=True)
        ]

    def _response(self, request: Request, tokens: list[int], log_probs: list[float]) -> Response:
        """The response in a row that goes on behind its first end token."""
        tokens = tokens[: request.sampling.max_new_tokens]
        ends = (place for place, token in enumerate(tokens) if token in request.sampling.end_token_ids)
        end = next(ends, None)
        length = len(tokens) if end is None else end + 1
        assert self.version is not None, "`generate` looks for whole weights"
        return Response(
            request.row,
            tuple(tokens[:length]),
            tuple(log_probs[:length]),
            Stop.LENGTH if end is None else Stop.END,
            self.version,
        )


def _way(sampling: Sampling) -> tuple[float | None, tuple[int, ...]]:
    return sampling.temperature, sampling.end_token_ids


class _SampledLogProbs:
    """A logits processor that keeps the log-probs of the tokens that are drawn, and the logits of one step only.

    transformers calls it before it applies the temperature, with all tokens so far: the last is the one that was drawn
    from what the call before was given.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._distribution: Tensor | None = None
        self._found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._note(input_ids[:, -1])
        self._distribution = (scores.float() / self.temperature).log_softmax(dim=-1)
        return scores

    def _note(self, drawn: Tensor) -> None:
        if self._distribution is not None:
            self._found.append(self._distribution.gather(1, drawn[:, None]))

    def of(self, generated: Tensor) -> Tensor:
        """Log-probs of `generated`, `[B, n]`, once it is complete."""
        import torch

        if len(self._found) < generated.shape[1]:
            self._note(generated[:, -1])
        return torch.cat(self._found, dim=1)[:, : generated.shape[1]]


ENGINE = TransformersGenerator
