"""What the ways to attend across a split sequence send, and what memory they leave: numbers for a person to read.

    python benchmarks/context_parallel.py [--tokens 4096] [--ranks 2 4]

Both are counted, not timed, on gloo and CPU in fp32, where a collective sends what its definition says. Bytes are those
that one rank sends in one layer's attention, beside the formulas (N tokens, P ranks, H query and K key-value heads of
size d): for a2a (P-1)/P * N/P * d * (2H + 2 max(K, P)), for the others (P-1) * N/P * d * 2K. Memory is the largest
sum of all tensors that a forward and a backward pass of a small model make beside its weights, on the fullest rank.
"""

from __future__ import annotations

import argparse
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from roll.checkpoint.hf import load_weights
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ModelConfig, ParallelSettings
from roll.data.sequence_split import SequenceSplit
from roll.models.gpt import build_model, core_attention
from roll.models.packed_sequence import PackedSequence
from roll.parallel.state import ParallelState, parallel_groups

HEAD_DIM = 16
WAYS = ("a2a", "all_gather", "ring")


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func._schema.name, dist.get_world_size()
        if name == "c10d::send":
            self.count += sum(tensor.nbytes for tensor in args[0])
        elif name in ("c10d::alltoall_base_", "c10d::_reduce_scatter_base_"):
            self.count += args[1].nbytes * (size - 1) // size
        elif name == "c10d::_allgather_base_":
            self.count += args[1].nbytes * (size - 1)
        elif name.startswith("c10d::") and name != "c10d::recv_":
            raise AssertionError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """The largest sum of the storages that are made and alive while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage() for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor) and x.untyped_storage() not in before and x.untyped_storage() not in self._seen:
                storage = x.untyped_storage()
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def layouts(ranks: int) -> list[dict[str, Any]]:
    """The ways to split a sequence over `ranks` ranks."""
    if ranks == 1:
        return [{}]
    return [{"mode": "isp", "sp": ranks}, *({"cp": ranks, "cp_comm": way} for way in WAYS)]


def sent(state: ParallelState, parallel: ParallelSettings, tokens: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Bytes that this rank sends in the forward and in the backward pass of one layer's attention."""
    packed = PackedSequence.packed(torch.tensor([0, tokens]), SequenceSplit(parallel, state.cp.rank()))
    shape = tokens // state.cp.size(), 1
    query, key, value = (torch.randn(*shape, h, HEAD_DIM, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    attention = core_attention(parallel)(None, 1, AttnMaskType.causal, "self", pg_collection=state.megatron)
    with SentBytes() as forward:
        context = attention(query, key, value, None, packed_seq_params=packed)
    with SentBytes() as backward:
        context.sum().backward()
    return forward.count, backward.count


def formula(way: str, ranks: int, tokens: int, heads: int, kv_heads: int) -> float:
    """Bytes of a forward pass."""
    part = tokens / ranks * HEAD_DIM * 4
    if way == "a2a":
        return (ranks - 1) / ranks * part * (2 * heads + 2 * max(kv_heads, ranks))
    return (ranks - 1) * part * 2 * kv_heads


def peak(state: ParallelState, parallel: ParallelSettings, tokens: int) -> int:
    """Bytes of one forward and backward pass over one sequence; of ranks, this one."""
    model = ModelConfig(
        vocab_size=64,
        hidden_size=8 * HEAD_DIM,
        intermediate_size=3 * 8 * HEAD_DIM,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=tokens,
    )
    gpt = build_model(model, parallel, state, dtype=torch.float32, head="lm")
    load_weights(gpt, tensor_source(Path(), model, init="random", head="lm", seed=0), state)
    packed = PackedSequence.packed(torch.tensor([0, tokens]), SequenceSplit(parallel, state.cp.rank()))
    ids = packed.own(torch.zeros(1, tokens, dtype=torch.long))
    with LiveBytes() as live:
        hidden = gpt(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
        log_probs, _ = gpt.head.log_probs(hidden, ids, temperature=1.0, chunk=256)
        log_probs.sum().backward()
    return live.peak


def measure(rank: int, ranks: int, rendezvous: str, tokens: int) -> None:
    """One rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    lines = []
    for layout in layouts(ranks):
        parallel = ParallelSettings(**layout)
        with parallel_groups(parallel) as state:
            name = "one process" if ranks == 1 else layout.get("cp_comm", "isp")
            if name in WAYS:
                for heads, kv_heads in ((8, 8), (8, 4), (8, 1)):
                    forward, backward = sent(state, parallel, tokens, heads, kv_heads)
                    expected = formula(name, ranks, tokens, heads, kv_heads)
                    lines.append(
                        f"  {name:<12}{heads} heads, {kv_heads} kv   sent {forward:>10,} = {forward / expected:.3f} of "
                        f"the formula, in backward {backward:>11,}"
                    )
            peaks = torch.tensor(peak(state, parallel, tokens))
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
            lines.append(f"  {name:<12}peak memory {int(peaks) / 2**20:8.1f} MiB")
    if rank == 0:
        print(f"{ranks} ranks, {tokens} tokens:", *lines, sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Each number of ranks after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    for ranks in (1, *args.ranks):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(measure, (ranks, f"{folder}/store", args.tokens), nprocs=ranks)


if __name__ == "__main__":
    main()
