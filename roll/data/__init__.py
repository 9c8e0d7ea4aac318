"""From tasks and token rows to micro-batches: tokenizers, prompts, packing, the plan of a step."""
