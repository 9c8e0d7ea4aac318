"""Modules that every rank of the pool has when it starts: its process is a fork of one that has imported them.

None of them starts a thread when it is imported, since a fork has none of the threads.
"""

from __future__ import annotations

import gc

import megatron.core.optimizer  # noqa: F401
import torch.distributed  # noqa: F401
import transformers  # noqa: F401

import roll.models.transformers_model
import roll.strategies.megatron_train  # noqa: F401

gc.freeze()  # Ranks neither look at these objects nor copy their memory when they collect garbage.
