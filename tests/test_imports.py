"""What a package may load: a user of one layer does not pay for, or install, what only a later layer needs.

import-linter reads the source; this runs the imports, so it also sees what a third-party package loads.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(statement: str, candidates: list[str]) -> list[str]:
    """Those of `candidates` that are in sys.modules after `statement` has run in a new interpreter."""
    program = f"import sys\n{statement}\nprint(*[name for name in {candidates!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import roll", ["torch", "ray", "megatron", "transformers", "pydantic"]),
        ("import roll.families", ["torch", "ray", "megatron", "transformers", "pydantic"]),
        ("import roll.config", ["torch", "ray", "megatron", "transformers"]),
        (
            "from roll.pipelines.rl_config import RLConfig\nfrom roll.algorithms.registry import *\n"
            "from roll.config.engine import default_engine\ndefault_engine()\n"
            "[settings_of(name) for name in ALGORITHMS]",
            ["torch", "ray", "megatron", "transformers"],
        ),
        ("import roll.protocol", ["ray", "megatron", "transformers"]),
        ("from roll.protocol import DataProtoFuture, from_verl", ["ray", "megatron", "transformers", "verl"]),
        ("import roll.data", ["torch", "ray", "megatron", "transformers", "pyarrow"]),
        (
            "from roll.data import PackBatchSampler, PackedLoader, TokenizedFolder, load_batch, unpack_data",
            ["ray", "megatron", "transformers", "pyarrow"],
        ),
        ("from roll.data import TextFiles", ["ray", "megatron", "pyarrow"]),
        ("import roll.parallel", ["ray", "transformers"]),
        ("import roll.parallel.sequence", ["ray", "megatron", "transformers"]),
        ("import roll.strategies", ["ray"]),
        ("from roll.data.tasks import ReasoningTask", ["reasoning_gym", "matplotlib"]),
        ("from roll.workers.model_roles import ActorWorker", ["reasoning_gym", "matplotlib"]),
        ("from roll.strategies import MegatronInferStrategy, MegatronTrainStrategy", ["ray"]),
    ],
)
def test_an_import_leaves_alone(statement: str, forbidden: list[str]) -> None:
    assert loaded_by(statement, forbidden) == []


def test_a_loaded_module_is_seen() -> None:
    assert loaded_by("import json.decoder", ["json", "ray"]) == ["json"]
