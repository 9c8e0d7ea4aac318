"""The interface of an engine that generates responses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from roll.config import DType, EngineSettings, ModelConfig
from roll.errors import UserError
from roll.generation.records import LOG_PROBS, Request, Response, Stop
from roll.generation.weights import Bucket, Shapes, WeightUpdate, WrongWeights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ServedModel:
    """The model that an engine runs. Its weights come later, as updates."""

    folder: Path
    """Folder in Hugging Face layout, of which the engine needs config.json."""
    family: str | None
    """Name of the family, or `module:Name`; None: the one whose model_type its config.json has."""
    dtype: DType
    """Type of weights, also of those that an update brings, and of activations."""
    max_tokens: int
    """Longest row in tokens: a request and its response together."""
    pad_token_id: int
    """Token that fills up rows; masks keep it out of all results."""
    vocab_size: int
    """Tokens that the model has, numbered from 0."""


class Generator(ABC):
    """An engine on one rank, with a whole copy of the model.

    An engine of one's own has `start`, `answer` and `write`, and `free` and `allocate` if it can free memory. The rest
    is here, the same for all engines: no engine answers with weights that are not whole.

    An update that is refused before its first bucket is written leaves the weights as they were. Later buckets are
    written over the old weights, since two copies would need twice the memory: an update that fails then leaves an
    engine without weights, which says so until a whole update has come.
    """

    settings_type: ClassVar[type[EngineSettings]] = EngineSettings
    """Class of the engine's own settings."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Fields of a batch that responses have beyond tokens, such as `LOG_PROBS`."""

    def __init__(self, settings: EngineSettings, model: ServedModel) -> None:
        self.settings, self.model = settings, model
        self.version: int | None = None
        """Version of the weights; None while there are no whole ones."""
        self._newest = -1
        self._update: WeightUpdate | None = None
        self._asleep, self._lack = False, "no weights have come yet"

    @abstractmethod
    def start(self) -> None:
        """Build the model. Its weights are not read from the folder: the first update brings them."""

    @abstractmethod
    def answer(self, requests: Sequence[Request]) -> Iterator[Response]:
        """One response for each request, in any order; see `generate`."""

    @abstractmethod
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy some tensors of an update into the model; the caller's are freed afterwards."""

    def shapes(self) -> Shapes:
        """Name and shape of every tensor of an update: those of the model, under the names of its family."""
        from roll.models.family_tensors import family_shapes

        return family_shapes(ModelConfig.from_folder(self.model.folder, self.model.family), "lm")

    def free(self) -> None:
        """Free the memory of weights and caches; what `sleep` does. Raises UserError: this engine cannot."""
        raise UserError(f"engine {type(self).__name__} cannot sleep")

    def allocate(self) -> None:
        """Take the memory back, whatever it holds; what `wake` does. Needed beside `free`."""
        raise UserError(f"engine {type(self).__name__} cannot wake")

    @classmethod
    def sleeps(cls) -> bool:
        """Whether engines of this class can sleep."""
        return cls.free is not Generator.free and cls.allocate is not Generator.allocate

    def sleep(self) -> None:
        """Free memory until `wake`; the weights are gone then. Raises UserError if this engine cannot."""
        from roll.platform import get_platform

        self.free()
        get_platform().empty_cache()  # For the roles that share the device, which are other processes.
        self.version, self._asleep, self._lack = None, True, "it sleeps"

    def wake(self) -> None:
        """End the sleep, if there is one. Weights come with the next update."""
        if self._asleep:
            self.allocate()
            self._asleep, self._lack = False, "it has slept, and no weights have come since"

    def generate(self, requests: Sequence[Request]) -> Iterator[Response]:
        """Responses in order of completion, one for each request.

        Raises:
            ValueError: there are no whole weights; a request is too long for the model; the engine gave something
                other than one valid response for each request.
        """
        if self.version is None:
            raise UserError(f"engine {type(self).__name__} cannot generate: {self._lack}")
        for request in requests:
            length, limit = len(request.token_ids) + request.sampling.max_new_tokens, self.model.max_tokens
            if not request.token_ids:
                raise UserError(f"request {request.row} has no tokens to continue")
            if length > limit:
                raise UserError(f"request {request.row}: {length} tokens with its response, the limit is {limit}")
        waiting = {request.row: request for request in requests}
        for response in self.answer(requests):
            if not isinstance(response, Response):
                raise UserError(f"engine {type(self).__name__} gave a {type(response).__name__}, not a Response")
            if response.row not in waiting:
                raise UserError(f"engine {type(self).__name__}: no request waits for response {response.row}")
            self._check(response, waiting.pop(response.row))
            yield response
        if waiting:
            raise UserError(f"engine {type(self).__name__} gave no response to requests {sorted(waiting)}")

    def _check(self, response: Response, request: Request) -> None:
        where = f"engine {type(self).__name__}, response {response.row}:"
        tokens, sampling = response.token_ids, request.sampling
        if not 1 <= len(tokens) <= sampling.max_new_tokens:
            raise UserError(f"{where} {len(tokens)} tokens, of 1 to {sampling.max_new_tokens} that were asked for")
        outside = [token for token in tokens if not 0 <= token < self.model.vocab_size]
        if outside:
            raise UserError(f"{where} has token {outside[0]}, of a vocabulary of {self.model.vocab_size}")
        behind = [token for token in tokens[:-1] if token in sampling.end_token_ids]
        if behind:
            raise UserError(f"{where} goes on behind end token {behind[0]}")
        if not isinstance(response.stop, Stop):
            raise UserError(f"{where} stop must be a Stop, got {response.stop!r}")
        if (tokens[-1] in sampling.end_token_ids) != (response.stop is Stop.END):
            raise UserError(f"{where} stopped for {response.stop.value!r} at token {tokens[-1]}")
        if response.version != self.version:
            raise UserError(f"{where} made with weights of version {response.version}, not {self.version}")
        if (response.log_probs is not None) != (LOG_PROBS in self.provides):
            raise UserError(f"{where} log-probs come from an engine that provides {LOG_PROBS!r}, and from no other")
        if response.log_probs is not None and not (
            len(response.log_probs) == len(tokens) and all(map(math.isfinite, response.log_probs))
        ):
            raise UserError(f"{where} needs one finite log-prob for each of {len(tokens)} tokens")

    def take_weights(self, version: int, shapes: Shapes, buckets: Iterable[Bucket]) -> None:
        """Take an update whose buckets come from an iterator; see the class for what happens if it cannot be taken.

        Raises:
            WrongWeights: the version is not newer, or what comes is not what was declared, or not what the model has.
        """
        self.open_update(version, shapes)
        with self._cancelled_by_errors():
            for bucket in buckets:
                self.take(bucket)
        self.close_update()

    def open_update(self, version: int, shapes: Shapes) -> None:
        """Begin an update of which `shapes` declares every tensor. Raises WrongWeights; nothing is changed then."""
        if self._asleep:
            raise WrongWeights(f"weights of version {version} came to an engine that sleeps")
        if version <= self._newest:
            raise WrongWeights(f"weights of version {version} came after those of version {self._newest}")
        self._update = WeightUpdate(version, shapes, self.shapes(), self.model.dtype)

    def take(self, bucket: Bucket) -> None:
        """Write the next bucket of the update. Raises WrongWeights, and whatever the engine raises."""
        if self._update is None:
            raise WrongWeights(f"bucket {bucket.index} of version {bucket.version} belongs to no update that is open")
        with self._cancelled_by_errors():
            self._update.check(bucket)
            self.version = None
            self._lack = f"the update to version {bucket.version} did not end"
            self.write(bucket.tensors)
            self._update.taken(bucket)

    def close_update(self) -> None:
        """End the update. Raises WrongWeights if a tensor has not come."""
        update, self._update = self._update, None
        assert update is not None, "open_update comes first"
        update.check_whole()
        self.version = self._newest = update.version

    @contextmanager
    def _cancelled_by_errors(self) -> Iterator[None]:
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole:
                self._update = None
