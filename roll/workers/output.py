"""Output of workers: each writes its standard output and error into a file, and the driver follows the files.

    run_dir/logs/reward_0.log      rank 0 of the role reward: print, logging, warnings, and what C libraries say

Ray has a way of its own, which loses the last lines of a worker that is stopped: those before an error. A file has them
all, and the driver reads what is left when the workers are gone.

The files are where the workers run. Where hosts share no file system, the driver sees those of its own host.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

POLL_S = 0.2
"""Pause between two looks at the files."""
RAYS_MARKS = (":actor_name:", ":job_id:", ":task_name:")
"""Lines that Ray writes into a worker's output for its own log monitor."""


def output_file(folder: Path, role: str, rank: int) -> Path:
    """The file of one worker."""
    return folder / f"{role}_{rank}.log"


def write_output_to(path: Path) -> None:
    """Let this process append its standard output and error to a file.

    Both are redirected as file descriptors, so subprocesses and C libraries write there as well. In a worker of Ray
    Python has no buffer before them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


class FollowedOutput:
    """Tells each line that is written to the files of a folder, from `with` to its end, lines of one file in order.

    `tell` is called from a thread of its own, with lines such as `reward 0: text`. At the end everything is told that
    has been written until then, a last line without a line break too.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="worker output", daemon=True)

    def __enter__(self) -> FollowedOutput:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self._tell_new_lines()
        self._tell_new_lines()
        for path, rest in self._rest.items():
            if rest:
                self._tell_line(path, rest)

    def _tell_new_lines(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            self._read[path] = self._read.get(path, 0) + len(content)
            *lines, self._rest[path] = (self._rest.get(path, b"") + content).split(b"\n")
            for line in lines:
                self._tell_line(path, line)

    def _tell_line(self, path: Path, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if text.strip() and not text.startswith(RAYS_MARKS):
            role, _, rank = path.stem.rpartition("_")
            self._tell(f"{role} {rank}: {text}")
