"""Clusters that are not there, known in time, with their address, in our words; and a Ray that did not start."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll.config import ConfigError
from roll.workers.connection import GAVE_UP, check_cluster, start_ray, started


@pytest.fixture(autouse=True)
def _no_ray_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Ray of other tests in this process, which `start_ray` would take."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@contextmanager
def listening(backlog: int = 16) -> Iterator[tuple[socket.socket, str]]:
    """A port that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with listening() as (_, address):
        return address


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("nonsense", "must be host:port"),
        ("127.0.0.1:http", "must be host:port"),
        ("127.0.0.1:99999", "must be host:port"),
        ("127.0.0.1", "must be host:port"),
        ("ray://127.0.0.1", "must be host:port"),
        ("a b:6379", "must be host:port"),
        ("no-such-host.invalid:6379", "no Ray cluster answers at"),
    ],
)
def test_addresses_of_no_cluster(address: str, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ray.address: {found}.*{address}.*set no address"):
        start_ray(address, 1)


def test_a_place_in_brackets() -> None:
    """Refused, or impossible without IPv6; a name that nobody knows is Errno -2."""
    with pytest.raises(ConfigError, match=r"^ray.address: no Ray cluster answers at '\[::1\]:1' \(\[Errno \d"):
        start_ray("[::1]:1", 1)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_port_that_nobody_serves(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    address = scheme + closed_port()
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (None, "", "auto"):
        with pytest.raises(ConfigError, match=f"^RAY_ADDRESS: no Ray cluster answers at '{address}' .*refused"):
            start_ray(given, 1)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match=f"^ray.address: no Ray cluster answers at '{address}' .*refused"):
        start_ray(address, 1)


def test_a_port_that_is_silent_at_the_second_place_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place refuses, as ::1 does where localhost is both and Ray listens on 127.0.0.1."""
    with listening() as (server, address):
        places = [("127.0.0.1", int(closed_port().rpartition(":")[2])), server.getsockname()]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(ConfigError, match=f"at '{address}' within 1 s"):
            check_cluster("ray.address", address, 1)


def test_what_ray_refuses_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^ray.address: no Ray cluster answers at 'nowhere://a' \(.*nowhere://a\): "):
        check_cluster("ray.address", "nowhere://a", 300)


def test_a_host_that_drops_packets() -> None:
    # Linux leaves connection attempts unanswered while the queue of those not yet taken is full.
    with listening(backlog=0) as (server, address):
        waiting = [socket.socket() for _ in range(3)]
        try:
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            with pytest.raises(ConfigError, match=f"no Ray cluster answers at '{address}' .*timed out"):
                check_cluster("ray.address", address, 1)
        finally:
            for client in waiting:
                client.close()


def test_a_port_where_something_else_listens() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_address[1]}"
            with pytest.raises(ConfigError, match=f"ray.address: no Ray cluster answers at '{address}'"):
                check_cluster("ray.address", address, 3)
        finally:
            server.shutdown()
            thread.join()


def test_a_ray_that_gave_up_on_a_busy_machine_is_started_again() -> None:
    outcomes = iter([Exception(f"{GAVE_UP[0]}. This"), AssertionError(f"exit status 1\n{GAVE_UP[1]}"), None])
    calls = []

    def start() -> str:
        calls.append(1)
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return "Ray"

    assert started(start) == "Ray" and len(calls) == 3


@pytest.mark.parametrize(("said", "calls"), [("no port is free", 1), (GAVE_UP[0], 3)])
def test_another_error_and_the_last_one_are_raised(said: str, calls: int) -> None:
    made = []

    def start() -> None:
        made.append(1)
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said):
        started(start, attempts=3)
    assert len(made) == calls


def test_a_local_ray_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([Exception(GAVE_UP[0]), None])
    asked = []

    def init(address: str, **options: object) -> None:
        asked.append(address)
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr("ray.init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert start_ray(None, num_cpus=1) and asked == ["local", "local"]
