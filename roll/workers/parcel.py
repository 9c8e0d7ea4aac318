"""A batch on its way through Ray's object store.

Pickled as it is, a tensor's values are copied into the pickle and out of it again. In a parcel they are plain arrays of
bytes, which Ray keeps beside the pickle: they are copied once into the host's shared memory, where all actors of the
host see the same pages, and once out of it, so that nobody writes into what others read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from roll.protocol import DataProto
    from roll.protocol.wire import Specs


@dataclass(frozen=True)
class Parcel:
    """The parts of a batch that has rows."""

    stub: DataProto
    num_rows: int
    specs: Specs
    values: tuple[np.ndarray, ...]
    """Of each tensor, as uint8; views of the tensors where these lie on the CPU without gaps."""
    objects: Mapping[str, np.ndarray]


def wrap(value: Any) -> Any:
    """A batch as a parcel; anything else, also a stub, as it is."""
    # An actor that never sees a batch does not load torch for this.
    module = sys.modules.get("roll.protocol.data_proto")
    if module is None or not isinstance(value, module.DataProto) or value.batch is None:
        return value
    import torch

    from roll.protocol.wire import specs_of

    tensors = value.tensors
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    values = tuple(tensor.numpy() for tensor in flat)
    return Parcel(value.stub(), len(value), specs_of(tensors), values, value.non_tensor_batch)


def unwrap(value: Any) -> Any:
    """The batch of a parcel, in memory of its own, on the CPU; anything else as it is."""
    if not isinstance(value, Parcel):
        return value
    import torch
    from tensordict import TensorDict

    tensors = {
        spec.name: torch.from_numpy(array.copy()).view(spec.dtype).view(spec.shape)
        for spec, array in zip(value.specs, value.values, strict=True)
    }
    batch = TensorDict(tensors, batch_size=[value.num_rows])
    return replace(value.stub, batch=batch, non_tensor_batch=value.objects)
