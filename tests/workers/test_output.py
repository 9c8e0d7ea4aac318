"""What workers print: all of it in a file, and every line told once, in order, with role and rank."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roll.workers.output import FollowedOutput, output_file

TALKS = """
import logging, os, sys, warnings
from pathlib import Path
from roll.workers.output import output_file, write_output_to
print("before")
sys.stdout.flush()
write_output_to(output_file(Path(sys.argv[1]) / "logs", "reward", 0))
print("printed", flush=True)
print("to stderr", file=sys.stderr, flush=True)
logging.getLogger("mine").warning("logged")
warnings.warn("a warning")
os.system("echo from a subprocess")
os.write(1, b"no line break")
"""


def test_everything_that_a_process_says_is_in_its_file(tmp_path: Path) -> None:
    file = output_file(tmp_path / "logs", "reward", 0)
    file.parent.mkdir()
    file.write_text("of a worker before it\n")
    talking = subprocess.run([sys.executable, "-c", TALKS, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (talking.stdout, talking.stderr) == ("before\n", "")
    told: list[str] = []
    with FollowedOutput(tmp_path / "logs", told.append):
        pass
    assert told == [
        "reward 0: of a worker before it",
        "reward 0: printed",
        "reward 0: to stderr",
        "reward 0: logged",
        "reward 0: <string>:11: UserWarning: a warning",
        "reward 0: from a subprocess",
        "reward 0: no line break",
    ]


def test_lines_are_told_while_they_are_written(tmp_path: Path) -> None:
    told: list[str] = []
    arrived = threading.Condition()

    def tell(text: str) -> None:
        with arrived:
            told.append(text)
            arrived.notify()

    first, second = output_file(tmp_path, "my_role", 0), output_file(tmp_path, "my_role", 11)
    with FollowedOutput(tmp_path / "not there yet", tell), FollowedOutput(tmp_path, tell), first.open("ab", 0) as file:
        file.write(b"half a ")
        second.write_bytes(b"\xff\r\n")
        with arrived:
            assert arrived.wait_for(lambda: len(told) == 1, timeout=60)
        # What the first file holds has been read before the second, and its other half comes later.
        file.write("Zeile ü\n\n:job_id:01000000\nnot \xfc\n".encode())
        with arrived:
            assert arrived.wait_for(lambda: len(told) == 3, timeout=60)
        file.write(b"the end")
    assert told == ["my_role 11: \ufffd", "my_role 0: half a Zeile ü", "my_role 0: not ü", "my_role 0: the end"]


@pytest.mark.parametrize("rank", [0, 12])
def test_files_have_the_names_of_the_ranks(tmp_path: Path, rank: int) -> None:
    assert output_file(tmp_path, "actor", rank) == tmp_path / f"actor_{rank}.log"
