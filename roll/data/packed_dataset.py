"""A map-style dataset of packs over any source of samples: planned by arithmetic, built when asked for.

What is kept per sample is its length, its place in the epoch's order and the end of it in the stream: 24 bytes. A pack
is built from the few samples it touches, in any order.
"""

from __future__ import annotations

from functools import cached_property
from zlib import crc32

import numpy as np
from torch.utils.data import Dataset

from roll.data.pack import PackPlan
from roll.data.packs import Pack, Plan, assemble
from roll.data.sources.sample import Ids, SampleSource
from roll.data.unpack import UnpackPlan
from roll.errors import UserError


class PackedDataset(Dataset[Pack]):
    """The packs of one epoch. `dataset[i]` is pack i, `len(dataset)` is known at once and the same in every epoch.

    With a seed the samples are shuffled before they are packed, anew in each epoch, so other samples meet in a pack and
    other samples are cut; the order follows from seed and epoch alone. Without one they stay as they are. Packs are not
    shuffled themselves: after a shuffle of the samples that adds nothing.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        micro_bsz: int,
        seq_len: int,
        use_packed_dataset: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        epoch: int = 0,
        vocab_size: int | None = None,
        context_length: int | None = None,
    ) -> None:
        """Plan the packs.

        Args:
            source: where samples are read from.
            micro_bsz: with `seq_len` it makes the length P of a pack.
            seq_len: no segment is longer, except padding.
            use_packed_dataset: fill packs by cutting samples (`build_pack`), or keep up to `micro_bsz` whole samples in
                each (`build_unpack`).
            drop_last: of cut packs, leave out a last one that is not full, instead of padding it.
            seed: of the shuffle; None for none.
            epoch: which shuffle.
            vocab_size: ids from here on are refused when a pack with one is read.
            context_length: tokens that the model takes; a longer `seq_len` is refused.

        Raises ValueError for settings out of range, and for data that make no pack at all.
        """
        if context_length is not None and seq_len > context_length:
            raise UserError(f"seq_len={seq_len} is over the model's context of {context_length} tokens")
        if drop_last and not use_packed_dataset:
            raise UserError("drop_last leaves out a pack that is not full; use_packed_dataset=False pads every pack")
        if seed is not None and seed < 0:
            raise UserError(f"seed must not be negative, got {seed}")
        self.source = source
        self.micro_bsz = micro_bsz
        self.seq_len = seq_len
        self.use_packed_dataset = use_packed_dataset
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = epoch
        self.vocab_size = vocab_size
        self._order = None if seed is None else np.random.default_rng([seed, epoch]).permutation(len(source))
        self._plan = self._make_plan(source.lengths if self._order is None else source.lengths[self._order])
        if not len(self._plan):
            self._refuse_empty()

    @property
    def pack_length(self) -> int:
        """P, tokens of a pack."""
        return self.micro_bsz * self.seq_len

    @property
    def num_tokens(self) -> int:
        """Real tokens of the epoch, without what is cut off or left out."""
        return self._plan.num_tokens

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> Pack:
        """Pack `index` of the epoch. Raises ValueError for an id outside the vocabulary, naming its sample."""
        pieces = self._plan[index]
        numbers = [piece.sample if self._order is None else int(self._order[piece.sample]) for piece in pieces]
        samples = [self.source[number] for number in numbers]
        if self.vocab_size is not None:
            for sample in samples:
                sample.check_vocabulary(self.vocab_size)
        return assemble(zip(pieces, samples, strict=True), micro_bsz=self.micro_bsz, seq_len=self.seq_len)

    def padding(self) -> Pack:
        """A pack without any sample: one segment of padding, nothing to learn."""
        return assemble((), micro_bsz=self.micro_bsz, seq_len=self.seq_len)

    def at_epoch(self, epoch: int) -> PackedDataset:
        """The same data in the order of another epoch."""
        if self.seed is None or epoch == self.epoch:
            return self
        return PackedDataset(
            self.source,
            micro_bsz=self.micro_bsz,
            seq_len=self.seq_len,
            use_packed_dataset=self.use_packed_dataset,
            drop_last=self.drop_last,
            seed=self.seed,
            epoch=epoch,
            vocab_size=self.vocab_size,
        )

    def identity(self) -> dict[str, int | bool | None]:
        """Identity of the stream of packs (all JSON), for a saved place in it. No token is read for it."""
        return {
            "num_samples": len(self.source),
            "lengths_crc32": self._lengths_crc32,
            "num_tokens": self.num_tokens,
            "num_packs": len(self),
            "micro_bsz": self.micro_bsz,
            "seq_len": self.seq_len,
            "use_packed_dataset": self.use_packed_dataset,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    @cached_property
    def _lengths_crc32(self) -> int:
        return crc32(self.source.lengths.astype(np.int64).tobytes())

    def _make_plan(self, lengths: Ids) -> Plan:
        if not self.use_packed_dataset:
            return UnpackPlan(lengths, micro_bsz=self.micro_bsz, seq_len=self.seq_len)
        return PackPlan(lengths, micro_bsz=self.micro_bsz, seq_len=self.seq_len, drop_last=self.drop_last)

    def _refuse_empty(self) -> None:
        tokens = int(self.source.lengths.sum())
        if not tokens:
            raise UserError(f"the dataset is empty: {len(self.source)} samples hold no token")
        raise UserError(
            f"the dataset has {tokens} tokens, not one pack of micro_bsz * seq_len = {self.micro_bsz} * {self.seq_len} "
            f"= {self.pack_length}, and drop_last is set"
        )
