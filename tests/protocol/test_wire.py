"""The layout of flat bytes, and that values survive it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.protocol.wire import flatten, specs_of, total_bytes, unflatten

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Up to six tensors of any bits: of any dtype, up to three dimensions, some of them empty, transposed or sliced."""
    made = {}
    for number in range(draw(st.integers(0, 6))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 4), max_size=3))
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), dtype=torch.uint8)
        values = (data % 2).bool() if dtype is torch.bool else data.view(dtype)
        made[f"t{number}"] = values.view(shape)
        if shape and draw(st.booleans()):
            made[f"t{number}"] = made[f"t{number}"].mT if len(shape) > 1 else made[f"t{number}"][::2]
    return made


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


@given(tensors())
def test_every_bit_arrives(values: dict[str, torch.Tensor]) -> None:
    specs = specs_of(values)
    flat = torch.full((total_bytes(specs),), 77, dtype=torch.uint8)
    flatten(values, specs, flat)
    arrived = unflatten(flat, specs)
    assert list(arrived) == list(values)
    for name, tensor in values.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(arrived[name]) == bits(tensor)


def test_one_run_of_bytes_for_each_dtype_the_widest_first() -> None:
    values = {
        "mask": torch.tensor([True, False, True]),
        "ids": torch.tensor([[1], [2]]),
        "flags": torch.tensor([False]),
        "more_ids": torch.tensor([3]),
    }
    specs = specs_of(values)
    flat = torch.zeros(total_bytes(specs), dtype=torch.uint8)
    flatten(values, specs, flat)
    assert flat[:24].view(torch.int64).tolist() == [1, 2, 3] and flat[24:].tolist() == [1, 0, 1, 0]
    assert [str(spec) for spec in specs[:2]] == ["mask bool[3]", "ids int64[2, 1]"]


def test_gradients_do_not_travel() -> None:
    values = {"w": torch.ones(2, requires_grad=True)}
    flat = torch.zeros(8, dtype=torch.uint8)
    flatten(values, specs_of(values), flat)
    assert not unflatten(flat, specs_of(values))["w"].requires_grad


def test_memory_of_another_size_is_refused() -> None:
    values = {"x": torch.ones(3)}
    with pytest.raises(RuntimeError, match="size"):
        flatten(values, specs_of(values), torch.zeros(9, dtype=torch.uint8))
