"""A batch as a person reads it: one line (`repr`), or a table (`describe`)."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from roll.protocol.batch_data import BatchData

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def short(value: Any) -> str:
    """The value in a message: long strings and containers, and what is nested deeply, are cut."""
    return _short.repr(value)


def describe_value(value: Any) -> str:
    """Dtype, shape and, if it is not the CPU, device of a tensor: float32[4, 3]; the type of anything else."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{_dtype(value)}{list(value.shape)}{where}"


def sizes(data: BatchData, prefix: str = "") -> str:
    """Bytes of the tensors, and of the references to the objects."""
    tensors = readable_bytes(sum(map(num_bytes, data.tensors.values())))
    objects = readable_bytes(sum(values.nbytes for values in data.non_tensor_batch.values()))
    lead = f"{prefix}, " if prefix else ""
    return f"{lead}{len(data)} rows, {tensors} in tensors, {objects} in references to objects"


def one_line(data: BatchData) -> str:
    """Names, dtypes and shapes of all fields, the bytes of the tensors, and what holds for all rows."""
    tensors = data.tensors
    parts = [f"{len(data)} rows"]
    if data.batch is None:
        parts.append("batch=None")
    else:
        parts.append(readable_bytes(sum(map(num_bytes, tensors.values()))))
        fields = ", ".join(f"{name}: {describe_value(value)}" for name, value in tensors.items())
        parts.append(f"batch={{{fields}}}")
    if data.non_tensor_batch:
        fields = ", ".join(f"{name}: object{list(a.shape)}" for name, a in data.non_tensor_batch.items())
        parts.append(f"non_tensor_batch={{{fields}}}")
    if data.meta_info:
        parts.append(f"meta_info={{{_entries(data.meta_info)}}}")
    if data.plan is not None:
        parts.append(f"plan={data.plan.dp_size} x {data.plan.num_micro_batches} micro-batches")
    if data.normalizers is not None:
        parts.append(f"normalizers={data.normalizers}")
    return f"{type(data).__name__}({', '.join(parts)})"


def table(data: BatchData) -> str:
    """One line for each field (dtype, shape, bytes, a summary of its values) and for each entry of meta_info."""
    tensors = data.tensors
    lines = [("field", "dtype", "shape", "bytes", "values")]
    for name, tensor in tensors.items():
        where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
        size = readable_bytes(num_bytes(tensor))
        lines.append((name, f"{_dtype(tensor)}{where}", str(list(tensor.shape)), size, _summary(tensor)))
    for name, values in data.non_tensor_batch.items():
        first = f"first {_short.repr(values[0])}" if len(values) else "no rows"
        lines.append((name, "object", str(list(values.shape)), "", first))
    lines += [(name, "meta_info", "", "", _short_value(value)) for name, value in data.meta_info.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    rows = ["  ".join([*map(str.ljust, line[:4], widths), line[4]]).rstrip() for line in lines]
    total = readable_bytes(sum(map(num_bytes, tensors.values())))
    return "\n".join([f"{len(data)} rows, {total} in tensors", *rows])


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's own values, also where it is a view of more."""
    return tensor.numel() * tensor.element_size()


def readable_bytes(count: int) -> str:
    """In B, kB, MB or GB (powers of 1000): 96 B, 1.5 kB, 33.6 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _summary(tensor: Tensor) -> str:
    """Range and mean of finite values, and how many are not."""
    if tensor.numel() == 0:
        return "no values"
    if tensor.is_complex():
        return ""
    values = tensor.detach().to(torch.float64)
    finite = values[values.isfinite()]
    other = values.numel() - finite.numel()
    parts = [f"{finite.min():g} .. {finite.max():g}, mean {finite.mean():g}"] if finite.numel() else []
    return ", ".join([*parts, *([f"{other} NaN or infinite"] if other else [])])


def _short_value(value: Any) -> str:
    return describe_value(value) if isinstance(value, Tensor) else _short.repr(value)


def _entries(meta: Mapping[str, Any]) -> str:
    return ", ".join(f"{name!r}: {_short_value(value)}" for name, value in meta.items())
