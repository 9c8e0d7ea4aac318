"""Requests and responses of an engine: token ids in, token ids out. Text is made elsewhere, where text is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LOG_PROBS = "rollout_log_probs"
"""Field of a batch, `[B, S-1]`: the log-probs that an engine sampled with. Index t speaks of token t+1."""


class Stop(StrEnum):
    """The reason why a response stopped."""

    END = "end"
    """It has an end token, its last."""
    STOP = "stop"
    """It has a stop string or sequence of the engine's own settings."""
    LENGTH = "length"
    """It has as many tokens as the request allows."""
    ABORTED = "aborted"
    """The engine was told to stop before the response was complete."""


@dataclass(frozen=True)
class Sampling:
    """The way in which tokens are chosen: from the whole distribution, without truncation."""

    max_new_tokens: int
    """Longest response in tokens, its end token included."""
    temperature: float | None
    """Temperature of sampling; None takes the likeliest token each time."""
    end_token_ids: tuple[int, ...]
    """Tokens of which each ends a response."""


@dataclass(frozen=True)
class Request:
    """One response that is wanted."""

    row: int
    """Number by which the response names its request; each once in a call."""
    token_ids: tuple[int, ...]
    """Tokens to continue, without padding."""
    sampling: Sampling
    seed: int
    """Seed of this response. An engine that draws for a whole batch at once says what it uses the seeds for."""


@dataclass(frozen=True)
class Response:
    """Tokens that continue a request's.

    >>> Response(row=0, token_ids=(17, 4, 2), log_probs=(-0.1, -1.2, -0.3), stop=Stop.END, version=3)
    """

    row: int
    token_ids: tuple[int, ...]
    """New tokens only, with the end token if there is one; at least one."""
    log_probs: tuple[float, ...] | None
    """Log-prob of each token under the distribution it was drawn from: at the temperature of sampling, and at 1 where
    the likeliest token was taken. None from an engine that does not provide `LOG_PROBS`."""
    stop: Stop
    version: int
    """Version of the weights that made it."""
    text: str = ""
    """The tokens without the end token, as text. Engines leave it empty: environments are given it."""
