"""What packed data cost to start, hold and read, and how full packs are: numbers for a person to read.

    python benchmarks/packed_data.py [--samples 1000000]

Start-up and resident memory are those of the dataset, over samples that exist already: for each kind of source, in a
process of its own. Times are of this machine, and reads are of files that the page cache holds.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from roll.data import ListSource, PackedDataset, SampleSource, TokenizedFolder
from roll.data.pack import PackPlan
from roll.data.sources.tokenized_folder import write_tokenized
from roll.data.unpack import UnpackPlan

MICRO_BSZ = 2
SEQ_LEN = 2048


def lengths_of(distribution: str, count: int, seq_len: int, seed: int = 0) -> NDArray[np.int64]:
    """`[count]` lengths in 1..seq_len: `lognormal` (median seq_len / 8), `uniform`, or `constant` (all seq_len)."""
    generator = np.random.default_rng(seed)
    if distribution == "lognormal":
        drawn = generator.lognormal(np.log(seq_len / 8), 1.0, count)
    elif distribution == "uniform":
        drawn = generator.integers(1, seq_len + 1, count).astype(np.float64)
    elif distribution == "constant":
        drawn = np.full(count, float(seq_len))
    else:
        raise ValueError(f"distribution must be lognormal, uniform or constant, got {distribution!r}")
    return np.clip(drawn, 1, seq_len).astype(np.int64)


def packing_efficiency(lengths: NDArray[np.int64], *, micro_bsz: int, seq_len: int) -> tuple[float, float]:
    """The share of real tokens among those computed: packed by cutting, and padded to `[micro_bsz, seq_len]` rows."""
    packed = PackPlan(lengths, micro_bsz=micro_bsz, seq_len=seq_len)
    padded = UnpackPlan(lengths, micro_bsz=micro_bsz, seq_len=seq_len)
    length = micro_bsz * seq_len
    return packed.num_tokens / (len(packed) * length), padded.num_tokens / (len(padded) * length)


def print_efficiency(count: int) -> None:
    """Efficiency for three distributions of lengths; with constant lengths packing has nothing to win."""
    print(f"share of real tokens, {count:,} samples, micro_bsz {MICRO_BSZ}, seq_len {SEQ_LEN}:")
    for distribution in ("lognormal", "uniform", "constant"):
        lengths = lengths_of(distribution, count, SEQ_LEN)
        packed, padded = packing_efficiency(lengths, micro_bsz=MICRO_BSZ, seq_len=SEQ_LEN)
        print(f"  {distribution:<10} packed {packed:7.2%}  padded {padded:7.2%}  ratio {packed / padded:.2f}")


def print_cost(name: str, make_source: Callable[[], SampleSource]) -> None:
    """Start-up time and memory growth of a shuffled dataset over the source, then the time of a random read."""
    PackedDataset(ListSource([[1]]), micro_bsz=1, seq_len=1)  # whatever is loaded at the first use
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    source = make_source()
    dataset = PackedDataset(source, micro_bsz=MICRO_BSZ, seq_len=SEQ_LEN, seed=1)
    seconds = time.perf_counter() - start
    growth = (process.memory_info().rss - before) / 1e6
    start = time.perf_counter()
    dataset.at_epoch(1)
    next_epoch = time.perf_counter() - start
    reads = np.random.default_rng(2).integers(0, len(dataset), 300)
    for index in reads[:20]:
        dataset[int(index)]
    start = time.perf_counter()
    for index in reads:
        dataset[int(index)]
    per_pack = (time.perf_counter() - start) / len(reads)
    after = (process.memory_info().rss - before) / 1e6
    segments = len(source) / len(dataset)
    print(
        f"{name}: {len(source):,} samples, {len(dataset):,} packs: start {seconds:.2f} s, +{growth:.0f} MB "
        f"(+{after:.0f} MB after reads), next epoch {next_epoch:.2f} s, random pack of {dataset.pack_length} tokens "
        f"{per_pack * 1e3:.2f} ms (about {segments:.0f} samples)"
    )


def cost_of_lists(count: int) -> None:
    """Samples in memory; what they take themselves is not counted."""
    row = list(range(64))
    samples = [row] * count
    print_cost("lists", lambda: ListSource(samples))


def cost_of_folder(folder: Path) -> None:
    """Samples in a tokenized folder."""
    print_cost("tokenized folder", lambda: TokenizedFolder(folder))


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of the start-up and memory figures")
    count = parser.parse_args().samples
    print_efficiency(min(count, 100_000))
    alone = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        row = list(range(1000, 1064))
        write_tokenized(Path(folder) / "tokens.bin", (row for _ in range(count)))
        for target, argument in ((cost_of_lists, count), (cost_of_folder, Path(folder))):
            process = alone.Process(target=target, args=(argument,))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
