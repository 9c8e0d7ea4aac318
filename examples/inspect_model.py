"""How each parallel mode splits InternLM2, and the shape of everything in a forward pass, as one rank sees it.

    python examples/inspect_model.py --mode isp --sp 2 --wp 4
    python examples/inspect_model.py --mode fsp --tp 2 --unpacked
    python examples/inspect_model.py --mode mtp --tp 2 --cp 2 --cp-comm ring
    python examples/inspect_model.py --mode mtp --tp 4 --whole-output --model path/to/a/huggingface/folder

It starts the ranks by itself, on CPU. Lay InternEvo's document on its data flow beside what it prints.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
from pathlib import Path

import torch
from pydantic import ValidationError

from roll.config import ModelConfig, ParallelSettings, check_parallel
from roll.data.packing import check_divides
from roll.data.sequence_split import SequenceSplit
from roll.platform import get_platform

SMALL = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    bias=True,  # As the document prints wqkv and wo.
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["mtp", "msp", "fsp", "isp"], default="mtp")
    for degree in ("tp", "sp", "wp", "cp"):
        parser.add_argument(f"--{degree}", type=int, default=1)
    parser.add_argument("--cp-comm", choices=["a2a", "all_gather", "ring"], default="a2a")
    parser.add_argument("--micro-bsz", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=8)
    parser.add_argument("--unpacked", action="store_true", help="[micro_bsz, seq_len] instead of one packed row")
    parser.add_argument("--whole-output", action="store_true", help="gather the vocabulary (parallel_output: false)")
    parser.add_argument("--model", type=Path, help="folder with a config.json; a small InternLM2 unless given")
    return parser.parse_args()


def main() -> None:
    """Start the ranks that the degrees ask for."""
    args = arguments()
    try:
        model = SMALL if args.model is None else ModelConfig.from_folder(args.model)
        parallel = ParallelSettings(
            mode=args.mode, tp=args.tp, sp=args.sp, wp=args.wp, cp=args.cp, cp_comm=args.cp_comm
        )
        row = args.seq_len if args.unpacked else args.micro_bsz * args.seq_len
        check_divides(row, parallel.row_multiple, "parts")
        check_divides(args.seq_len, parallel.segment_multiple, "parts")
    except ValidationError as refused:
        told = (problem["msg"].removeprefix("Value error, ") for problem in refused.errors())
        raise SystemExit("\n".join(told)) from None
    except ValueError as refused:
        raise SystemExit(str(refused)) from None
    world_size = args.tp * args.cp * math.lcm(args.sp, args.wp)
    problems = check_parallel(model, parallel, world_size)
    if problems:
        raise SystemExit("\n".join(problems))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(show, (world_size, port, model, parallel, args), nprocs=world_size)


def show(
    rank: int, world_size: int, port: int, model: ModelConfig, parallel: ParallelSettings, args: argparse.Namespace
) -> None:
    """One rank: build, run, and (rank 0) print."""
    os.environ["ROLL_PLATFORM"] = "cpu"  # Any number of ranks, also beside a GPU, whose fused kernels hide some steps.
    with get_platform().quiet_megatron():
        from roll.checkpoint.hf import load_weights
        from roll.checkpoint.tensor_sources import tensor_source
        from roll.models.inspection import forward_shapes, local_shapes, module_tree
        from roll.models.internlm2 import build_internlm2
        from roll.models.packed_sequence import PackedSequence
        from roll.parallel.state import parallel_groups
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with parallel_groups(parallel) as state:
        gpt = build_internlm2(model, parallel, state, dtype=torch.float32, head="lm").eval()
        load_weights(gpt, tensor_source(Path(), model, init="random", head="lm", seed=0), state)
        lines = [*module_tree(gpt), "", "part of each tensor on rank 0:"]
        lines += [f"  {name:<44}{list(shape)}" for name, shape in local_shapes(gpt, state).items()]

        split = SequenceSplit(parallel, state.cp.rank())
        rows, length = args.micro_bsz, args.seq_len
        if args.unpacked:
            packed = PackedSequence.unpacked(rows, length, split)
        else:  # One row of micro_bsz documents of seq_len tokens, as the packed dataset makes it at best.
            cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
            packed = PackedSequence.packed(cu_seqlens, split)
        shape = (rows, length) if args.unpacked else (1, rows * length)
        ids = packed.own(torch.zeros(shape, dtype=torch.long))
        steps = forward_shapes(gpt, packed, ids, parallel_output=not args.whole_output)
        lines += ["", f"forward pass on rank 0 of {world_size}, {parallel.mode}:"]
        lines += [f"  {step:<20}{list(shape)}" for step, shape in steps]
    if rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
