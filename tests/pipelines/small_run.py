"""A PPO run that is over in seconds: overrides of examples/ppo_cpu.yaml."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "task.train_size=64",
    "task.eval_size=16",
    "warm_start.steps=2",
    "warm_start.batch_size=8",
    "ppo.steps=2",
    "ppo.prompts_per_step=8",
    "ppo.responses_per_prompt=2",
    "ppo.mini_batch_size=8",
    "ppo.critic_warmup_steps=0",
    "ppo.eval_every=1",
    "reward.function=roll.data.tasks:score_responses",  # Partial scores, so that there is something to learn from.
]
