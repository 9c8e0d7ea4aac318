"""Ranks that must all come to a call say so first, so that one who does not come is named within seconds.

A collective that one rank never joins blocks the others until the process group gives up, ten minutes by default, and
then says nothing of who was missing. A roll call costs two or three messages to the store that the ranks found each
other with, nobody has entered a collective when it fails, and all ranks that come, however late, hear the same:

    rank 0 (first)                   rank 1                       rank 2
    arrive("2 rows")                 arrive("2 rows")             (does not come)
    words() ── waits                 verdict() ── waits
    no word of rank 2 within 60 s
    decide(error)  ────────────────▶ error                        verdict() ▶ error, whenever it comes

Each call has one answer, and the first one stands: a verdict of the first rank, or of a rank that waited for it in
vain, or the first rank's claim that its verdict will follow. It claims a call before it asks other groups what they
decide, and so nobody gives up what the others have heard of as going on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from roll.errors import UserError

PATIENCE = 4
"""For how many timeouts a rank waits for the first one, when all have come."""
CLAIM_PATIENCE = 4 * PATIENCE
"""For how many it waits for the verdict on a claimed call: longer than groups wait for each other, since only a first
rank that is lost may be given up then."""
KEYS_KEPT = 4
"""Number of unused keys at which a rank deletes them. Each deletion waits for the store, the first one longest."""
_CLAIMED = b"claimed"  # an answer that is no verdict


class MissingRanks(TimeoutError):
    """Ranks did not come to a call that they are a part of. `ranks` are the global ranks that did not."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, ranks)
        self.message, self.ranks = message, ranks

    def __str__(self) -> str:
        return self.message


class RollCall:
    """The calls of one group of ranks: all of them make the same calls in the same order.

    For each call, every rank says a word (`arrive`); the first rank reads the words (`words`) and decides (`decide`),
    the others get what was decided (`verdict`). What is decided first stands: also a rank that waited in vain for the
    first one decides, so a late rank cannot go on alone.

    Args:
        store: of the process group's rendezvous. Its timeout is set here, so it should be a clone.
        ranks: global ranks of the group; the first decides.
        rank: this process.
        name: how messages call the group.
        timeout_s: how long the others wait for a rank.

    Raises ValueError if `rank` is none of `ranks`, one stands there twice, or `timeout_s` is not positive.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, name: str, timeout_s: float) -> None:
        if rank not in ranks or len({*ranks}) != len(ranks):
            raise UserError(f"{name}: rank {rank} must be one of its ranks, each named once, got {list(ranks)}")
        if not 0 < timeout_s < math.inf:
            raise UserError(f"{name}: timeout_s must be a positive number of seconds, got {timeout_s}")
        self._store, self.ranks, self._rank = store, tuple(ranks), rank
        self.name = f"{name} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        self.timeout_s = timeout_s
        store.set_timeout(timedelta(seconds=timeout_s))
        # Each rank counts how often it has made such a group, so that two of them never read each other's words.
        made = store.add(f"roll_call/{self.name}/made/{rank}", 1)
        self._prefix = f"roll_call/{self.name}/{made}"
        self._call = 0
        self._own_word = b""
        self._answered: list[str] = []
        """On the first rank: keys of answers that a late rank may still want."""
        self._unused: list[str] = []
        """Keys of this rank that nobody reads any more: answers that every rank has heard, words of earlier calls."""

    @property
    def decides(self) -> bool:
        """Whether this rank is the one that hears all words and decides."""
        return self._rank == self.ranks[0]

    def arrive(self, word: bytes) -> None:
        """Say that this rank has come to its next call."""
        self._call += 1
        if self.decides:  # It keeps its word in memory. In the store it only counts its calls, under one key.
            self._own_word = word
            self._store.set(self._first, str(self._call))
            return
        self._store.set(self._word(self._rank), word)  # type: ignore[arg-type]  # bytes are as good as str
        if self._call > 2:  # Who has come to the previous call needs no words of the one before.
            self._unused.append(self._word(self._rank, before=2))

    def words(self) -> list[bytes]:
        """What each rank said, in their order.

        Raises MissingRanks if some say nothing in time; the others still wait for `decide`.
        """
        others = [self._word(rank) for rank in self.ranks[1:]]
        try:
            words: list[bytes] = self._store.multi_get(others) if others else []
        except RuntimeError as error:
            raise self._missing(error) from None
        # All have come to this call, so they have heard the answers to those before.
        self._unused, self._answered = self._unused + self._answered, []
        return [self._own_word, *words]

    def claim(self) -> bytes | None:
        """On the first rank: from now on it alone decides this call. The verdict of a rank that did so before, if any.

        A claimed call is given up only if the first rank is silent for CLAIM_PATIENCE timeouts.
        """
        answer = self._put("answer", _CLAIMED)
        return None if answer == _CLAIMED else answer

    def decide(self, verdict: bytes) -> bytes:
        """What holds for all ranks: `verdict`, unless a rank has decided before."""
        answer = self._put("answer", verdict)
        self._answered.append(self._key("answer"))
        if answer == _CLAIMED:
            answer = self._put("verdict", verdict)
            self._answered.append(self._key("verdict"))
        return answer

    def verdict(self, refuse: Callable[[MissingRanks], bytes]) -> bytes:
        """What was decided; `refuse` says what this rank decides, if others do not come in time.

        The first rank may need longer, for instance to hear of other groups; while all have come, this rank waits on.
        """
        answer = self._wait("answer", PATIENCE, for_absent=False)
        if isinstance(answer, MissingRanks):
            answer = self._put("answer", refuse(answer))
        if answer == _CLAIMED:
            answer = self._wait("verdict", CLAIM_PATIENCE, for_absent=True)
        return self._put("verdict", refuse(answer)) if isinstance(answer, MissingRanks) else answer

    def _wait(self, what: str, patience: int, *, for_absent: bool) -> bytes | MissingRanks:
        """What a key of this call holds; or who is missing after `patience` timeouts, or after one if some are absent,
        unless their absence is what is being waited for to be told.
        """
        for _ in range(patience):
            try:
                found: bytes = self._store.get(self._key(what))
                return found
            except RuntimeError as error:
                missing = self._missing(error)
                if missing.ranks and not for_absent:
                    return missing
        return missing

    def forget(self) -> None:
        """Delete unused keys, once they are several. For the end of a call, when nobody waits for this rank."""
        if len(self._unused) >= KEYS_KEPT:
            for key in self._unused:
                self._store.delete_key(key)
            self._unused = []

    def _put(self, what: str, value: bytes) -> bytes:
        """What a key of this call holds: `value`, unless something is there."""
        held: bytes = self._store.compare_set(self._key(what), "", value)  # type: ignore[arg-type]
        return held

    def _missing(self, error: RuntimeError) -> MissingRanks:
        """The ranks that have said nothing, after a wait that ended with `error`, which is raised if it is another."""
        if "timeout" not in str(error).lower():
            raise error
        absent = tuple(rank for rank in self.ranks if not self._has_come(rank))
        if absent:
            ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
            what = f"{ranks} did not come to call {self._call} within {self.timeout_s:g} s"
        else:
            what = f"rank {self.ranks[0]} came to call {self._call}, and said nothing more"
        return MissingRanks(f"{self.name}: {what}", absent)

    def _has_come(self, rank: int) -> bool:
        """Return whether a rank has come to this call."""
        if rank == self.ranks[0]:
            return self._store.check([self._first]) and int(self._store.get(self._first)) >= self._call
        return self._store.check([self._word(rank)])

    @property
    def _first(self) -> str:
        """The key under which the first rank says how many calls it has come to."""
        return f"{self._prefix}/first"

    def _word(self, rank: int, before: int = 0) -> str:
        return self._key(str(rank), before)

    def _key(self, what: str, before: int = 0) -> str:
        return f"{self._prefix}/{self._call - before}/{what}"
