"""Which of several failures is the cause."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError

from roll.workers.errors import CallTimedOut
from roll.workers.failure import Failure, failure_of, first_cause, worker_failed

GLOO = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:54961."
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
OWNER = "ray.exceptions.OwnerDiedError: Failed to retrieve object 00ff. The owner of the object has exited."


def raised(rank: int, text: str, when: float) -> Failure:
    return Failure("actor", rank, "train_step", f"Traceback\n{text}", when, died=False)


def dead(rank: int, when: float) -> Failure:
    return Failure("actor", rank, "train_step", "The actor died. Connection reset by peer.", when, died=True)


@pytest.mark.parametrize("lost", [GLOO, NCCL, STORE, OWNER])
def test_lost_peer_is_no_cause_although_it_is_seen_first(lost: str) -> None:
    assert raised(0, lost, 1.0).follows_from_a_peer
    assert first_cause([raised(0, lost, 1.0), dead(1, 2.0)]).rank == 1
    assert first_cause([raised(0, lost, 1.0), raised(1, "ValueError: x", 2.0)]).rank == 1


def test_a_connection_of_the_role_itself_is_a_cause() -> None:
    own = "requests.exceptions.ConnectionError: [Errno 111] Connection refused"
    assert not raised(0, own, 1.0).follows_from_a_peer
    assert first_cause([raised(1, GLOO, 0.5), raised(0, own, 1.0)]).rank == 0


def test_earliest_of_equal_failures() -> None:
    assert first_cause([raised(0, "ValueError: late", 2.0), raised(3, "ValueError: early", 1.0)]).rank == 3
    assert first_cause([dead(2, 5.0), dead(1, 6.0)]).rank == 2
    assert first_cause([raised(0, GLOO, 2.0), raised(3, GLOO, 1.0)]).rank == 3


def test_message_has_the_cause_in_full_and_a_line_for_each_other_rank() -> None:
    again = Failure("actor", 3, "alive", "The actor died.", 3.5, died=True)
    elsewhere = Failure("rollout", 0, "generate", "Traceback\nray.exceptions.OwnerDiedError: gone", 1.0, died=False)
    failures = [raised(0, GLOO, 1.0), elsewhere, raised(2, "ValueError: x", 2.0), dead(3, 3.0), again]
    error = worker_failed(failures, missing=["actor rank 1", "actor rank 4"])
    assert (error.role, error.rank, error.method) == ("actor", 3, "train_step")
    assert str(error).splitlines() == [
        "actor rank 3 failed in train_step",
        "",
        "The actor died. Connection reset by peer.",
        "",
        f"actor rank 0: {GLOO}",
        "rollout rank 0: ray.exceptions.OwnerDiedError: gone",
        "actor rank 2: ValueError: x",
        "no answer yet from actor rank 1, actor rank 4",
    ]
    assert str(worker_failed([again], [])).startswith("actor rank 3 failed between calls\n\nThe actor died.")


def test_an_actor_that_ray_killed_for_its_memory_has_died() -> None:
    killed = failure_of(
        OutOfMemoryError("\x1b[31mTask was killed due to the node running low on memory.\x1b[0m"), "a", 1, "x"
    )
    assert killed.died and killed.text == "Task was killed due to the node running low on memory."
    assert first_cause([raised(0, "ValueError: x", 1.0), killed]) is killed
    assert not failure_of(ActorUnavailableError("the network is slow", None), "a", 1, "x").died


def test_timeout_message() -> None:
    assert str(CallTimedOut("critic", "train_step", 1.5, (0, 2), 4)) == (
        "critic: train_step did not end within 1.5 s; no answer from rank 0, 2 (of 4)"
    )
