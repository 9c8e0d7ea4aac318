"""Who comes to a call, as threads that share a store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore, Store, TCPStore

from roll.protocol import MissingRanks, RollCall
from roll.protocol.roll_call import KEYS_KEPT
from tests.protocol.virtual_time import Clock, VirtualStore

RANKS = (4, 6, 7)
MOST_KEYS = 3 * (4 + KEYS_KEPT) + 1 + 3 + 1
"""Two calls and what may still be deleted of each rank, the first rank's count of calls, what each rank counted of its
groups, and a key of the TCP store's own."""


def server(kind: str) -> Store:
    return HashStore() if kind == "hash" else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def call_of(store: Store, rank: int, timeout_s: float = 20.0) -> RollCall:
    return RollCall(store.clone(), RANKS, rank, "the three", timeout_s)


def refuse(missing: MissingRanks) -> bytes:
    return f"refused: {missing}".encode()


def meet(call: RollCall, word: str, *, claims: bool = False) -> str:
    """One call, from its begin to its end: the first rank joins all words."""
    call.arrive(word.encode())
    heard = hear(call, claims=claims)
    call.forget()
    return heard


def hear(call: RollCall, *, claims: bool = False) -> str:
    """What becomes of the call that this rank has come to."""
    if not call.decides:
        return call.verdict(refuse).decode()
    try:
        verdict = b" ".join(call.words())
    except MissingRanks as missing:
        verdict = refuse(missing)
    if claims:
        assert call.claim() is None
    return call.decide(verdict).decode()


def together(work: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    with ThreadPoolExecutor(len(work)) as threads:
        return {rank: job.result() for rank, job in {r: threads.submit(fn) for r, fn in work.items()}.items()}


@pytest.mark.parametrize("kind", ["hash", "tcp"])
@pytest.mark.parametrize("claims", [False, True])
def test_all_hear_what_the_first_makes_of_all_words_and_little_is_left_in_the_store(kind: str, claims: bool) -> None:
    store = server(kind)

    def several(rank: int) -> list[str]:
        call = call_of(store, rank)
        return [meet(call, f"{rank}.{number}", claims=claims) for number in range(40)]

    heard = together({rank: lambda rank=rank: several(rank) for rank in RANKS})
    expected = [f"4.{n} 6.{n} 7.{n}" for n in range(40)]
    assert [heard[rank] for rank in RANKS] == [expected] * 3
    assert store.num_keys() <= MOST_KEYS


def test_groups_of_one_name_do_not_hear_each_other() -> None:
    store = server("hash")
    first, second = ({rank: call_of(store, rank) for rank in RANKS} for _ in range(2))
    one = together({rank: lambda call=call, rank=rank: meet(call, f"a{rank}") for rank, call in first.items()})
    two = together({rank: lambda call=call, rank=rank: meet(call, f"b{rank}") for rank, call in second.items()})
    assert set(one.values()) == {"a4 a6 a7"} and set(two.values()) == {"b4 b6 b7"}


@pytest.mark.parametrize("kind", ["hash", "tcp"])
@pytest.mark.parametrize("absent", [4, 7])
def test_who_does_not_come_is_named_to_all_also_to_itself_when_it_comes(kind: str, absent: int) -> None:
    store = server(kind)
    calls = {rank: call_of(store, rank, timeout_s=0.5) for rank in RANKS}
    present = [rank for rank in RANKS if rank != absent]
    # One after the other, in one thread: a slow one would be missing as well. To the first call, all come.
    for call in calls.values():
        call.arrive(b"here")
    assert {hear(call) for call in calls.values()} == {"here here here"}
    for rank in present:
        calls[rank].arrive(b"here")
    heard = {rank: hear(calls[rank]) for rank in present}
    expected = f"refused: the three (ranks 4, 6, 7): rank {absent} did not come to call 2 within 0.5 s"
    assert heard == dict.fromkeys(present, expected)
    calls[absent].arrive(b"late")
    assert hear(calls[absent]) == expected
    for call in calls.values():
        call.arrive(b"again")
    assert {hear(call) for call in calls.values()} == {"again again again"}  # all know of the failure, and may go on


def test_the_others_wait_on_for_a_first_rank_that_has_come_but_not_for_ever() -> None:
    clock = Clock()
    store: Any = VirtualStore(clock)
    calls = {rank: call_of(store, rank, timeout_s=30) for rank in RANKS}

    def slow() -> str:
        calls[4].arrive(b"")
        calls[4].words()
        clock.sleep(70)
        return calls[4].decide(b"at last").decode()

    heard = clock.run({4: slow, 6: lambda: meet(calls[6], ""), 7: lambda: meet(calls[7], "")})
    assert set(heard.values()) == {"at last"}
    calls[4].arrive(b"")
    heard = clock.run({6: lambda: meet(calls[6], ""), 7: lambda: meet(calls[7], "")})
    assert set(heard.values()) == {"refused: the three (ranks 4, 6, 7): rank 4 came to call 2, and said nothing more"}
    assert clock.now == 70 + 4 * 30


def test_a_store_that_is_lost_is_not_taken_for_a_missing_rank() -> None:
    class Lost(HashStore):
        def get(self, key: str) -> bytes:
            raise DistStoreError("Connection reset by peer")

    call = RollCall(Lost(), RANKS, 6, "the three", 0.1)
    call.arrive(b"")
    with pytest.raises(DistStoreError, match="Connection reset"):
        call.verdict(refuse)


def test_the_time_that_others_are_given_is_that_of_the_call() -> None:
    store = server("hash").clone()
    RollCall(store, RANKS, 4, "the three", 7.5)
    assert store.timeout == timedelta(seconds=7.5)


def test_who_comes_after_several_calls_hears_what_became_of_each() -> None:
    clock = Clock()
    store: Any = VirtualStore(clock)
    calls = {rank: call_of(store, rank, timeout_s=30) for rank in RANKS}

    def meeting(word: str, ranks: tuple[int, ...] = RANKS) -> set[str]:
        return set(clock.run({rank: lambda rank=rank: meet(calls[rank], word) for rank in ranks}).values())

    expected = [f"refused: the three (ranks 4, 6, 7): rank 7 did not come to call {n} within 30 s" for n in (1, 2, 3)]
    assert [meeting("", ranks=(4, 6)) for _ in expected] == [{refused} for refused in expected]
    assert [meeting("late", ranks=(7,)) for _ in expected] == [{refused} for refused in expected]
    for _ in range(40):
        assert meeting("a") == {"a a a"}
    assert store.num_keys() <= MOST_KEYS


def test_a_claimed_call_is_no_longer_refused_by_the_others() -> None:
    clock = Clock()
    store: Any = VirtualStore(clock)
    calls = {rank: call_of(store, rank, timeout_s=10) for rank in RANKS}

    def slow() -> str:
        calls[4].arrive(b"")
        calls[4].words()
        assert calls[4].claim() is None
        clock.sleep(80)  # twice what the others wait for an answer
        return calls[4].decide(b"at last").decode()

    heard = clock.run({4: slow, 6: lambda: meet(calls[6], ""), 7: lambda: meet(calls[7], "")})
    assert set(heard.values()) == {"at last"}


def test_a_claimed_call_is_waited_for_also_when_ranks_are_missing() -> None:
    clock = Clock()
    store: Any = VirtualStore(clock)
    calls = {rank: call_of(store, rank, timeout_s=10) for rank in RANKS}

    def slow() -> str:
        calls[4].arrive(b"")
        with pytest.raises(MissingRanks):
            calls[4].words()
        assert calls[4].claim() is None
        clock.sleep(30)
        return calls[4].decide(b"7 is missing").decode()

    def second() -> str:
        clock.sleep(5)  # so that the claim comes before it has waited in vain
        return meet(calls[6], "")

    assert clock.run({4: slow, 6: second}) == {4: "7 is missing", 6: "7 is missing"}


@pytest.mark.parametrize(
    ("ranks", "rank", "timeout_s"), [((0, 1), 2, 1.0), ((0, 0), 0, 1.0), ((0,), 0, 0), ((0,), 0, -1)]
)
def test_a_group_that_cannot_meet_is_refused(ranks: tuple[int, ...], rank: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"one of its ranks|timeout_s must be"):
        RollCall(server("hash"), ranks, rank, "all", timeout_s)
