"""A store whose timeouts pass in a time of its own, for ranks that are threads.

The time moves only when every thread waits: then it jumps to the earliest moment at which one of them gives up. So what
a timeout leads to depends on no machine's speed, and takes no time.

    clock = Clock()
    store = VirtualStore(clock)
    clock.run({0: lambda: wait_for_a_word(store.clone()), 1: lambda: clock.sleep(0.7)})
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any


class Clock:
    """The time of the threads that `run` starts, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changed = threading.Condition()
        """Held by whoever changes something that others wait for, who then notifies them."""
        self._threads = 0
        self._waiting: list[tuple[Callable[[], bool], float]] = []

    def run(self, work: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
        """The result of each function, which run side by side."""

        def ended_by(function: Callable[[], Any]) -> Any:
            try:
                return function()
            finally:
                with self.changed:
                    self._threads -= 1
                    self._pass()

        self._threads = len(work)
        with ThreadPoolExecutor(len(work)) as threads:
            jobs = {name: threads.submit(ended_by, function) for name, function in work.items()}
            return {name: job.result() for name, job in jobs.items()}

    def wait(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Whether it happens within `seconds`, at the end of the wait. Called with `changed` held."""
        end = self.now + seconds
        entry = (happened, end)
        self._waiting.append(entry)
        self._pass()
        self.changed.wait_for(lambda: happened() or self.now >= end)
        self._waiting.remove(entry)
        return happened()

    def sleep(self, seconds: float) -> None:
        """Let time pass for this thread."""
        with self.changed:
            self.wait(lambda: False, seconds)

    def _pass(self) -> None:
        """Move on, if all threads wait and none has anything to do now."""
        if len(self._waiting) < self._threads or not self._waiting:
            return
        if not any(happened() or self.now >= end for happened, end in self._waiting):
            self.now = min(end for _, end in self._waiting)
            self.changed.notify_all()


class VirtualStore:
    """What a roll call uses of `torch.distributed.Store`; clones share what is in it."""

    def __init__(self, clock: Clock, held: dict[str, bytes] | None = None) -> None:
        self._clock = clock
        self._held = {} if held is None else held
        self._seconds = 300.0

    def clone(self) -> VirtualStore:
        return VirtualStore(self._clock, self._held)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def num_keys(self) -> int:
        return len(self._held)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._held for key in keys)

    def set(self, key: str, value: str | bytes) -> None:
        with self._clock.changed:
            self._put(key, value.encode() if isinstance(value, str) else value)

    def add(self, key: str, amount: int) -> int:
        with self._clock.changed:
            total = int(self._held.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: str, value: bytes) -> bytes:
        with self._clock.changed:
            if self._held.get(key, b"") == expected.encode():
                self._put(key, value)
            return self._held[key]

    def delete_key(self, key: str) -> bool:
        with self._clock.changed:
            return self._held.pop(key, None) is not None

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._clock.changed:
            if not self._clock.wait(lambda: self.check(keys), self._seconds):
                raise RuntimeError(f"wait timeout after {self._seconds:g} s of virtual time")
            return [self._held[key] for key in keys]

    def _put(self, key: str, value: bytes) -> None:
        self._held[key] = value
        self._clock.changed.notify_all()
