"""The README's way onto a cluster: `ray start --head`, then `ray job submit` of the same file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.isolation import ROOT
from tests.pipelines.conftest import RAY, Head
from tests.pipelines.small_run import SMALL
from tests.processes import PATIENCE_S, wait_until

FUNCTION = "tests.pipelines.small_run:fails_in_step_three"


@pytest.mark.slow
def test_a_job_with_the_same_seed_writes_the_same_metrics_until_a_bad_reward_function_ends_it(
    head: Head, first_run: Path
) -> None:
    output_dir = first_run.parent
    script = ["python", "examples/run_ppo.py", f"output_dir={output_dir}", "name=job"]
    submit = [RAY, "job", "submit", "--address", head.job_server]
    # The job server takes jobs some seconds after the head has started.
    wait_until(lambda: subprocess.run([*submit, "--", "true"], capture_output=True, check=False).returncode == 0)
    submit += ["--working-dir", str(ROOT), "--", *script, *SMALL, "steps=3", f"reward.function={FUNCTION}"]
    outcome = subprocess.run(submit, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    output = outcome.stdout + outcome.stderr
    assert "step 2/3" in output, output
    assert "warm start" not in output, "the first run's is there"
    assert (output_dir / "job" / "metrics.jsonl").read_bytes() == (first_run / "metrics.jsonl").read_bytes()
    assert outcome.returncode == 1, output
    assert "fails_in_step_three returned 1 rewards for 16 responses" in output
    assert "reward rank 0" in output
    # What the function prints is on the console, and in the file that the run names.
    logs = output_dir / "job" / "logs"
    assert f"what workers print is below, and in {logs}\n" in output
    log = (logs / "reward_0.log").read_text()
    said = [f"call {call} of a reward function" for call in range(1, 7)]
    for line in [*said, "to stderr", "logged", "from a subprocess", "last words"]:
        assert f"reward 0: {line}\n" in output, output
        assert line in log
    assert "UserWarning: a warning" in output
    assert [line for line in log.splitlines() if line in said] == said
