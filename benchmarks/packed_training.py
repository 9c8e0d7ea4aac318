"""Training on packed rows against padded rows: real tokens per second, as ratios measured in one run.

    python benchmarks/packed_training.py [--rounds 5]

One process trains a small model on the same samples in both layouts, in turns. With constant lengths there is no
padding to save, so packing has nothing to win there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from packed_data import lengths_of

from roll.config import ModelConfig, OptimizerSettings, ParallelSettings, StrategySettings
from roll.data import (
    ListSource,
    PackBatchSampler,
    PackedDataset,
    PackedLoader,
    data_process,
    load_accum_batches,
    load_batch,
)
from roll.data.tokenizer import build_char_tokenizer
from roll.parallel.state import ParallelState, parallel_groups
from roll.pipelines.model_start import write_untrained_model
from roll.strategies import MegatronTrainStrategy

MICRO_BSZ, SEQ_LEN, MICRO_NUM = 4, 256, 4
MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=SEQ_LEN,
)


class Layout:
    """Steps of a strategy of its own on the same samples in one layout."""

    def __init__(self, samples: ListSource, packed: bool, folder: Path, state: ParallelState) -> None:
        settings = StrategySettings(
            name="megatron_train", model_path=folder, init="random", optimizer=OptimizerSettings(lr=1e-3)
        )
        self.strategy = MegatronTrainStrategy(settings, state)
        self.strategy.initialize()
        self.process = data_process(use_packed_dataset=packed, micro_bsz=MICRO_BSZ, seq_len=SEQ_LEN)
        dataset = PackedDataset(samples, micro_bsz=MICRO_BSZ, seq_len=SEQ_LEN, use_packed_dataset=packed, seed=0)
        self.loader = PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=MICRO_NUM), prefetch=0)

    def tokens_per_second(self) -> float:
        """Real tokens per second of one step; reading them is not counted."""
        batch, _ = load_batch(self.loader)
        micro_batches = list(load_accum_batches(batch, self.process))
        start = time.perf_counter()
        self.strategy.train_tokens(micro_batches)
        return self.loader.last.real / (time.perf_counter() - start)


def compare(distribution: str, rounds: int, folder: Path, state: ParallelState) -> str:
    """Medians of both layouts, and the median of the ratios of neighbouring steps with the smallest and largest."""
    generator = np.random.default_rng(0)
    lengths = lengths_of(distribution, 2048, SEQ_LEN)
    samples = ListSource([generator.integers(4, MODEL.vocab_size, length) for length in lengths])
    packed, padded = (Layout(samples, layout, folder, state) for layout in (True, False))
    pairs = [(packed.tokens_per_second(), padded.tokens_per_second()) for _ in range(rounds + 1)][1:]  # One to warm up.
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return (
        f"{distribution:<10} packed {ours:6.0f}  padded {theirs:6.0f}  ratio {statistics.median(ratios):.2f} ({spread})"
    )


def main() -> None:
    """Print a line for each distribution of lengths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"real tokens/s, micro_bsz {MICRO_BSZ}, seq_len {SEQ_LEN}, micro_num {MICRO_NUM}, medians of {rounds} steps:")
    with tempfile.TemporaryDirectory() as folder, parallel_groups(ParallelSettings()) as state:
        write_untrained_model(Path(folder), MODEL, build_char_tokenizer())
        for distribution in ("lognormal", "uniform", "constant"):
            print(f"  {compare(distribution, rounds, Path(folder), state)}")


if __name__ == "__main__":
    main()
