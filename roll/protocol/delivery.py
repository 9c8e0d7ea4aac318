"""How the batch of a leader becomes the batch of all ranks that work on it with the leader.

    every rank   says that it has come, and what it brings                         (roll call, through the store)
    leader       checks its batch and hears of the other leaders; then says either the header of what follows, or
                 why nothing follows
    every rank   raises that error, or sends and receives the bytes, level by level:

                 leader ──▶ ranks of its level-0 group ──▶ each the ranks of its level-1 group

    every rank   says whether it could read the objects, if some went along           (a second roll call)

A refusal is thus heard by all ranks before anyone waits for a batch, also by those of other leaders, who would later
wait for this batch's gradients; and a rank that does not come, or brings another batch, is named.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TypeVar, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roll.config import RowsOn
from roll.protocol.batch_data import tensor_dict
from roll.protocol.broadcast import broadcast_bytes
from roll.protocol.data_proto import DataProto
from roll.protocol.digest import digest
from roll.protocol.metrics import without_metrics
from roll.protocol.roll_call import MissingRanks, RollCall
from roll.protocol.wire import Specs, flatten, specs_of, total_bytes, unflatten

Check = Callable[[DataProto], None]
T = TypeVar("T")


@dataclass(frozen=True)
class _Word:
    """What a rank brings to a call."""

    error: str | None = None
    """What is wrong on this rank; the rest says nothing then."""
    specs: Specs | None = None
    """Of its rows; None for a stub."""
    objects: tuple[str, ...] = ()
    """Names in `non_tensor_batch`."""
    meta: Mapping[str, str] = field(default_factory=dict)
    """Digests of what must be equal on all ranks: entries of meta_info but the metrics, normalizers, and the
    micro-batch plan, since ranks with different ones would wait for each other's micro-batches."""

    @classmethod
    def of(cls, batch: DataProto) -> _Word:
        """It does not raise: whatever is wrong with the batch is what this rank has to say."""
        try:
            if not isinstance(batch, DataProto):
                raise ValueError(f"a DataProto is delivered, got {type(batch).__name__}")
            batch.check_consistency()
            specs = None if batch.batch is None else specs_of(batch.tensors)
            return cls(None, specs, tuple(sorted(batch.non_tensor_batch)), _digests(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is: the others wait, and must hear of it
            return cls(_account(error))


def _digests(batch: DataProto) -> dict[str, str]:
    values = {f"meta_info {name}": value for name, value in without_metrics(batch.meta_info).items()}
    plan = None if batch.plan is None else (batch.plan.shares, batch.plan.rows)
    counts = None if batch.normalizers is None else (batch.normalizers.tokens, batch.normalizers.sequences)
    found = {}
    for name, value in {**values, "normalizers": counts, "micro-batch plan": plan}.items():
        try:
            found[name] = digest(value)
        except ValueError as refused:
            raise ValueError(f"{name} {refused}") from refused
    return found


def _account(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, MissingRanks)) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Header:
    """What the leader says to all: what follows, or why nothing does."""

    error: str | None = None
    missing: tuple[int, ...] | None = None
    """With an `error` that says that ranks did not come: which."""
    specs: Specs = ()
    num_rows: int = 0
    non_tensor: bool = False
    """Whether `non_tensor_batch` goes along."""
    object_bytes: int = 0
    """Bytes of the pickled `non_tensor_batch`, which follow those of the tensors."""
    closing: bool = False
    """Whether all say at the end that they could read the objects of some share."""

    @classmethod
    def of(cls, error: Exception) -> _Header:
        return cls(error=_account(error), missing=error.ranks if isinstance(error, MissingRanks) else None)

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

    Raises ValueError for another `rows_on`.
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
        if rows_on not in get_args(RowsOn):
            raise ValueError(f"rows_on must be one of {', '.join(get_args(RowsOn))}; got {rows_on!r}")
        self._share, self._leaders = share, leaders
        self._levels = [group for group in levels if group.size() > 1]
        self._device, self._rows_on = device, rows_on
        self._sends = rows_on == "leader" and len(share.ranks) > 1
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def deliver(
        self,
        batch: DataProto,
        *,
        non_tensor: bool | None = None,
        keys: Sequence[str] | None = None,
        check: Check | None = None,
    ) -> DataProto:
        """The leader's rows, on every rank, on the device.

        The other ranks bring a stub of the batch, or rows of their own of the same kind, which are replaced. Of either,
        meta_info (but for metrics), plan and normalizers must be equal to the leader's, and stay.

        Args:
            batch: the rows on the leader.
            non_tensor: read on the leader: whether `non_tensor_batch` goes along; None for what the batch's
                `broadcast_non_tensor` says. The leader keeps its own.
            keys: read on the leader: the tensors that are wanted; None for all.
            check: called on the leader with what will be sent; what it raises is raised on every rank.

        Raises:
            ValueError: on every rank of every share: the batch of one of them is refused, its ranks bring different
                batches, or one cannot read the objects. Only a rank without memory for the rows fails alone.
            MissingRanks: on every rank that came: others did not, within the roll call's time.
        """
        word = _Word.of(batch)
        if not self._share.decides:
            return self._receive(batch, self._hear(word))
        header, (batch, flat) = self._tell(word, lambda words: self._prepare(batch, words, non_tensor, keys, check))
        if flat is not None:
            self._pass_on(flat)
        if header.closing:
            self._tell(_Word(), self._conclude)
        return batch

    def _receive(self, batch: DataProto, header: _Header) -> DataProto:
        """What follows the header, on a rank that does not lead."""
        if self._rows_on == "every_rank":
            rows = batch.select([spec.name for spec in header.specs], None if header.non_tensor else [])
            return rows.to(self._device)
        flat = torch.empty(total_bytes(header.specs) + header.object_bytes, dtype=torch.uint8, device=self._device)
        self._pass_on(flat)
        word, objects = _Word(), {}
        if header.object_bytes:
            try:
                objects = pickle.loads(flat[-header.object_bytes :].cpu().numpy().tobytes())
            except Exception as error:  # noqa: BLE001 - what unpickling runs may raise anything; the others hear of it
                word = _Word(f"non_tensor_batch cannot be unpickled: {_account(error)}")
        if header.closing:
            self._hear(word)
        return _with_rows(batch, unflatten(flat, header.specs), objects, header.num_rows).to(self._device)

    def _prepare(
        self,
        batch: DataProto,
        words: list[_Word],
        non_tensor: bool | None,
        keys: Sequence[str] | None,
        check: Check | None,
    ) -> tuple[_Header, tuple[DataProto, Tensor | None]]:
        """Everything on the leader that may fail, before anybody waits for bytes: header, its result, what to send."""
        self._check_errors(words)
        self._check_same(words)
        batch = _wanted(batch, keys)
        if check is not None:
            check(batch)
        non_tensor = batch.broadcast_non_tensor if non_tensor is None else non_tensor
        objects = _pickled(batch) if non_tensor and self._sends else b""
        specs = specs_of(batch.tensors)
        flat = self._flat(batch, specs, objects) if self._sends else None
        tensors = {name: tensor.detach() for name, tensor in batch.tensors.items()}
        result = _with_rows(batch, tensors, batch.non_tensor_batch, len(batch)).to(self._device)
        return _Header(None, None, specs, len(batch), non_tensor, len(objects)), (result, flat)

    def _conclude(self, words: list[_Word]) -> tuple[_Header, None]:
        self._check_errors(words)
        return _Header(), None

    def _check_errors(self, words: list[_Word]) -> None:
        """Raises ValueError if a rank says that something is wrong."""
        for rank, word in zip(self._share.ranks, words, strict=True):
            if word.error is not None:
                raise ValueError(f"{self._share.name}: rank {rank}: {word.error}")

    def _check_same(self, words: list[_Word]) -> None:
        """Raises ValueError if a rank brings another batch than the leader."""
        group = self._share
        ours, *others = words
        for rank, theirs in zip(group.ranks[1:], others, strict=True):
            if theirs.specs is None and self._rows_on == "every_rank":
                raise ValueError(f"{group.name}: rank {rank} has no rows, only a stub")
            differing = sorted(name for name in {**ours.meta, **theirs.meta} if not _equal_at(name, ours, theirs))
            if differing:
                raise ValueError(f"{group.name}: the batch of rank {rank} has another {', '.join(differing)}")
            if ours.specs is None or theirs.specs is None:
                continue
            brought = [{*map(str, word.specs or ())} for word in (ours, theirs)]
            if self._rows_on == "every_rank":
                brought = [specs | {*word.objects} for specs, word in zip(brought, (ours, theirs), strict=True)]
            if brought[0] != brought[1]:
                leads, its = (", ".join(sorted(a - b)) or "less" for a, b in permutations(brought))
                raise ValueError(f"{group.name}: rank {group.ranks[0]} came with {leads}, rank {rank} with {its}")

    # --- what is said -------------------------------------------------------------------------------------------------

    def _hear(self, word: _Word) -> _Header:
        """On a rank that does not lead: say `word`, and hear the header. Raises what was refused."""
        self._share.arrive(pickle.dumps(word))
        header: _Header = pickle.loads(self._share.verdict(_refusal))
        if header.error is not None:
            raise header.as_exception()
        return header

    def _tell(self, word: _Word, judge: Callable[[list[_Word]], tuple[_Header, T]]) -> tuple[_Header, T]:
        """On the leader: make a header of all words and tell it, if all other leaders have one too.

        Raises what `judge` raises, and what other leaders or the ranks of the share refuse.
        """
        self._share.arrive(pickle.dumps(word))
        error: Exception | None = None
        try:
            header, made = judge([pickle.loads(said) for said in self._share.words()])
        except Exception as refused:  # noqa: BLE001 - whatever it is: the others wait, and must hear of it
            error, header = refused, _Header.of(refused)
        told = self._settle(header)
        if told.error is not None:
            its_own = told == header and isinstance(error, (ValueError, MissingRanks))
            raise error if its_own and error is not None else told.as_exception() from error
        return told, made

    def _settle(self, header: _Header) -> _Header:
        """What all ranks of this share are told: the header, or a refusal of theirs, or of another leader.

        The other leaders hear of a header only when the ranks of this share can refuse it no more.
        """
        if self._leaders is None:
            header = replace(header, closing=header.object_bytes > 0)
        else:
            refused = self._share.claim()
            if refused is not None:
                header = pickle.loads(refused)
            header = self._agree(header, self._leaders)
        told: _Header = pickle.loads(self._share.decide(pickle.dumps(header)))
        return told

    @staticmethod
    def _agree(header: _Header, leaders: RollCall) -> _Header:
        """This leader's header, or the refusal of another leader."""
        leaders.arrive(pickle.dumps(replace(header, specs=())))
        if leaders.decides:
            try:
                told = [pickle.loads(word) for word in leaders.words()]
                refusals = (_Header.of_share(dp, other) for dp, other in enumerate(told) if other.error)
                verdict = next(refusals, _Header(closing=any(other.object_bytes for other in told)))
            except MissingRanks as missing:
                verdict = _Header.of(missing)
            verdict = pickle.loads(leaders.decide(pickle.dumps(verdict)))
        else:
            verdict = pickle.loads(leaders.verdict(_refusal))
        if header.error is not None or verdict.error is None:
            return replace(header, closing=verdict.closing)
        return verdict

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _pass_on(self, flat: Tensor) -> None:
        """Along the levels: into `flat` on a rank that is not the first of its group, else out of it."""
        for group in self._levels:
            broadcast_bytes(flat, group)

    def _flat(self, batch: DataProto, specs: Specs, objects: bytes) -> Tensor:
        """What is sent. Its memory is kept, since touching new memory takes longer than copying into old."""
        values = total_bytes(specs)
        num_bytes = values + len(objects)
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        flat = self._staging[:num_bytes]
        flatten(batch.tensors, specs, flat[:values])
        if objects:
            flat[values:] = torch.frombuffer(bytearray(objects), dtype=torch.uint8).to(self._device)
        return flat


def _equal_at(name: str, ours: _Word, theirs: _Word) -> bool:
    return ours.meta.get(name) == theirs.meta.get(name)


def _refusal(missing: MissingRanks) -> bytes:
    return pickle.dumps(_Header.of(missing))


def _wanted(batch: DataProto, keys: Sequence[str] | None) -> DataProto:
    if batch.batch is None:
        raise ValueError("the leader has no rows, only a stub")
    return batch if keys is None else batch.select(keys)


def _pickled(batch: DataProto) -> bytes:
    try:
        return pickle.dumps(dict(batch.non_tensor_batch))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as refused:  # all are what pickle raises
        raise ValueError(f"non_tensor_batch cannot be pickled: {refused}") from refused


def _with_rows(
    batch: DataProto, tensors: Mapping[str, Tensor], objects: Mapping[str, np.ndarray], num_rows: int
) -> DataProto:
    return replace(batch, batch=tensor_dict(tensors, num_rows), non_tensor_batch=objects)
