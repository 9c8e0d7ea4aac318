"""What init_dist reads from the environment, and a process that joins with it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from roll.config import ParallelSettings
from roll.parallel.sequence import init_dist
from roll.parallel.sequence.launch import first_host, rendezvous
from roll.parallel.state import parallel_groups
from tests.isolation import ROOT
from tests.launched import launched
from tests.rank_pool import RankPool

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "MASTER_PORT": "29777",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29512"}


def test_slurm() -> None:
    assert rendezvous("slurm", SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "29777",
    }
    assert rendezvous("slurm", SLURM | {"MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"


def test_the_port_of_a_slurm_job() -> None:
    """20000 and the number's remainder by 12000, by hand; neighbours on a node have ports of their own."""
    alone = {name: value for name, value in SLURM.items() if name != "MASTER_PORT"}
    ports = [rendezvous("slurm", alone | {"SLURM_JOB_ID": job})["MASTER_PORT"] for job in ("7", "11999", "12000")]
    assert ports == ["20007", "31999", "20000"]
    assert rendezvous("slurm", alone | {"SLURM_JOB_ID": "48123"})["MASTER_PORT"] == "20123"
    assert rendezvous("slurm", alone | {"SLURM_JOB_ID": "48124"})["MASTER_PORT"] == "20124"
    assert rendezvous("slurm", SLURM | {"SLURM_JOB_ID": "48123"})["MASTER_PORT"] == "29777"
    with pytest.raises(ValueError, match=r"found no SLURM_JOB_ID: start the processes with srun"):
        rendezvous("slurm", alone)
    with pytest.raises(ValueError, match="SLURM_JOB_ID must be a number, got 'x7'"):
        rendezvous("slurm", alone | {"SLURM_JOB_ID": "x7"})


def test_torchrun() -> None:
    assert rendezvous("pytorch", TORCHRUN | SLURM | TORCHRUN) == TORCHRUN


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[007-010,12]", "gpu007"),
        ("gpu[7,9]-ib,login", "gpu7-ib"),
        ("r[1-2]n[03-04],x", "r1n03"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        ("mpi", {}, "launcher must be pytorch or slurm, got 'mpi'"),
        ("pytorch", {"RANK": "0"}, "found no WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: .* with torchrun"),
        (
            "slurm",
            {"SLURM_PROCID": "0"},
            "found no SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST, SLURM_JOB_ID: .* with srun",
        ),
        ("pytorch", TORCHRUN | {"MASTER_PORT": ""}, "found no MASTER_PORT"),
    ],
)
def test_refusals(launcher: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rendezvous(launcher, environment)


def test_an_unknown_init_backend() -> None:
    with pytest.raises(ValueError, match="init_backend must be torch or deepspeed, got 'jax'"):
        init_dist("pytorch", init_backend="jax")  # type: ignore[arg-type]


def test_deepspeed_is_missed_before_joining() -> None:
    """Else torchrun's variables would be. The extra is the distribution's own, under its own name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [each.split(">=")[0] for each in project["optional-dependencies"]["deepspeed"]] == ["deepspeed"]
    with (
        patch.dict(sys.modules, deepspeed=None),
        pytest.raises(ImportError, match=rf"needs DeepSpeed: pip install '{project['name']}\[deepspeed\]'"),
    ):
        init_dist("slurm", "nccl", init_backend="deepspeed")


def test_what_deepspeed_misses_itself_is_not_called_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("import hjson_that_is_missing")
    with patch.object(sys, "path", [str(tmp_path), *sys.path]), pytest.raises(ImportError, match="hjson_that_is"):
        init_dist("slurm", "nccl", init_backend="deepspeed")


def test_a_process_joins_as_the_document_calls_it(tmp_path: Path) -> None:
    """Under Slurm's variables, with a stand-in for DeepSpeed that records how it is told; Megatron-Core stays out."""
    (tmp_path / "deepspeed.py").write_text("def init_distributed(**told): print(told)")
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "os.environ.update(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0', ROLL_PLATFORM='cpu',\n"
        "    SLURM_JOB_NODELIST='localhost', MASTER_PORT='0')\n"
        "from roll.parallel.sequence import *\n"
        "init_dist('slurm', 'gloo', init_backend='deepspeed')\n"
        "init_sequence_parallel(1)\n"
        "print(get_sequence_parallel_world_size(), 'megatron' in sys.modules, 'transformers' in sys.modules)\n"
        "try:\n    init_dist('slurm', 'gloo')\nexcept RuntimeError as error:\n    print(error)\n"
        "import torch.distributed as dist; dist.destroy_process_group()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "{'dist_backend': 'gloo'}",
        "1 False False",
        "torch.distributed is initialised already: call destroy_process_group() before init_dist",
    ]


def joins_in_a_row(agent: bool) -> list[float]:
    """Two blocks with `init_dist` and one of `parallel_groups`: what their ranks sum up to."""
    sums: list[float] = []
    with launched(agent=agent):
        for _ in range(2):
            init_dist(timeout=timedelta(seconds=30))
            with pytest.raises(RuntimeError, match="initialised already: call destroy_process_group"):
                init_dist()
            number = torch.tensor(dist.get_rank() + 1.0)
            dist.all_reduce(number)
            sums.append(float(number))
            dist.destroy_process_group()
        with parallel_groups(ParallelSettings(tp=2), timeout_s=30) as state:
            number = torch.tensor(state.rank + 1.0)
            dist.all_reduce(number, group=state.tp)
            sums.append(float(number))
    return sums


@pytest.mark.parametrize("agent", [True, False])
def test_a_process_joins_again(ranks: RankPool, agent: bool) -> None:
    assert ranks.run(joins_in_a_row, agent, world_size=2) == [[3.0] * 3] * 2


def taken_port() -> str:
    """The message where rank 0 finds its port taken."""
    with launched(agent=False), socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("", 0))
        taken.listen()
        patch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ValueError, match="cannot meet") as error:
            init_dist(timeout=timedelta(seconds=30))
    return str(error.value)


def test_a_port_that_is_taken(ranks: RankPool) -> None:
    (told,) = ranks.run(taken_port, world_size=1)
    assert re.match(r"MASTER_ADDR \S+, MASTER_PORT \d+: the ranks cannot meet there: .*address already in use", told), (
        told
    )
