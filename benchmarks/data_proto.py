"""DataProto against verl's: concat, chunk, reorder, repeat, pickling. Ratios of medians, taken in turns in one process.

    pip install --no-deps --target /tmp/verl verl==0.9.1
    PYTHONPATH=/tmp/verl OMP_NUM_THREADS=1 python benchmarks/data_proto.py [--rounds 40]

verl is optional: without it our own times are printed. Batches have the fields of a PPO step (ids, masks, six float
fields [B, S-1]) and two object fields. Times are CPU time of one thread, so that what else the machine does counts
less. `ratio` is verl's median over ours, so above 1 we are faster; in brackets the middle half of the ratios of the
single rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from roll.protocol import DataProto, to_verl
from roll.protocol.display import readable_bytes

SIZES = {"small": (64, 128), "large": (512, 1024)}
NUMPY_SWITCH = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def make_batch(rows: int, width: int) -> DataProto:
    """A batch as it stands before a PPO update."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"input_ids": torch.randint(0, 50_000, (rows, width), generator=generator)}
    tensors |= {name: torch.ones(rows, width, dtype=torch.int64) for name in ("attention_mask", "response_mask")}
    names = ("log_probs", "ref_log_probs", "values", "advantages", "returns", "token_rewards")
    tensors |= {name: torch.randn(rows, width - 1, generator=generator) for name in names}
    objects = {"uid": [f"prompt {row // 4}" for row in range(rows)], "answer": list(range(rows))}
    return DataProto.from_dict(tensors, objects, {"step": 3, "temperature": 1.0})


def operations(batch: Any, rows: int) -> dict[str, Callable[[], Any]]:
    """What is measured; both classes have these methods."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    pieces = batch.chunk(8)
    concat = type(batch).concat
    pickled = pickle.dumps(batch)
    return {
        "concat of 8": lambda: concat(pieces),
        "chunk to 8": lambda: batch.chunk(8),
        "reorder": lambda: batch.reorder(order),
        "repeat 4, interleaved": lambda: batch.repeat(4, True),
        "repeat 4, in turn": lambda: batch.repeat(4, False),
        "pickle": lambda: pickle.dumps(batch),
        "unpickle": lambda: pickle.loads(pickled),
    }


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one call, with the result freed outside the measured time."""
    begun = time.process_time()
    result = run()
    elapsed = time.process_time() - begun
    del result
    return elapsed


@contextmanager
def numpy_pickles() -> Iterator[None]:
    """verl's other way to pickle."""
    os.environ[NUMPY_SWITCH] = "numpy"
    try:
        yield
    finally:
        del os.environ[NUMPY_SWITCH]


def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any] | None, rounds: int) -> None:
    """One line: our median, theirs, and the ratio, with its spread."""
    mine, other = [], []
    for number in range(rounds + 2):  # the first two warm up; who begins changes
        if theirs is None:
            mine.append(seconds(ours))
        elif number % 2:
            mine.append(seconds(ours))
            other.append(seconds(theirs))
        else:
            other.append(seconds(theirs))
            mine.append(seconds(ours))
    mine, other = mine[2:], other[2:]
    line = f"  {name:<24} {statistics.median(mine) * 1e6:10.0f} us"
    if other:
        low, _, high = statistics.quantiles([b / a for a, b in zip(mine, other, strict=True)], n=4)
        ratio = statistics.median(other) / statistics.median(mine)
        line += f"  verl {statistics.median(other) * 1e6:10.0f} us  ratio {ratio:5.2f} [{low:.2f}, {high:.2f}]"
    print(line)


def main() -> None:
    """Print the comparison for every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    theirs: Any = None
    if importlib.util.find_spec("verl") is None:
        print("verl is not installed: only our own times")
    else:
        from verl import DataProto as VerlDataProto
        from verl import __version__

        theirs = VerlDataProto
        print(f"against verl {__version__}; ratio = verl / ours")
    print(f"torch {torch.__version__}, numpy {np.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    torch.set_num_threads(1)
    gc.disable()
    for size, (rows, width) in SIZES.items():
        batch = make_batch(rows, width)
        total = readable_bytes(sum(tensor.nbytes for tensor in batch.tensors.values()))
        print(f"{size}: {rows} rows of {width} tokens, {total}")
        other = {} if theirs is None else operations(to_verl(batch, theirs), rows)
        for name, run in operations(batch, rows).items():
            compare(name, run, other.get(name), rounds)
        if theirs is not None:
            with numpy_pickles():
                by_numpy = operations(to_verl(batch, theirs), rows)
                for name in ("pickle", "unpickle"):
                    compare(f"{name}, verl by numpy", operations(batch, rows)[name], by_numpy[name], rounds)


if __name__ == "__main__":
    main()
