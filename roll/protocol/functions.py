"""The functions that ROLL and verl have beside their DataProto; each is a method of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll.errors import UserError
from roll.protocol.data_proto import DataProto, DataProtoT
from roll.protocol.equality import same_value


def pad_dataproto_to_divisor(data: DataProtoT, size_divisor: int) -> tuple[DataProtoT, int]:
    """`data.pad_to_divisor(size_divisor)`: (the padded batch, the number of rows added)."""
    return data.pad_to_divisor(size_divisor)


def unpad_dataproto(data: DataProtoT, pad_size: int) -> DataProtoT:
    """`data.unpad(pad_size)`: the batch without its last `pad_size` rows; all of it if that is 0."""
    return data.unpad(pad_size)


def collate_fn(rows: Sequence[DataProtoT]) -> DataProtoT:
    """Rows of one batch together again, for `torch.utils.data.DataLoader(data, collate_fn=collate_fn)`.

    Unlike pieces that come from different places (`DataProto.concat`), they have one `meta_info`, metrics included.

    Raises ValueError when there is no row, or rows differ in fields or meta_info.
    """
    joined = DataProto.concat(rows)
    for number, row in enumerate(rows):
        if not same_value(rows[0].meta_info, row.meta_info):
            raise UserError(f"collate_fn: meta_info of row 0 and row {number} differ, so they are not of one batch")
    return replace(joined, meta_info=rows[0].meta_info)
