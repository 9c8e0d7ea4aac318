"""Division of a role's ranks: the mode and the degrees that a user sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import PositiveInt

from roll.config.problems import Check, Problem
from roll.config.settings import Settings

RANK_AXES = ("tp", "cp", "ep", "dp", "pp")

Mode = Literal["mtp", "msp", "fsp", "isp"]
ContextCommunication = Literal["a2a", "all_gather", "ring"]


class ParallelSettings(Settings):
    """Split of a model. The data-parallel degree is what the world size leaves: world_size / (tp * pp * cp), or
    world_size / (sp * pp) in mode isp.

    The modes are InternEvo's:

    - `mtp`: weights split over tp (Megatron-Core's tensor parallelism); every rank works on the whole sequence.
    - `msp`: also the sequence is split over tp between the linears; what a linear gathered is kept for its backward.
    - `fsp`: as msp, but only the shard is kept, and gathered again in backward (Megatron-Core's sequence parallelism).
    - `isp`: the sequence is split over sp everywhere and heads are exchanged around attention; weights are split over
      wp and gathered before use. sp and wp are independent of each other.

    mtp, msp and fsp can also split the sequence over cp ranks from the embedding to the head. How these attend to each
    other's tokens is `cp_comm`:

    - `a2a`: a rank holds a contiguous part of the row; heads are exchanged around attention, as in isp.
    - `all_gather`: every rank gathers all keys and values. Each sequence is cut into 2 cp chunks, of which rank r holds
      r and 2 cp - 1 - r, so that all have equally much to attend to under the causal mask.
    - `ring`: the same chunks; keys and values go around from rank to rank while each computes with those it has.
    """

    mode: Mode = "mtp"
    """Kind of the split: weights over tp (mtp), the sequence as well (msp, fsp), or both over own groups (isp)."""
    tp: PositiveInt = 1
    """Tensor-parallel degree: ranks over which each layer's weights are split (mtp, msp, fsp)."""
    sp: PositiveInt = 1
    """Sequence-parallel degree of isp: ranks over which a packed row is split."""
    wp: PositiveInt = 1
    """Weight-parallel degree of isp: ranks over which every weight is split while it is not used."""
    pp: PositiveInt = 1
    """Pipeline-parallel degree: stages over which the layers are split."""
    cp: PositiveInt = 1
    """Context-parallel degree: ranks over which a sequence is split from the embedding to the head (mtp, msp, fsp)."""
    cp_comm: ContextCommunication = "a2a"
    """Exchange by which the cp ranks attend to each other's tokens; without effect at cp 1."""
    parallel_output: bool = True
    """Whether `op_compute_logits` leaves the vocabulary split over tp; isp has it whole, log-probs never need that."""
    rank_order: str = "tp-cp-ep-dp-pp"
    """The axes from the fastest varying to the slowest: the order in which ranks are laid out."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between the linears are split over the tensor-parallel ranks."""
        return self.mode in ("msp", "fsp")

    @property
    def context_parallel(self) -> int:
        """Ranks over which a sequence is split from the embedding to the head: the cp axis of the rank order."""
        return self.sp if self.mode == "isp" else self.cp

    @property
    def zigzag(self) -> bool:
        """Whether a rank holds an early and a late chunk of every sequence, instead of one part of the row."""
        return self.cp > 1 and self.cp_comm != "a2a"

    @property
    def segment_multiple(self) -> int:
        """Divisor of the length of every sequence of a packed row: the chunks that it is dealt in."""
        return 2 * self.cp if self.zigzag else 1

    @property
    def row_multiple(self) -> int:
        """Divisor of the length of a packed row: the equal parts that it is cut into."""
        parts = self.context_parallel * (self.tp if self.sequence_parallel else 1)
        return math.lcm(parts, self.segment_multiple)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one batch."""
        return self.tp * self.pp * self.context_parallel

    def describe(self) -> str:
        """The degrees that make up `model_parallel_size`."""
        return f"sp {self.sp} x pp {self.pp}" if self.mode == "isp" else f"tp {self.tp} x pp {self.pp} x cp {self.cp}"

    def checks(self) -> Iterable[Check]:
        return (self._rank_order_is_complete, self._degrees_belong_to_the_mode, self._megatron_orders_ranks_so)

    def _rank_order_is_complete(self) -> Iterator[Problem]:
        if sorted(self.rank_order.split("-")) != sorted(RANK_AXES):
            yield Problem("rank_order", f"must name each of {', '.join(RANK_AXES)} once, got {self.rank_order!r}")

    def _degrees_belong_to_the_mode(self) -> Iterator[Problem]:
        if self.mode == "isp":
            # InternEvo's config calls the ranks that split the sequence the tensor parallel size in every mode.
            instead = {"tp": ("InternEvo's tensor parallel size is", "sp"), "cp": ("a sequence is split over", "sp")}
        else:
            over = "tp" if self.sequence_parallel else "cp"
            instead = {"sp": ("a sequence is split over", over), "wp": ("weights are split over", "tp")}
        for name, (what, own) in instead.items():
            degree = getattr(self, name)
            if degree > 1:
                kept = f"mode {self.mode} keeps it at 1, got {degree}"
                yield Problem(name, f"{kept}; {what} {own} here: set parallel.{own}={degree}")
        if self.mode == "isp" and self.cp_comm != "a2a":
            yield Problem("cp_comm", f"{self.cp_comm} has no meaning in mode isp: its ranks exchange heads, a2a")
        if self.sequence_parallel and self.tp == 1:
            yield Problem("mode", f"{self.mode} splits the sequence over tp, which must be more than 1; got tp 1")

    def _megatron_orders_ranks_so(self) -> Iterator[Problem]:
        """Megatron-Core counts the context-parallel ranks among the data-parallel ones of an expert, and refuses
        pipelines that then differ (parallel_state.py:812).
        """
        order_is_known = sorted(self.rank_order.split("-")) == sorted(RANK_AXES)
        if order_is_known and self.pp > 1 and self.context_parallel > 1 and not self.rank_order.endswith("pp"):
            both = f"{'sp' if self.mode == 'isp' else 'cp'} {self.context_parallel} and pp {self.pp}"
            yield Problem("rank_order", f"must end with pp where {both} are more than 1, got {self.rank_order!r}")
