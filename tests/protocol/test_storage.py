"""A batch as bytes: exact for every dtype, without the storage around a slice, whole in a file or not there."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from roll.protocol import DataProto
from roll.protocol import storage as storage_module
from tests.protocol.batches import NORMALIZERS, PLAN, assert_same, batch_of, batches, rows_of

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("protocol", [4, 5])
def test_every_dtype_is_exact_in_any_layout(dtype: torch.dtype, protocol: int) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    whole = bits.view(dtype)
    for values in (whole, whole[1:3], whole.T, whole[:, ::2], whole[:0], whole[:, :0]):
        data = DataProto.from_dict({"x": values})
        back = pickle.loads(pickle.dumps(data, protocol))["x"]
        assert back.dtype == dtype and back.shape == values.shape
        assert torch.equal(back.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))


def test_protocol_5_hands_the_bytes_over_without_a_copy() -> None:
    data = batch_of(1000)
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(data.select(non_tensor_batch_keys=[]), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 1000 and sum(len(buffer.raw()) for buffer in buffers) == 1000 * (24 + 4)
    assert np.frombuffer(buffers[0], dtype=np.int64).ctypes.data == data["ids"].data_ptr()
    received = [bytes(buffer.raw()) for buffer in buffers]  # read-only, as in shared memory
    back = pickle.loads(pickled, buffers=received)
    assert back["ids"].tolist() == data["ids"].tolist()
    back["ids"].zero_()
    assert pickle.loads(pickled, buffers=received)["ids"].tolist() == data["ids"].tolist()


def test_a_slice_is_pickled_without_the_rows_it_leaves_out() -> None:
    part = DataProto.from_dict({"x": torch.zeros(1000, 100), "t": torch.zeros(100, 1000).T})[10:12]
    assert len(pickle.dumps(part)) < 10_000  # the whole is 800 kB


def test_gradients_stay_where_they_are() -> None:
    weight = torch.ones(2, requires_grad=True)
    back = pickle.loads(pickle.dumps(DataProto.from_dict({"x": weight * 2})))["x"]
    assert back.tolist() == [2.0, 2.0] and not back.requires_grad


def test_plan_normalizers_and_rows_without_fields_survive(tmp_path: Path) -> None:
    data = batch_of(4, plan=PLAN, normalizers=NORMALIZERS)
    data.save(tmp_path / "batch")
    for back in (pickle.loads(pickle.dumps(data)), DataProto.load(tmp_path / "batch")):
        assert rows_of(back) == [0, 1, 2, 3]
        assert (back.plan, back.normalizers) == (PLAN, NORMALIZERS)
    assert len(pickle.loads(pickle.dumps(data.select([], [])))) == 4
    assert pickle.loads(pickle.dumps(data.stub())).batch is None


@given(data=batches())
def test_load_undoes_save(tmp_path_factory: pytest.TempPathFactory, data: DataProto) -> None:
    path = tmp_path_factory.getbasetemp() / "any.batch"
    data.save(path)
    assert_same(DataProto.load(str(path)), data)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    batch_of(3).save(path)
    with pytest.raises(ValueError, match="not this one"):
        DataProto.from_dict({}, {"a": [Unpicklable()]}).save(path)
    assert rows_of(DataProto.load(path)) == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]
    with pytest.raises(FileNotFoundError):
        batch_of(1).save(tmp_path / "missing" / "batch")


def test_two_threads_may_save_to_one_path(tmp_path: Path) -> None:
    whole = [batch_of(3), batch_of(30_000)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            list(pool.map(lambda data: data.save(tmp_path / "batch"), whole))
            assert len(DataProto.load(tmp_path / "batch")) in (3, 30_000)
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


def test_other_files_and_parts_of_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    batch_of(3).save(path)
    whole = path.read_bytes()
    for length in range(len(storage_module._HEADER), len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="batch is cut off or damaged"):
            DataProto.load(path)
    for place in range(len(storage_module._HEADER), len(whole), 29):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="batch is cut off or damaged"):
            DataProto.load(path)
    path.write_bytes(whole + b"junk")
    with pytest.raises(ValueError, match="batch is cut off or damaged"):
        DataProto.load(path)
    storage_module.save([1], path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch holds a list, not a batch"):
        DataProto.load(path)
    for other in (b"", whole[:5], pickle.dumps(batch_of(3)), b"roll.DataProto 3\n" + whole[17:]):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="so it is no batch that this version can read"):
            DataProto.load(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load(tmp_path / "missing")
