"""The layout of flat bytes, and that values survive it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.protocol import wire
from roll.protocol.wire import as_runs, run_sizes, specs_of, total_bytes, unflatten

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


def sent(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The runs as a receiver has them: one after the other, of the sizes that it works out from the specs."""
    runs = as_runs(values, specs_of(values))
    assert [run.numel() for run in runs] == run_sizes(specs_of(values))
    return torch.cat([torch.empty(0, dtype=torch.uint8), *runs])


@pytest.mark.parametrize("large_bytes", [0, 20, 1 << 16])  # a run for each tensor, for some, for none
def test_every_bit_arrives(large_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE_BYTES", large_bytes)
        every_bit_arrives()


@given(tensors())
def every_bit_arrives(values: dict[str, torch.Tensor]) -> None:
    specs, flat = specs_of(values), sent(values)
    assert len(flat) == total_bytes(specs)
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
    specs, flat = specs_of(values), sent(values)
    assert flat[:24].view(torch.int64).tolist() == [1, 2, 3] and flat[24:].tolist() == [1, 0, 1, 0]
    assert [str(spec) for spec in specs[:2]] == ["mask bool[3]", "ids int64[2, 1]"]


def test_a_large_tensor_is_sent_out_of_its_own_memory_and_small_ones_in_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "LARGE_BYTES", 64)
    values = {"a": torch.zeros(2), "b": torch.ones(4), "large": torch.zeros(8, 2), "c": torch.ones(1)}
    values["turned"] = torch.rand(4, 8).T  # not contiguous
    runs = as_runs(values, specs_of(values))
    assert [run.numel() for run in runs] == [24, 64, 4, 128]
    assert runs[1].data_ptr() == values["large"].data_ptr()
    assert bits(runs[3]) == bits(values["turned"])


def test_a_conjugate_is_sent_as_what_it_stands_for() -> None:
    values = {"z": torch.tensor([1 + 2j, 3 - 1j]).conj(), "y": torch.tensor([1 + 2j]).conj().imag}
    arrived = unflatten(sent(values), specs_of(values))
    assert arrived["z"].tolist() == [1 - 2j, 3 + 1j] and arrived["y"].tolist() == [-2]


def test_gradients_do_not_travel() -> None:
    values = {"w": torch.ones(2, requires_grad=True)}
    assert not unflatten(sent(values), specs_of(values))["w"].requires_grad
