"""Sizes of the steps of reinforcement learning, which every algorithm has."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from roll.config.settings import Settings


class LoopSettings(Settings):
    """A step: sample a batch of responses, score them, make several passes of updates over them."""

    steps: PositiveInt
    """Steps of the run: batches that are sampled and learned from."""
    prompts_per_step: PositiveInt
    """Prompts of one step."""
    responses_per_prompt: PositiveInt = 1
    """Responses sampled for each prompt; a step has prompts_per_step * responses_per_prompt rows."""
    mini_batch_size: PositiveInt
    """Rows of one optimizer step, over all data-parallel ranks."""
    epochs: PositiveInt = 1
    """Passes over the rows of a step."""
    eval_every: PositiveInt = 10
    """Steps between evaluations on held-out prompts; the start and the end are always evaluated."""
    sample_every: PositiveInt = 1
    """Steps between those whose completions are written down."""
    samples_per_step: NonNegativeInt = 4
    """Completions written down in such a step."""

    @property
    def rows_per_step(self) -> int:
        """Responses of one step."""
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def rows_text(self) -> str:
        """The same in the words of a check."""
        prompts, each = self.prompts_per_step, self.responses_per_prompt
        return f"prompts_per_step {prompts} x responses_per_prompt {each} = {self.rows_per_step} rows"
