"""Steps between a micro-batch and the model: flattening or unpacking, then the split over the sequence ranks.

A length that does not divide into sp equal parts is refused, not padded: P = micro_bsz * seq_len is the user's own
setting, and a multiple of sp is near.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from roll.config import Mode
from roll.data.loading import Data, ProcessFunc
from roll.data.packing import check_divides
from roll.data.packs import IGNORED, PAD_ID, check_sizes
from roll.errors import UserError


def data_process(
    *,
    use_packed_dataset: bool = True,
    micro_bsz: int,
    seq_len: int,
    mode: Mode = "mtp",
    sp_rank: int = 0,
    sp_size: int = 1,
) -> tuple[ProcessFunc, ...]:
    """The steps that a micro-batch goes through, for `load_accum_batch`.

    Packed data are flattened, others unpacked; only mode isp splits the sequence here, over its `sp_size` ranks (msp
    and fsp split behind the embedding).

    Raises:
        ValueError: there is no such mode, a size is below 1, the sequence does not divide, or `sp_rank` is none of the
            `sp_size` ranks.
    """
    if mode not in get_args(Mode):
        raise UserError(f"mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    check_sizes(micro_bsz, seq_len)
    _check_rank(sp_rank, sp_size)
    steps: list[ProcessFunc] = []
    if use_packed_dataset:
        steps.append(packed_data_normalizer)
    else:
        steps.append(partial(unpack_data, micro_bsz=micro_bsz, seq_len=seq_len))
    if mode == "isp" and sp_size > 1:
        check_divides(micro_bsz * seq_len if use_packed_dataset else seq_len, sp_size)
        steps.append(partial(split_data_sequence_parallel, sp_rank=sp_rank, sp_size=sp_size))
    return tuple(steps)


def packed_data_normalizer(data: Data, labels: Tensor) -> tuple[Data, Tensor]:
    """Packed data of one micro-batch: `cu_seqlens` `[segments + 1]` and `indexes` `[P]` without their first dimension,
    and `max_seqlen`, the length of the longest segment (padding too), as an int. `input_ids` and labels stay `[1, P]`.

    Raises ValueError for more than one pack.
    """
    _check_single(data)
    cu_seqlens = data["cu_seqlens"][0]
    flat = {"cu_seqlens": cu_seqlens, "indexes": data["indexes"][0], "max_seqlen": int(cu_seqlens.diff().max())}
    return {**data, **flat}, labels


def unpack_data(data: Data, labels: Tensor, *, micro_bsz: int, seq_len: int) -> tuple[Data, Tensor]:
    """One pack of `build_unpack` as rows: `input_ids` and labels `[micro_bsz, seq_len]`, filled with 0 and -100.

    `cu_seqlens` and `indexes` are gone: token t of a row is at position t, or, behind a split of the sequence,
    `sp_rank * seq_len / sp_size + t`. A group of fewer samples leaves its last rows empty.

    The last segment is padding unless `micro_bsz` segments of `seq_len` fill the pack: samples that do not are shorter
    than P together. (`micro_bsz - 1` such samples and `seq_len` of padding look the same, and so do their rows.)

    Raises ValueError for more than one pack, and for one that `build_unpack` did not make.
    """
    _check_single(data)
    bounds: list[int] = data["cu_seqlens"][0].tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if lengths != [seq_len] * micro_bsz:
        padding = bounds[-2]
        if bounds[-1] != micro_bsz * seq_len or bool((labels[0, padding:] != IGNORED).any()):
            raise UserError(f"no pack of build_unpack, micro_bsz={micro_bsz}, seq_len={seq_len}: cu_seqlens {bounds}")
        lengths.pop()
    if len(lengths) > micro_bsz or max(lengths, default=0) > seq_len:
        raise UserError(f"segments of {lengths} tokens do not fit into micro_bsz={micro_bsz} rows of {seq_len}")
    ids = data["input_ids"].new_full((micro_bsz, seq_len), PAD_ID)
    rows = labels.new_full((micro_bsz, seq_len), IGNORED)
    for row, (start, length) in enumerate(zip(bounds, lengths, strict=False)):
        ids[row, :length] = data["input_ids"][0, start : start + length]
        rows[row, :length] = labels[0, start : start + length]
    kept = {name: value for name, value in data.items() if name not in ("cu_seqlens", "indexes")}
    return {**kept, "input_ids": ids}, rows


def split_data_sequence_parallel(data: Data, labels: Tensor, *, sp_rank: int, sp_size: int) -> tuple[Data, Tensor]:
    """This rank's equal part of the sequence: of `input_ids` and labels `[rows, S]` and, where there are any, of
    `indexes` `[S]`. `cu_seqlens` and `max_seqlen` stay those of the whole: attention sees all of it.

    Raises ValueError if the sequence does not divide into `sp_size` parts.
    """
    _check_rank(sp_rank, sp_size)
    check_divides(labels.shape[-1], sp_size)

    def part(whole: Tensor) -> Tensor:
        return torch.chunk(whole, sp_size, dim=-1)[sp_rank].contiguous()

    split: Data = {name: part(data[name]) for name in ("input_ids", "indexes") if name in data}
    return {**data, **split}, part(labels)


def _check_rank(sp_rank: int, sp_size: int) -> None:
    if not 0 <= sp_rank < sp_size:
        raise UserError(f"sp_rank={sp_rank} is not one of sp_size={sp_size} ranks")


def _check_single(data: Data) -> None:
    if len(data["input_ids"]) != 1:
        raise UserError(f"expected one micro-batch of shape [1, P], got {list(data['input_ids'].shape)}")
