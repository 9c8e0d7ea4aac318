"""Run PPO, or the algorithm that the config names, from a config file and dotted overrides.

Settings are checked as a whole, and prompts are made and checked, before Ray or any actor starts:

    python examples/run_ppo.py --config examples/ppo_cpu.yaml steps=5 actor.world_size=1 actor.parallel.tp=1
    python examples/run_ppo.py --config examples/grpo_cpu.yaml algorithm.kl_coef=0
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from roll.cli import exit_status
from roll.config import load_config
from roll.pipelines.rl_config import RLConfig


def main() -> int:
    """The exit status: 0 done, 1 a worker failed, 2 wrong settings or data, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("ppo_cpu.yaml"))
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="e.g. steps=5")
    arguments = parser.parse_intermixed_args()  # --config may stand between overrides.
    return exit_status(partial(run, arguments.config, arguments.overrides))


def run(path: Path, overrides: list[str]) -> None:
    """Check everything, then train."""
    config = load_config(RLConfig, path, overrides)
    # Only now: a mistake in the settings is told in a second, these imports take several.
    from roll.pipelines.prompt_data import load_prompt_data
    from roll.pipelines.rl import run_rl

    data = load_prompt_data(config)
    print(f"done: {run_rl(config, data)}")


if __name__ == "__main__":
    sys.exit(main())
