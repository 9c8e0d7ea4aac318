"""How the batch of a leader becomes the batch of all ranks that work on it with the leader.

    every rank   says that it has come, and what it brings                         (roll call, through the store)
    leader       checks its batch and hears of the other leaders; then says either the header of what follows, or
                 why nothing follows
    every rank   raises that error, or sends and receives the bytes, level by level:

                 leader ──▶ ranks of its level-0 group ──▶ each the ranks of its level-1 group

A refusal is thus heard by all ranks before anyone waits for a batch, also by those of other leaders, who would later
wait for this batch's gradients; and a rank that does not come, or brings another batch, is named.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from roll.config import RowsOn
from roll.protocol.broadcast import broadcast_bytes
from roll.protocol.data_proto import DataProto
from roll.protocol.roll_call import MissingRanks, RollCall
from roll.protocol.wire import Specs, flatten, specs_of, total_bytes, unflatten

Check = Callable[[DataProto], None]


@dataclass(frozen=True)
class _Word:
    """What a rank brings to the call."""

    specs: Specs | None
    """Of its rows; None for a stub."""
    schedule: int
    """Equal for equal micro-batch plans: ranks with different ones would wait for each other's micro-batches."""

    @classmethod
    def of(cls, batch: DataProto) -> _Word:
        # Hashes of integers are the same in every process.
        schedule = 0 if batch.plan is None else hash((batch.plan.shares, batch.plan.rows))
        return cls(None if batch.batch is None else specs_of(batch.tensors), schedule)


@dataclass(frozen=True)
class _Header:
    """What the leader says to all: what follows, or why nothing does."""

    error: str | None = None
    missing: tuple[int, ...] | None = None
    """With an `error` that says that ranks did not come: which."""
    specs: Specs = ()
    num_rows: int = 0
    object_bytes: int = 0
    """Bytes of the pickled `non_tensor_batch`, which follow those of the tensors; 0 if it does not go along."""

    @classmethod
    def of(cls, error: Exception) -> _Header:
        known = isinstance(error, (ValueError, MissingRanks))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(error=text, missing=error.ranks if isinstance(error, MissingRanks) else None)

    @classmethod
    def of_share(cls, dp: int, header: _Header) -> _Header:
        """The refusal of one share, as the others hear it."""
        if header.missing is not None:
            return header
        return cls(error=f"the batch of data-parallel rank {dp} was refused: {header.error}")

    def as_exception(self) -> ValueError | MissingRanks:
        assert self.error is not None
        return ValueError(self.error) if self.missing is None else MissingRanks(self.error, self.missing)


class BatchDelivery:
    """Makes a batch equal on all ranks of a model-parallel group, call after call. Made on every rank alike.

    Args:
        share: the roll call of the ranks that work on one batch. Its first rank leads.
        levels: the groups along which the bytes go, in this order: the first rank of each has them by then. A rank
            lists those that it belongs to.
        leaders: on a leader, the roll call of all leaders, whose refusals are everybody's; None if there is only one.
        device: where the bytes travel and the batch arrives.
        rows_on: which ranks are given the rows. On `every_rank` nothing is sent, and it is only checked that all
            have rows of one kind; the caller vouches for their values.
    """

    def __init__(
        self,
        share: RollCall,
        levels: Sequence[dist.ProcessGroup],
        *,
        leaders: RollCall | None = None,
        device: torch.device,
        rows_on: RowsOn = "leader",
    ) -> None:
        self._share, self._leaders = share, leaders
        self._levels = [group for group in levels if group.size() > 1]
        self._device, self._rows_on = device, rows_on
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def deliver(
        self, batch: DataProto, *, non_tensor: bool, keys: Sequence[str] | None = None, check: Check | None = None
    ) -> DataProto:
        """The leader's rows, on every rank, on the device.

        The other ranks bring a stub of the batch, whose meta_info, plan and normalizers stay, or rows of their own of
        the same kind, which are replaced.

        Args:
            batch: the rows on the leader.
            non_tensor: read on the leader: whether `non_tensor_batch` goes along. The leader keeps its own.
            keys: read on the leader: the tensors that are wanted; None for all.
            check: called on the leader with what will be sent; what it raises is raised on every rank.

        Raises:
            ValueError: on every rank of every share: the batch of one of them is refused, or its ranks bring different
                batches.
            MissingRanks: on every rank that came: others did not, within the roll call's time.
        """
        self._share.arrive(pickle.dumps(_Word.of(batch)))
        if self._share.decides:
            return self._lead(batch, non_tensor, keys, check)
        header: _Header = pickle.loads(self._share.verdict(_refusal))
        if header.error is not None:
            raise header.as_exception()
        if self._rows_on == "every_rank":
            rows = batch.select([spec.name for spec in header.specs], None if header.object_bytes else [])
            return rows.to(self._device)
        flat = torch.empty(total_bytes(header.specs) + header.object_bytes, dtype=torch.uint8, device=self._device)
        self._pass_on(flat)
        objects: dict[str, np.ndarray] = {}
        if header.object_bytes:
            objects = pickle.loads(flat[-header.object_bytes :].cpu().numpy().tobytes())
        return _with_rows(batch, unflatten(flat, header.specs), objects, header.num_rows)

    def _lead(self, batch: DataProto, non_tensor: bool, keys: Sequence[str] | None, check: Check | None) -> DataProto:
        """`deliver` on the leader."""
        error: Exception | None = None
        objects = b""
        try:
            self._check_words()
            batch = _wanted(batch, keys)
            if check is not None:
                check(batch)
            objects = _pickled(batch) if non_tensor else b""
            header = _Header(specs=specs_of(batch.tensors), num_rows=len(batch), object_bytes=len(objects))
        except Exception as refused:  # noqa: BLE001 - whatever it is: the others wait, and must hear of it
            error, header = refused, _Header.of(refused)
        told: _Header = pickle.loads(self._share.decide(pickle.dumps(self._agree(header))))
        if told.error is not None:
            its_own = told == header and isinstance(error, (ValueError, MissingRanks))
            raise error if its_own and error is not None else told.as_exception() from error
        if self._rows_on == "leader" and self._levels:
            flat = self._staged(total_bytes(header.specs) + len(objects))
            flatten(batch.tensors, header.specs, flat[: total_bytes(header.specs)])
            if objects:
                flat[-len(objects) :] = torch.frombuffer(bytearray(objects), dtype=torch.uint8).to(self._device)
            self._pass_on(flat)
        tensors = {name: tensor.detach() for name, tensor in batch.tensors.items()}
        return _with_rows(batch, tensors, batch.non_tensor_batch, len(batch)).to(self._device)

    def _check_words(self) -> None:
        """Raises MissingRanks if a rank does not come, ValueError if one brings another batch than the leader."""
        group = self._share
        ours, *others = [pickle.loads(word) for word in group.words()]
        for rank, theirs in zip(group.ranks[1:], others, strict=True):
            if theirs.specs is None and self._rows_on == "every_rank":
                raise ValueError(f"{group.name}: rank {rank} has no rows, only a stub")
            if theirs.schedule != ours.schedule:
                raise ValueError(f"{group.name}: the batch of rank {rank} has another micro-batch plan")
            if ours.specs is not None and theirs.specs is not None and {*ours.specs} != {*theirs.specs}:
                pairs = permutations((ours.specs, theirs.specs))
                leads, its = (", ".join(sorted(str(spec) for spec in {*a} - {*b})) or "less" for a, b in pairs)
                raise ValueError(f"{group.name}: rank {group.ranks[0]} came with {leads}, rank {rank} with {its}")

    def _agree(self, header: _Header) -> _Header:
        """This leader's header, or the refusal of another leader."""
        leaders = self._leaders
        if leaders is None:
            return header
        leaders.arrive(pickle.dumps(replace(header, specs=())))
        if leaders.decides:
            try:
                told = [pickle.loads(word) for word in leaders.words()]
                verdict = next((_Header.of_share(dp, other) for dp, other in enumerate(told) if other.error), _Header())
            except MissingRanks as missing:
                verdict = _Header.of(missing)
            verdict = pickle.loads(leaders.decide(pickle.dumps(verdict)))
        else:
            verdict = pickle.loads(leaders.verdict(_refusal))
        return header if header.error is not None or verdict.error is None else verdict

    def _pass_on(self, flat: Tensor) -> None:
        """Along the levels: into `flat` on a rank that is not the first of its group, else out of it."""
        for group in self._levels:
            broadcast_bytes(flat, group)

    def _staged(self, num_bytes: int) -> Tensor:
        """Memory to send from. It is kept, since touching new memory takes longer than copying into old."""
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:num_bytes]


def _refusal(missing: MissingRanks) -> bytes:
    return pickle.dumps(_Header.of(missing))


def _wanted(batch: DataProto, keys: Sequence[str] | None) -> DataProto:
    if batch.batch is None:
        raise ValueError("the leader has no rows, only a stub")
    return batch if keys is None else select_tensors(batch, keys)


def select_tensors(batch: DataProto, keys: Sequence[str]) -> DataProto:
    """The batch with these tensors alone. Raises ValueError, with the known names, if it lacks one."""
    unknown = [key for key in keys if key not in batch.tensors]
    if unknown:
        raise ValueError(
            f"the batch lacks {', '.join(unknown)}; it has {', '.join(sorted(batch.tensors)) or 'nothing'}"
        )
    return batch.select(keys, None)


def _pickled(batch: DataProto) -> bytes:
    try:
        return pickle.dumps(dict(batch.non_tensor_batch))
    except (pickle.PicklingError, TypeError, AttributeError) as refused:  # all three are what pickle raises
        raise ValueError(f"non_tensor_batch cannot be pickled: {refused}") from refused


def _with_rows(
    batch: DataProto, tensors: Mapping[str, Tensor], objects: Mapping[str, np.ndarray], num_rows: int
) -> DataProto:
    return replace(batch, batch=TensorDict(dict(tensors), batch_size=[num_rows]), non_tensor_batch=objects)
