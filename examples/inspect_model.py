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
import sys
from functools import partial
from pathlib import Path

import torch

from roll.cli import exit_status
from roll.config import ConfigError, ModelConfig, ParallelSettings, Problem, check_parallel
from roll.data.packing import check_divides
from roll.data.sequence_split import SequenceSplit
from roll.pipelines.local_ranks import run_on_ranks
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


def main() -> int:
    """The exit status: 0 done, 2 degrees or sizes that do not fit, 130 stopped by Ctrl-C."""
    return exit_status(partial(run, arguments()))


def run(args: argparse.Namespace) -> None:
    """Start the ranks that the degrees ask for."""
    for option in ("micro_bsz", "seq_len"):
        if getattr(args, option) < 1:
            raise ConfigError(
                [Problem(f"--{option.replace('_', '-')}", f"must be at least 1, got {vars(args)[option]}")]
            )
    model = SMALL if args.model is None else ModelConfig.from_folder(args.model)
    parallel = ParallelSettings(mode=args.mode, tp=args.tp, sp=args.sp, wp=args.wp, cp=args.cp, cp_comm=args.cp_comm)
    row = args.seq_len if args.unpacked else args.micro_bsz * args.seq_len
    check_divides(row, parallel.row_multiple, "parts")
    check_divides(args.seq_len, parallel.segment_multiple, "parts")
    world_size = args.tp * args.cp * math.lcm(args.sp, args.wp)
    problems = check_parallel(model, parallel, world_size)
    if problems:
        raise ConfigError([Problem("", problem) for problem in problems])
    run_on_ranks(show, model, parallel, args, world_size=world_size)


def show(model: ModelConfig, parallel: ParallelSettings, args: argparse.Namespace) -> None:
    """One rank: build, run, and (rank 0) print."""
    os.environ["ROLL_PLATFORM"] = "cpu"  # Any number of ranks, also beside a GPU, whose fused kernels hide some steps.
    with get_platform().quiet_megatron():
        from roll.checkpoint.hf import load_weights
        from roll.checkpoint.tensor_sources import tensor_source
        from roll.models.gpt import build_model
        from roll.models.inspection import forward_shapes, local_shapes, module_tree
        from roll.models.packed_sequence import PackedSequence
        from roll.parallel.state import parallel_groups
    with parallel_groups(parallel) as state:
        gpt = build_model(model, parallel, state, dtype=torch.float32, head="lm").eval()
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
        lines += ["", f"forward pass on rank 0 of {state.degrees.world_size}, {parallel.mode}:"]
        lines += [f"  {step:<20}{list(shape)}" for step, shape in steps]
    if state.rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
