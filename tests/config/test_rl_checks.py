"""Each refusal of a PPO config, word by word: the setting, and the values that do not agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config import ModelConfig, load_config
from roll.pipelines.rl_config import RLConfig
from tests.families import LISTED

Complaints = Callable[..., list[str]]

ROWS = "prompts_per_step 8 x responses_per_prompt 3 = 24 rows"
ROW = "task.max_prompt_tokens 40 + rollout.max_new_tokens 8 = 48"

REFUSALS = {
    # degrees and the model
    "actor.world_size=3": ["actor.world_size: 3 is not a multiple of parallel.tp 2 x pp 1 x cp 1 = 2"],
    "algorithm.critic.parallel.pp=2": [
        "algorithm.critic.world_size: 1 is not a multiple of parallel.tp 1 x pp 2 x cp 1 = 2"
    ],
    "reference.parallel.pp=2": ["reference.world_size: 1 is not a multiple of parallel.tp 1 x pp 2 x cp 1 = 2"],
    "warm_start.parallel.pp=2": ["warm_start.world_size: 1 is not a multiple of parallel.tp 1 x pp 2 x cp 1 = 2"],
    "warm_start.model.config.num_attention_heads=4 actor.parallel.tp=8 actor.world_size=8": [
        "actor.parallel.tp: 8 does not divide the model's num_attention_heads 4; 4 would fit",
        "actor.parallel.tp: 8 does not divide the model's num_key_value_heads 4; 4 would fit",
    ],
    "actor.parallel.tp=8 actor.world_size=8": [
        "actor.parallel.tp: 8 does not divide the model's num_key_value_heads 4; 4 would fit"
    ],
    "warm_start.model.config.vocab_size=65": [
        "actor.parallel.tp: 2 does not divide the model's vocab_size 65; 1 would fit"
    ],
    "warm_start.model.config.intermediate_size=383": [
        "actor.parallel.tp: 2 does not divide the model's intermediate_size 383; 1 would fit"
    ],
    # Heads that tp divides make a hidden size that tp divides, so that one never stands alone.
    "warm_start.model.config.hidden_size=30 warm_start.model.config.num_attention_heads=3 "
    "warm_start.model.config.num_key_value_heads=3 actor.parallel.tp=4 actor.world_size=4 "
    "warm_start.model.config.vocab_size=64": [
        "actor.parallel.tp: 4 does not divide the model's num_attention_heads 3; 1 would fit",
        "actor.parallel.tp: 4 does not divide the model's num_key_value_heads 3; 1 would fit",
        "actor.parallel.tp: 4 does not divide the model's hidden_size 30; 1 would fit",
    ],
    "actor.parallel.pp=4 actor.world_size=8": [
        "actor.parallel.pp: 4 does not divide the model's num_hidden_layers 6; 3 would fit"
    ],
    "warm_start.model.config.num_attention_heads=10 warm_start.model.config.num_key_value_heads=10": [
        "warm_start.model.config.num_attention_heads: 10 does not divide hidden_size 128"
    ],
    "actor.parallel.cp=3 actor.world_size=6": [
        "actor.parallel.cp: 3 does not divide the model's num_attention_heads 8 / tp 2; 2 would fit, or cp_comm "
        "all_gather or ring",
        "actor.parallel.cp: 3 neither divides the model's num_key_value_heads 4 / tp 2 nor is a multiple of it; "
        "2 would fit, or cp_comm all_gather or ring",
    ],
    "algorithm.critic.parallel.mode=fsp": [
        "algorithm.critic.parallel.mode: fsp splits the sequence over tp, which must be more than 1; got tp 1"
    ],
    "algorithm.critic.parallel={mode: isp, sp: 2, wp: 8} algorithm.critic.world_size=4": [
        "algorithm.critic.parallel.wp: 8 does not divide the ranks of a stage, 4 ranks / pp 1 = 4; 4 would fit"
    ],
    "actor.parallel.rank_order=tp-dp-pp": [
        "actor.parallel.rank_order: must name each of tp, cp, ep, dp, pp once, got 'tp-dp-pp'"
    ],
    # the batch
    "mini_batch_size=10": [f"mini_batch_size: 10 does not divide {ROWS}"],
    "task.train_size=7": ["task.train_size: 7 is less than prompts_per_step 8"],
    # lengths
    "rollout.max_new_tokens=25": [
        "task.max_prompt_tokens: task.max_prompt_tokens 40 + rollout.max_new_tokens 25 = 65, "
        "exceeds the model's max_position_embeddings 64"
    ],
    "rollout.max_new_tokens=89 warm_start.model.config.rope_scaling={rope_type: linear, factor: 2.0}": [
        "task.max_prompt_tokens: task.max_prompt_tokens 40 + rollout.max_new_tokens 89 = 129, "
        "exceeds the model's context of 128 tokens (max_position_embeddings 64, scaled by rope_scaling.factor)"
    ],
    "actor.micro_batch.max_tokens=47": [f"actor.micro_batch.max_tokens: 47 is less than one row, {ROW}"],
    "reference.micro_batch.max_tokens=47": [f"reference.micro_batch.max_tokens: 47 is less than one row, {ROW}"],
    "actor.micro_batch={rows: 2, max_tokens: 100}": [
        "actor.micro_batch: exactly one of max_tokens and rows must be set, the other null; "
        "got max_tokens 100 and rows 2"
    ],
    "algorithm.critic.micro_batch={rows: null, max_tokens: null}": [
        "algorithm.critic.micro_batch: exactly one of max_tokens and rows must be set, the other null; got neither"
    ],
    # the model's source
    "warm_start.model.config=null": [
        "warm_start.model: exactly one of path and config must be set, the other null; got neither"
    ],
    "warm_start=null": [
        "model_path: exactly one of model_path and warm_start must be set, the other null; got neither"
    ],
    "model_path=some/folder": [
        "model_path: exactly one of model_path and warm_start must be set, the other null; "
        "got model_path 'some/folder' and a warm_start"
    ],
    "model_path=no/such/folder warm_start=null": ["model_path: no/such/folder: there is no such model folder"],
    "warm_start.name=base": ["warm_start.name: must not be the name of this run, whose folder is runs/base"],
    "warm_start.name=base warm_start.output_dir=runs/../runs": [
        "warm_start.name: must not be the name of this run, whose folder is runs/base"
    ],
    "warm_start.resume=true": ["warm_start.resume: must be false: a warm start that has not ended is run anew"],
    "warm_start.seq_len=65": ["warm_start.seq_len: 65 is over the model's context of 64 tokens"],
    # roles
    "actor.strategy=megatron_infer": ["actor.strategy: must be 'megatron_train', got 'megatron_infer'"],
    "algorithm.critic.strategy=deepspeed": ["algorithm.critic.strategy: must be 'megatron_train', got 'deepspeed'"],
    "reference.strategy=megatron_train": ["reference.strategy: must be 'megatron_infer', got 'megatron_train'"],
    "rollout.engine={name: vllm}": [
        "rollout.engine.name: must be 'transformers', or module:Name of an engine of your own, got 'vllm'"
    ],
    "actor.optimizer=null": ["actor.optimizer: must be a section of settings, got null"],
    "algorithm.critic={world_size: 1, optimizer: {lr: 0.0}}": [
        "algorithm.critic.optimizer.lr: must be greater than 0, got 0.0"
    ],
    "algorithm.critic.optimizer.schedule=cosine": [
        "algorithm.critic.optimizer.total_steps: schedule 'cosine' needs it, got null"
    ],
    "algorithm.critic.optimizer.min_lr=1": ["algorithm.critic.optimizer.min_lr: 1.0 is above lr 0.0001"],
    "actor.optimizer={warmup_steps: 9, total_steps: 8}": ["actor.optimizer.warmup_steps: 9 is more than total_steps 8"],
    # the algorithm
    "algorithm.kl.target=null": ["algorithm.kl.target: kind 'adaptive' needs it, got null"],
    "algorithm.kl.coef=0": ["algorithm.kl.coef: kind 'adaptive' scales it, so it must be above 0, got 0.0"],
    "algorithm.kl.horizon=4.8": [
        f"algorithm.kl.horizon: 4.8 is not above 0.2 times {ROWS}; the weight could turn negative",
    ],
    "prompts_per_step=20 responses_per_prompt=1 mini_batch_size=20 algorithm.kl.horizon=4": [
        "algorithm.kl.horizon: 4.0 is not above 0.2 times prompts_per_step 20 x responses_per_prompt 1 = 20 rows; "
        "the weight could turn negative",
    ],
    "reward.function=my_reward": ["reward.function: must look like package.module:function, got 'my_reward'"],
    "reward.function=a.b:c.d": ["reward.function: must look like package.module:function, got 'a.b:c.d'"],
    "task.prompt='no field'": [
        "task.prompt: must say what is filled in, by plain names in braces such as {question}, got 'no field'"
    ],
    "name='../elsewhere'": [r"name: String should match pattern '^\w[\w.-]*$', got '../elsewhere'"],
}


def split_overrides(text: str) -> list[str]:
    """Overrides that are written after each other; a value in braces or quotes may hold spaces."""
    parts: list[str] = []
    for word in text.split(" "):
        if "=" in word or not parts:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts


@pytest.mark.parametrize("overrides", REFUSALS)
def test_refusal(complaints: Complaints, overrides: str) -> None:
    assert complaints(*split_overrides(overrides)) == REFUSALS[overrides]


def test_base_is_accepted(base: Path) -> None:
    config = load_config(RLConfig, base)
    assert config.rows_per_step == 24


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.parallel.tp=1", "actor.parallel.pp=2"],
        ["actor.world_size=8", "actor.parallel.mode=msp"],
        [
            "actor.micro_batch={rows: 1, max_tokens: null}",
            "algorithm.kl={kind: fixed, coef: 0, target: null, horizon: 1}",
        ],
        [
            "rollout.max_new_tokens=24",
            "algorithm.critic.micro_batch.max_tokens=64",
        ],  # exactly the context, exactly one row
        ["task.train_size=8", "mini_batch_size=24", "algorithm.kl.horizon=4.81"],
        ["actor.micro_batch.rows=1"],  # the budget of tokens was never asked for
        ["task.prompt='{expression} ='"],
        # Rows that do not divide over the ranks of a role, and fewer of them than ranks.
        ["algorithm.critic.world_size=5", "reference.world_size=7", "actor.world_size=16", "rollout.world_size=5"],
        ["algorithm.critic.world_size=16", "rollout.world_size=30", "task.eval_size=7"],
    ],
)
def test_limits_that_just_fit(base: Path, overrides: list[str]) -> None:
    load_config(RLConfig, base, overrides)


def test_a_model_folder_gives_the_architecture(base: Path, complaints: Complaints, model: ModelConfig) -> None:
    folder = base.parent / "model"
    folder.mkdir()
    source = [f"model_path={folder}", "warm_start=null"]
    assert complaints(*source) == [f"model_path: {folder}: the model folder has no config.json"]

    (folder / "config.json").write_text(json.dumps(model.to_hf_dict()), encoding="utf-8")
    assert load_config(RLConfig, base, source).architecture == model
    assert complaints(*source, "actor.parallel.tp=8", "actor.world_size=8") == [
        "actor.parallel.tp: 8 does not divide the model's num_key_value_heads 4; 4 would fit"
    ]

    (folder / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    assert complaints(*source) == [
        f"model_path: {folder}/config.json: model_type: only {LISTED} "
        "are supported, got 'gpt2'; the setting `family` names one of your own, as module:Name"
    ]


@pytest.fixture
def model(base: Path) -> ModelConfig:
    return load_config(RLConfig, base).architecture
