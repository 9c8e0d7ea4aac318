"""Run PPO from a config file and dotted overrides.

Settings are checked as a whole, and prompts are made and checked, before Ray or any actor starts:

    python examples/run_ppo.py --config examples/ppo_cpu.yaml ppo.steps=5 actor.world_size=1 actor.parallel.tp=1
"""

import argparse
import sys
from pathlib import Path

from roll.config import PPOConfig, load_config


def main() -> int:
    """The exit status: 0 done, 2 wrong settings or data, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("ppo_cpu.yaml"))
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="e.g. ppo.steps=5")
    arguments = parser.parse_intermixed_args()  # --config may stand between overrides.
    try:
        config = load_config(PPOConfig, arguments.config, arguments.overrides)
        # Only now: a mistake in the settings is told in a second, these imports take several.
        from roll.data import DataError
        from roll.pipelines.ppo import run_ppo
        from roll.pipelines.prompt_data import load_prompt_data

        data = load_prompt_data(config)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        run_dir = run_ppo(config, data)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; every file that was begun is whole")
        return 130
    print(f"done: {run_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
