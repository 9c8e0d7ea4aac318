"""How the batch of a leader becomes the batch of all ranks that work on it with the leader.

    every rank   reports that it has come, and the batch that it brings            (roll call, through the store)
    leader       checks its batch and hears of the other leaders; then decides: a header of the bytes that follow, with
                 the entries of meta_info that some rank lacks, or a refusal; few bytes come along with the decision
    every rank   raises the refusal, or sends and receives the bytes, level by level:

                 leader ──▶ ranks of its level-0 group ──▶ each the ranks of its level-1 group

    every rank   reports whether it could unpickle objects and entries, if any went   (a second roll call)

A refusal is thus heard by all ranks before anyone waits for a batch, also by those of other leaders, who would later
wait for this batch's gradients; and a rank that does not come, or brings another batch, is named.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roll.errors import UserError
from roll.protocol.broadcast import broadcast_bytes
from roll.protocol.data_proto import DataProto
from roll.protocol.delivery_messages import Decision, RankReport, message_of, pickled_lacking, with_shared_entries
from roll.protocol.roll_call import MissingRanks, RollCall
from roll.protocol.row_delivery import BROADCAST, RowDelivery
from roll.protocol.tensors import tensor_dict
from roll.protocol.wire import as_runs, joined, run_sizes, specs_of, total_bytes, unflatten

FEW_BYTES = 1 << 16
"""Rows of at most this size come along with the decision: a broadcast would take longer to begin than to send them."""

Check = Callable[[DataProto], None]
T = TypeVar("T")


class BatchDelivery:
    """Makes a batch equal on all ranks of a model-parallel group, call after call. Made on every rank alike.

    Args:
        share: the roll call of the ranks that work on one batch. Its first rank leads.
        levels: the groups along which the bytes go, in this order: the first rank of each has them by then. A rank
            lists those that it belongs to.
        leaders: on a leader, the roll call of all leaders, whose refusals are everybody's; None if there is only one.
        device: where the bytes travel and the batch arrives.
        rows: which ranks are given the rows. If all are, nothing is sent, and it is only checked that all have rows of
            one kind; the caller vouches for their values.
    """

    def __init__(
        self,
        share: RollCall,
        levels: Sequence[dist.ProcessGroup],
        *,
        leaders: RollCall | None = None,
        device: torch.device,
        rows: RowDelivery = BROADCAST,
    ) -> None:
        self._share, self._leaders = share, leaders
        self._levels = [group for group in levels if group.size() > 1]
        self._device = device
        self._sends = len(rows.receivers(share.ranks)) < len(share.ranks)

    def deliver(
        self,
        batch: DataProto,
        *,
        non_tensor: bool | None = None,
        keys: Sequence[str] | None = None,
        check: Check | None = None,
    ) -> DataProto:
        """The leader's batch, on every rank, on the device.

        The other ranks bring a stub, an empty `DataProto()`, or rows of the same kind, which are replaced. Afterwards
        all ranks have the leader's meta_info, plan and normalizers; `meta_info["metrics"]` stays each rank's own.

        Args:
            batch: the rows on the leader.
            non_tensor: read on the leader: whether `non_tensor_batch` goes along; None for the leader's
                `broadcast_non_tensor`. The leader keeps its own.
            keys: read on the leader: the tensors that are wanted; None for all.
            check: called on the leader with what will be sent; what it raises is raised on every rank.

        Raises:
            ValueError: on every rank of every share: the batch of a leader is refused; a rank brings rows of another
                kind, or an entry of meta_info, a plan or normalizers that the leader lacks or has with another value;
                or a rank cannot unpickle the objects. Only a rank without memory for the rows fails alone.
            MissingRanks: on every rank that came: others did not, within the roll call's time.
        """
        report = RankReport.of(batch)
        if self._share.decides:
            decision, (received, runs) = self._tell(
                report, lambda reports: self._prepare(batch, reports, non_tensor, keys, check)
            )
            self._pass_on(runs)
            if decision.closing:
                self._tell(RankReport(), self._conclude)
        else:
            received = self._receive(batch, self._hear(report))
        for call in filter(None, (self._share, self._leaders)):
            call.forget()
        return received

    def _receive(self, batch: DataProto, decision: Decision) -> DataProto:
        """The batch on a rank that does not lead, from the leader's decision and bytes."""
        flat, objects, report = None, {}, RankReport()
        if self._sends:
            num_bytes = total_bytes(decision.specs) + decision.object_bytes
            if decision.rows is None:
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                self._pass_on(flat.split([*run_sizes(decision.specs), decision.object_bytes]))
            else:
                flat = _tensor_of(decision.rows).to(self._device)
        what = "meta_info, the plan or the normalizers"
        try:  # Only now: a rank that failed earlier would leave the others alone with the bytes.
            batch = with_shared_entries(batch, pickle.loads(decision.lacking) if decision.lacking else {})
            what = "non_tensor_batch"
            if flat is not None and decision.object_bytes:
                objects = pickle.loads(flat[-decision.object_bytes :].cpu().numpy().tobytes())
        except Exception as error:  # noqa: BLE001 - what unpickling runs may raise anything; the others hear of it
            report = RankReport(f"{what} cannot be unpickled: {message_of(error)}")
        if decision.closing:
            self._hear(report)
        if flat is None:
            rows = batch.select([spec.name for spec in decision.specs], None if decision.non_tensor else [])
            return rows.to(self._device)
        return self._with_rows(batch, unflatten(flat, decision.specs), objects, decision.num_rows)

    def _prepare(
        self,
        batch: DataProto,
        reports: list[RankReport],
        non_tensor: bool | None,
        keys: Sequence[str] | None,
        check: Check | None,
    ) -> tuple[Decision, tuple[DataProto, Sequence[Tensor]]]:
        """The leader's decision, result and bytes to send: all that may fail, before any rank waits for bytes."""
        self._check_errors(reports)
        self._check_same(reports)
        batch = _wanted(batch, keys)
        if check is not None:
            check(batch)
        non_tensor = batch.broadcast_non_tensor if non_tensor is None else non_tensor
        objects = _pickled(batch) if non_tensor and self._sends else b""
        specs = specs_of(batch.tensors)
        tensors = {name: tensor.detach().to(self._device) for name, tensor in batch.tensors.items()}
        runs = [*as_runs(tensors, specs), _tensor_of(objects).to(self._device)] if self._sends else []
        few = self._sends and total_bytes(specs) + len(objects) <= FEW_BYTES
        result = self._with_rows(batch, tensors, batch.non_tensor_batch, len(batch))
        lacking = pickled_lacking(batch, reports[1:])
        decision = Decision(
            specs=specs,
            num_rows=len(batch),
            non_tensor=non_tensor,
            object_bytes=len(objects),
            rows=joined(runs).cpu().numpy().tobytes() if few else None,
            lacking=lacking,
            closing=bool(objects or lacking),
        )
        return decision, (result, [] if few else runs)

    def _conclude(self, reports: list[RankReport]) -> tuple[Decision, None]:
        self._check_errors(reports)
        return Decision(), None

    def _check_errors(self, reports: list[RankReport]) -> None:
        """Raises ValueError if a rank reports a defect."""
        for rank, report in zip(self._share.ranks, reports, strict=True):
            if report.error is not None:
                raise UserError(f"{self._share.name}: rank {rank}: {report.error}")

    def _check_same(self, reports: list[RankReport]) -> None:
        """Raises ValueError if a rank brings another batch than the leader. A stub may lack what the leader has."""
        group = self._share
        ours, *others = reports
        for rank, theirs in zip(group.ranks[1:], others, strict=True):
            if theirs.specs is None and not self._sends:
                raise UserError(f"{group.name}: rank {rank} has no rows, only a stub")
            for name, value in theirs.shared.items():
                if name not in ours.shared:
                    raise UserError(f"{group.name}: the batch of rank {rank} has {name}, the leader's has none")
                if ours.shared[name] != value:
                    raise UserError(f"{group.name}: the batch of rank {rank} has another {name} than the leader's")
            if ours.specs is None or theirs.specs is None:
                continue
            brought = [{*map(str, report.specs or ())} for report in (ours, theirs)]
            if not self._sends:
                brought = [specs | {*report.objects} for specs, report in zip(brought, (ours, theirs), strict=True)]
            if brought[0] != brought[1]:
                leads, its = (", ".join(sorted(a - b)) or "less" for a, b in permutations(brought))
                raise UserError(f"{group.name}: rank {group.ranks[0]} came with {leads}, rank {rank} with {its}")

    # --- reports and decisions ----------------------------------------------------------------------------------------

    def _hear(self, report: RankReport) -> Decision:
        """Report, and wait for the decision, on a rank that does not lead. Raises a refusal."""
        self._share.arrive(pickle.dumps(report))
        decision: Decision = pickle.loads(self._share.verdict(_refusal))
        if decision.error is not None:
            raise decision.as_exception()
        return decision

    def _tell(self, report: RankReport, judge: Callable[[list[RankReport]], tuple[Decision, T]]) -> tuple[Decision, T]:
        """Decide from the reports of all ranks, on the leader, and tell them once all other leaders agree.

        Raises the errors of `judge`, and the refusals of other leaders or of ranks of the share.
        """
        self._share.arrive(pickle.dumps(report))
        error: Exception | None = None
        try:
            decision, made = judge([pickle.loads(said) for said in self._share.words()])
        except Exception as refused:  # noqa: BLE001 - whatever it is: the others wait, and must hear of it
            error, decision = refused, Decision.refusal(refused)
        told = self._settle(decision)
        if told.error is not None:
            its_own = told == decision and isinstance(error, (ValueError, MissingRanks))
            raise error if its_own and error is not None else told.as_exception() from error
        return told, made

    def _settle(self, decision: Decision) -> Decision:
        """The decision that holds for the share: this one, or a refusal by one of its ranks or by another leader.

        The other leaders hear of a decision only once the ranks of this share can no longer refuse it.
        """
        if self._leaders is not None:
            refused = self._share.claim()
            if refused is not None:
                decision = pickle.loads(refused)
            decision = self._agree(decision, self._leaders)
        told: Decision = pickle.loads(self._share.decide(pickle.dumps(decision)))
        return told

    @staticmethod
    def _agree(decision: Decision, leaders: RollCall) -> Decision:
        """This leader's decision, or the refusal of another leader."""
        leaders.arrive(pickle.dumps(replace(decision, specs=(), lacking=b"", rows=None)))
        if leaders.decides:
            try:
                decisions = [pickle.loads(said) for said in leaders.words()]
                refusals = (Decision.refusal_of_share(dp, other) for dp, other in enumerate(decisions) if other.error)
                joint = next(refusals, Decision(closing=any(other.closing for other in decisions)))
            except MissingRanks as missing:
                joint = Decision.refusal(missing)
            joint = pickle.loads(leaders.decide(pickle.dumps(joint)))
        else:
            joint = pickle.loads(leaders.verdict(_refusal))
        if decision.error is not None or joint.error is None:
            return replace(decision, closing=joint.closing)
        return joint

    def _with_rows(
        self, batch: DataProto, tensors: Mapping[str, Tensor], objects: dict[str, np.ndarray], num_rows: int
    ) -> DataProto:
        """The batch with these rows, whose tensors are on the device."""
        return replace(batch, batch=tensor_dict(tensors, num_rows, self._device), non_tensor_batch=objects)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _pass_on(self, runs: Sequence[Tensor]) -> None:
        """Broadcast `runs` along the levels: the first rank of a group sends them, those of the others are filled."""
        for group in self._levels if runs else ():
            broadcast_bytes(runs, group)


def _tensor_of(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)


def _refusal(missing: MissingRanks) -> bytes:
    return pickle.dumps(Decision.refusal(missing))


def _wanted(batch: DataProto, keys: Sequence[str] | None) -> DataProto:
    if batch.batch is None:
        raise UserError("the leader has no rows, only a stub")
    return batch if keys is None else batch.select(keys)


def _pickled(batch: DataProto) -> bytes:
    try:
        return pickle.dumps(dict(batch.non_tensor_batch))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as refused:  # all are what pickle raises
        raise UserError(f"non_tensor_batch cannot be pickled: {refused}") from refused
