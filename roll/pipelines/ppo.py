"""Proximal policy optimisation (Schulman et al. 2017) with a critic and a KL penalty to a frozen reference.

`PPOPipeline.step` is the algorithm; everything it calls is a batch sent to a role, or a pure function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import ray
from rich.console import Console

from roll.algorithms import make_kl_controller
from roll.config import PPOConfig, dump_config
from roll.data.micro_batches import with_plan
from roll.data.prompts import PromptSampler
from roll.data.tokenizer import padding_id
from roll.pipelines.episodes import EpisodePlayer, RowLimits
from roll.pipelines.experience import StepMetrics, add_advantages
from roll.pipelines.prompt_data import PromptData
from roll.pipelines.roles import Roles, place_roles, ranks_of_roles, start_roles, worker_logs
from roll.pipelines.run_folder import FINAL_MODEL
from roll.pipelines.tracker import EVALUATION, RunTracker, Sample
from roll.pipelines.warm_start import find_model, make_model
from roll.protocol import DataProto
from roll.strategies.progress import end_of_schedule, rate_zero_message
from roll.workers import Role, start_ray
from roll.workers.output import FollowedOutput
from roll.workers.weight_sync import sync_weights


def run_ppo(config: PPOConfig, data: PromptData, console: Console | None = None) -> Path:
    """Run PPO as configured, on a Ray that is there or is started here; the folder of the run.

    Whatever ends it (success, an error, Ctrl-C), no actor is left, and every file is whole.

    Args:
        data: from `load_prompt_data(config)`, which finds what is wrong before anything is started.

    Raises:
        ValueError: Ray has fewer devices than the roles need.
        WorkerError: a role failed; with the traceback of the rank that failed first.
    """
    console = console or Console()
    most_ranks = max(ranks_of_roles(config).values())
    with ExitStack() as cleanup:
        # Before the warm start, which takes minutes: a cluster that is not there is known first.
        if start_ray(config.ray.address, config.ray.num_cpus or most_ranks, config.ray.connect_timeout_s):
            cleanup.callback(ray.shutdown)
        model = find_model(config)
        if model is None:
            assert config.warm_start is not None and data.warm_start is not None
            model = make_model(config.warm_start, data.warm_start, console)
        tracker = cleanup.enter_context(
            RunTracker(
                config.run_dir,
                config_yaml=dump_config(config),
                total_steps=config.ppo.steps,
                title=f"PPO on {config.task.name}",
                console=console,
            )
        )
        for note in data.notes:
            tracker.note(note)
        tracker.note(f"what workers print is below, and in {config.run_dir / 'logs'}")
        # Left after the placement: whatever a worker has said before its end is told.
        cleanup.enter_context(FollowedOutput(worker_logs(config), tracker.note))
        placement = cleanup.enter_context(place_roles(config))
        with tracker.phase("start"):
            roles = start_roles(config, model.absolute(), data, placement)
        PPOPipeline(config, data, roles, tracker).run()
    return config.run_dir


class PPOPipeline:
    """The training loop over roles that are running."""

    def __init__(self, config: PPOConfig, data: PromptData, roles: Roles, tracker: RunTracker) -> None:
        self.config, self.data, self.roles, self.tracker = config, data, roles, tracker
        self.prompts = PromptSampler(len(data.train), config.ppo.prompts_per_step, config.seed)
        kl = config.ppo.kl
        self.kl_controller = make_kl_controller(kl.kind, kl.coef, kl.target, kl.horizon)
        limits = RowLimits(config.task.max_prompt_tokens, config.rollout.max_new_tokens, padding_id(data.tokenizer))
        self.episodes = EpisodePlayer(roles.rollout, roles.reward, limits)
        self.weights_version = 0

    def run(self) -> None:
        """All steps, with an evaluation before the first, every `eval_every` steps, and after the last."""
        ppo = self.config.ppo
        for note in rate_zero_notes(self.config):
            self.tracker.note(note)
        self.sync_weights()
        self.tracker.log(0, self.evaluate())
        for step in range(1, ppo.steps + 1):
            metrics, tokens = self.step(step)
            if step % ppo.eval_every == 0 or step == ppo.steps:
                metrics |= self.evaluate()
            self.tracker.log(step, metrics, tokens=tokens)
        with self.tracker.phase("save"):
            self.roles.actor.save_hf((self.config.run_dir / FINAL_MODEL).absolute())

    def step(self, step: int) -> tuple[StepMetrics, int]:
        """One step of PPO; its metrics, and the number of tokens in its batch."""
        batch, episode_metrics = self.sample(step)
        batch = self.look_up(batch)
        batch, metrics = add_advantages(batch, self.config.ppo, self.kl_controller.value)
        if "kl" in metrics:
            self.kl_controller.update(metrics["kl"], len(batch))
        # Where both name a metric (entropy), it is the sampling policy's: the losses' is a mean over later ones.
        metrics = self.learn(step, batch) | metrics | episode_metrics
        self.sync_weights()
        self.record_samples(step, batch)
        return metrics, int(batch["attention_mask"].sum())

    def sample(self, step: int) -> tuple[DataProto, StepMetrics]:
        """Scored episodes of the current policy on the next prompts, and their metrics."""
        prompts = self.data.train.select_idxs(next(self.prompts)).repeat(self.config.ppo.responses_per_prompt)
        played = self.episodes.play(prompts, seed=self._seed(step), phase=self.tracker.phase)
        if self.config.rollout.sleep_while_training:
            self.roles.rollout.sleep()
        return played

    def look_up(self, batch: DataProto) -> DataProto:
        """Add what the models say of the sampled tokens: `log_probs`, `entropy`, `values`; and of a reference, if there
        is one, `ref_log_probs`.
        """
        tokens = batch.select(["input_ids", "attention_mask", "response_mask"], [])
        roles = self.roles
        with self.tracker.phase("log_probs"):
            policy = roles.actor.compute_log_probs.submit(self._planned(tokens, roles.actor))
            reference = None
            if roles.reference is not None:
                reference = roles.reference.compute_log_probs.submit(self._planned(tokens, roles.reference))
            values = roles.critic.compute_values.submit(self._planned(tokens, roles.critic))
            batch = batch.union(policy.result())
            if reference is not None:
                batch = batch.union(DataProto.from_dict({"ref_log_probs": reference.result()["log_probs"]}))
            return batch.union(values.result())

    def learn(self, step: int, batch: DataProto) -> StepMetrics:
        """The optimizer steps of this step: `epochs` passes over the batch in mini-batches."""
        ppo, roles = self.config.ppo, self.roles
        trained = batch.select(
            ["input_ids", "attention_mask", "response_mask", "log_probs", "values", "advantages", "returns"], []
        )
        actor_steps: list[StepMetrics] = []
        critic_steps: list[StepMetrics] = []
        with self.tracker.phase("train"):
            for mini_batch in trained.make_iterator(ppo.mini_batch_size, ppo.epochs, seed=self._seed(step)):
                # One role after the other: they share devices, and would only hold up each other's collectives.
                critic_steps += roles.critic.train_values(self._planned(mini_batch, roles.critic), ppo)[:1]
                if step > ppo.critic_warmup_steps:
                    actor_steps += roles.actor.train_policy(self._planned(mini_batch, roles.actor), ppo)[:1]
        return _means("", actor_steps) | _means("critic/", critic_steps)

    def sync_weights(self) -> None:
        """Give the rollout role the actor's weights."""
        self.weights_version += 1
        bucket_bytes = int(self.config.rollout.weight_bucket_mb * 2**20)
        with self.tracker.phase("sync"):
            sync_weights(self.roles.actor, self.roles.rollout, self.weights_version, bucket_bytes)

    def evaluate(self) -> StepMetrics:
        """Greedy episodes on the held-out prompts."""
        with self.tracker.phase(EVALUATION):
            scored, metrics = self.episodes.play(self.data.held_out, seed=0, greedy=True)
        own = {f"eval/{name}": value for name, value in metrics.items()}
        exact, reward = float(scored["exact"].mean()), float(scored["scores"].mean())
        return {"eval/exact_match": exact, "eval/reward": reward} | own

    def record_samples(self, step: int, batch: DataProto) -> None:
        """Write down the first completions of the step."""
        ppo = self.config.ppo
        if step % ppo.sample_every:
            return
        texts = batch.non_tensor_batch
        self.tracker.log_samples(
            step,
            [
                Sample(texts["prompt"][i], texts["response"][i], float(batch["scores"][i]), texts["entry"][i]["answer"])
                for i in range(min(ppo.samples_per_step, len(batch)))
            ],
        )

    def _planned(self, batch: DataProto, role: Role) -> DataProto:
        """The batch with a micro-batch plan for this role."""
        return with_plan(batch, role.cluster.degrees.dp, getattr(self.config, role.cluster.role).micro_batch)

    def _seed(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step


def rate_zero_notes(config: PPOConfig) -> Iterator[str]:
    """One sentence for each trained role whose schedule decays to 0 before the run ends."""
    ppo = config.ppo
    updates_per_step = ppo.epochs * ppo.rows_per_step // ppo.mini_batch_size
    steps = {"actor": max(0, ppo.steps - ppo.critic_warmup_steps), "critic": ppo.steps}
    for role in ("actor", "critic"):
        optimizer = getattr(config, role).optimizer
        end = end_of_schedule(optimizer)
        if end is not None and steps[role] * updates_per_step > end:
            yield f"{role}: {rate_zero_message(optimizer, end)}"


def _means(prefix: str, steps: list[StepMetrics]) -> StepMetrics:
    """Means over optimizer steps, under `prefix`: of each metric over the steps that have it (a skipped one: few)."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {prefix + name: float(np.mean([step[name] for step in steps if name in step])) for name in names}
