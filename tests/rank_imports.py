"""Modules that the pool imports once, before it forks its ranks.

None of them may start a thread when it is imported, since a fork has none of the threads.
"""

from __future__ import annotations

import gc

import megatron.core.optimizer  # noqa: F401
import torch.distributed  # noqa: F401
import transformers  # noqa: F401

import roll.models.transformers_model
import roll.strategies.megatron_train  # noqa: F401

gc.freeze()  # Ranks skip these objects when they collect garbage, so their memory stays shared.
