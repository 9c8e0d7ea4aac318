"""The README's way onto a cluster: `ray start --head`, then `ray job submit` of the same file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.isolation import ROOT
from tests.pipelines.conftest import RAY, Head
from tests.pipelines.small_run import SMALL
from tests.processes import PATIENCE_S, wait_until


@pytest.mark.slow
def test_the_same_file_runs_as_a_ray_job_and_the_actor_may_be_a_pipeline(head: Head, first_run: Path) -> None:
    output_dir = first_run.parent
    script = ["python", "examples/run_ppo.py", "--config", "examples/ppo_cpu_pp2.yaml", f"output_dir={output_dir}"]
    submit = [RAY, "job", "submit", "--address", head.job_server]
    # The job server takes jobs some seconds after the head has started.
    wait_until(lambda: subprocess.run([*submit, "--", "true"], capture_output=True, check=False).returncode == 0)
    submit += ["--working-dir", str(ROOT), "--", *script, "name=job", *SMALL]
    outcome = subprocess.run(submit, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "step 2/2" in outcome.stdout
    assert (output_dir / "job" / "final" / "model.safetensors.index.json").is_file(), "one file for each stage"
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (output_dir / "job", first_run)
    )
    assert len(ours) == 3
    # The same numbers up to rounding, as long as rounding changes no sampled token: the first step's.
    for name in ("reward", "entropy", "loss", "grad_norm", "critic/loss"):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4, abs=1e-5), name
