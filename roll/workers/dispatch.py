"""Rules by which the driver calls the methods of a role.

    rule                 arguments                                         value of a call
    ONE_TO_ALL           the same to every rank                            a list in rank order
    RANK_ZERO            the same to every rank                            the result of rank 0
    ALL_TO_ALL           lists with one entry for each rank                a list in rank order
    STAGE_LEADERS        the same to every rank                            a list: tp 0, cp 0, dp 0 of each stage
    DP_MP_COMPUTE        its data-parallel share to every rank             as below
    DP_MP_DISPATCH_FIRST the share to the receivers of each data-parallel  from tp 0, cp 0, last stage of each data-
                         group (roll.protocol.row_delivery), a stub with   parallel group, in data-parallel order: the
                         the meta data to the group's other ranks          joined rows with `returns_batch`, else a list

Every rule calls every rank, since a method may hold collectives. `roll.workers.routing` is the arithmetic behind this
table, `roll.workers.method` its types.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from roll.errors import UserError

Uneven = Literal["refuse", "pad"]


class Dispatch(Enum):
    """Which rank gets which arguments, and whose results come back; the table above says what each rule does."""

    ONE_TO_ALL = "one_to_all"
    RANK_ZERO = "rank_zero"
    ALL_TO_ALL = "all_to_all"
    STAGE_LEADERS = "stage_leaders"
    DP_MP_COMPUTE = "dp_mp_compute"
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"

    @property
    def splits(self) -> bool:
        """Whether `DataProto` arguments are split over the data-parallel groups."""
        return self in (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)


@dataclass(frozen=True)
class Rule:
    """Settings of a registered method. Raises ValueError for those that have no meaning where no batch is split."""

    dispatch: Dispatch
    uneven: Uneven = "refuse"
    """What happens to a batch without a plan whose rows do not divide: an error, or copies of its last row fill the
    shares up, and the rows of the result that belong to them are dropped. A batch with `is_padding_enabled` is filled
    up either way, if the method returns a batch."""
    fields: tuple[str, ...] | None = None
    """The fields of a batch, tensors and others, that the method reads, and so all that is sent; None for all."""
    returns_batch: bool = False
    """Whether the reporting ranks return a DataProto each, so that the rows may stay with them (`submit_remote`)."""

    def __post_init__(self) -> None:
        if self.uneven not in get_args(Uneven):
            raise UserError(f"uneven must be one of {', '.join(get_args(Uneven))}, got {self.uneven!r}")
        if not self.dispatch.splits and (self.uneven != "refuse" or self.fields is not None or self.returns_batch):
            settings = f"uneven={self.uneven!r}, fields={self.fields}, returns_batch={self.returns_batch}"
            raise UserError(f"{settings}: {self.dispatch.name} splits no batch")
