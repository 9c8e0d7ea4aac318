"""Train a model on packed data from a config file and dotted overrides.

    python examples/run_sft.py --config examples/sft_cpu.yaml steps=20 parallel.mode=isp parallel.sp=2 parallel.wp=2

starts the ranks by itself. Under torchrun it is one of them:

    torchrun --nproc-per-node 2 examples/run_sft.py --config examples/sft_cpu.yaml
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from roll.cli import exit_status
from roll.config import SFTConfig, load_config


def main() -> int:
    """The exit status: 0 done, 2 wrong settings or data, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("sft_cpu.yaml"))
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="e.g. steps=5")
    arguments = parser.parse_intermixed_args()  # --config may stand between overrides.
    return exit_status(partial(run, arguments.config, arguments.overrides))


def run(path: Path, overrides: list[str]) -> None:
    """Check everything, then train."""
    config = load_config(SFTConfig, path, overrides)
    # Only now: a mistake in the settings is told in a second, these imports take several.
    from roll.pipelines.local_ranks import run_on_ranks
    from roll.pipelines.sft import check_ranks, run_sft
    from roll.pipelines.sft_checkpoint import step_to_resume
    from roll.pipelines.sft_data import load_sft_data

    if "WORLD_SIZE" in os.environ:
        check_ranks(config)
    data = load_sft_data(config)
    step_to_resume(config, data.train)
    if "WORLD_SIZE" in os.environ:
        run_sft(config, data)
    else:
        run_on_ranks(run_sft, config, data, world_size=config.world_size)
        print(f"done: {config.run_dir}")


if __name__ == "__main__":
    sys.exit(main())
