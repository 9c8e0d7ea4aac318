"""What travels between driver, workers and strategies: batches, their micro-batch plan and their normalizers.

The public names are loaded when they are first used, so that `roll.protocol.plan` does not pay for TensorDict.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.protocol.adapters import from_tensordict, from_verl, to_verl
    from roll.protocol.broadcast import broadcast_obj
    from roll.protocol.data_proto import DataProto
    from roll.protocol.delivery import BatchDelivery
    from roll.protocol.fields import check_model_batch
    from roll.protocol.functions import collate_fn, pad_dataproto_to_divisor, unpad_dataproto
    from roll.protocol.future import DataProtoFuture
    from roll.protocol.normalizers import LossNormalizers, count_loss_tokens
    from roll.protocol.plan import MicroBatchPlan
    from roll.protocol.roll_call import MissingRanks, RollCall
    from roll.protocol.row_delivery import BROADCAST, ROW_DELIVERIES, RowDelivery
    from roll.protocol.tensordict_form import to_tensordict

__all__ = [
    "BROADCAST",
    "ROW_DELIVERIES",
    "BatchDelivery",
    "DataProto",
    "DataProtoFuture",
    "LossNormalizers",
    "MicroBatchPlan",
    "MissingRanks",
    "RollCall",
    "RowDelivery",
    "broadcast_obj",
    "check_model_batch",
    "collate_fn",
    "count_loss_tokens",
    "from_tensordict",
    "from_verl",
    "pad_dataproto_to_divisor",
    "to_tensordict",
    "to_verl",
    "unpad_dataproto",
]

_MODULES = {
    "BROADCAST": "row_delivery",
    "BatchDelivery": "delivery",
    "DataProto": "data_proto",
    "DataProtoFuture": "future",
    "LossNormalizers": "normalizers",
    "MicroBatchPlan": "plan",
    "MissingRanks": "roll_call",
    "ROW_DELIVERIES": "row_delivery",
    "RollCall": "roll_call",
    "RowDelivery": "row_delivery",
    "broadcast_obj": "broadcast",
    "check_model_batch": "fields",
    "collate_fn": "functions",
    "count_loss_tokens": "normalizers",
    "from_tensordict": "adapters",
    "from_verl": "adapters",
    "pad_dataproto_to_divisor": "functions",
    "to_tensordict": "tensordict_form",
    "to_verl": "adapters",
    "unpad_dataproto": "functions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
