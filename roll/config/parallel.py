"""How a role's ranks are divided: the mode and the degrees that a user sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import PositiveInt

from roll.config.problems import Check, Problem
from roll.config.settings import Settings

RANK_AXES = ("tp", "cp", "ep", "dp", "pp")

Mode = Literal["mtp", "msp", "fsp", "isp"]


class ParallelSettings(Settings):
    """How a model is split. The data-parallel degree is what the world size leaves: world_size / (tp * pp * cp), or
    world_size / (sp * pp) in mode isp.

    The modes are InternEvo's:

    - `mtp`: weights split over tp (Megatron-Core's tensor parallelism); every rank works on the whole sequence.
    - `msp`: also the sequence is split over tp between the linears; what a linear gathered is kept for its backward.
    - `fsp`: as msp, but only the shard is kept, and gathered again in backward (Megatron-Core's sequence parallelism).
    - `isp`: the sequence is split over sp everywhere and heads are exchanged around attention; weights are split over
      wp and gathered before use. sp and wp are independent of each other.
    """

    mode: Mode = "mtp"
    """What is split: weights over tp (mtp), the sequence as well (msp, fsp), or both over groups of their own (isp)."""
    tp: PositiveInt = 1
    """Tensor-parallel degree: ranks over which each layer's weights are split (mtp, msp, fsp)."""
    sp: PositiveInt = 1
    """Sequence-parallel degree of isp: ranks over which a packed row is split."""
    wp: PositiveInt = 1
    """Weight-parallel degree of isp: ranks over which every weight is split while it is not used."""
    pp: PositiveInt = 1
    """Pipeline-parallel degree: stages over which the layers are split."""
    cp: PositiveInt = 1
    """Context-parallel degree: ranks over which a sequence is split (only 1 for now)."""
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
    def sequence_shards(self) -> int:
        """Equal parts that a packed row is cut into; its length is a multiple of this."""
        return self.tp if self.sequence_parallel else self.context_parallel

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one batch."""
        return self.tp * self.pp * self.context_parallel

    def describe(self) -> str:
        """The degrees that make up `model_parallel_size`."""
        return f"sp {self.sp} x pp {self.pp}" if self.mode == "isp" else f"tp {self.tp} x pp {self.pp} x cp {self.cp}"

    def checks(self) -> Iterable[Check]:
        return (self._rank_order_is_complete, self._degrees_belong_to_the_mode)

    def _rank_order_is_complete(self) -> Iterator[Problem]:
        if sorted(self.rank_order.split("-")) != sorted(RANK_AXES):
            yield Problem("rank_order", f"must name each of {', '.join(RANK_AXES)} once, got {self.rank_order!r}")

    def _degrees_belong_to_the_mode(self) -> Iterator[Problem]:
        foreign = {"tp": self.tp, "cp": self.cp} if self.mode == "isp" else {"sp": self.sp, "wp": self.wp}
        for name, degree in foreign.items():
            if degree > 1:
                yield Problem(name, f"{degree} has no meaning in mode {self.mode}: it must be 1 there")
        if self.sequence_parallel and self.tp == 1:
            yield Problem("mode", f"{self.mode} splits the sequence over tp, which must be more than 1; got tp 1")
