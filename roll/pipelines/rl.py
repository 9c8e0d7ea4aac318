"""The loop of reinforcement learning, which runs every algorithm.

`RLPipeline.step` is the loop's body. The algorithm says which roles there are, which of their answers it reads, what
responses are worth, and which losses train whom; everything else is a batch sent to a role, or a pure function.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import ray
import torch
from rich.console import Console

from roll.algorithms.loss_term import TOKENS
from roll.algorithms.registry import find_algorithm, make_algorithm
from roll.config import dump_config
from roll.data.micro_batches import with_plan
from roll.data.prompts import PromptSampler
from roll.pipelines.credit import readable, with_credit
from roll.pipelines.data_flow import MADE_BY, fields_of
from roll.pipelines.episodes import EpisodePlayer, RowLimits
from roll.pipelines.prompt_data import PromptData
from roll.pipelines.rl_config import RLConfig
from roll.pipelines.rl_metrics import StepMetrics, rate_zero_notes, step_metrics, update_metrics
from roll.pipelines.roles import Roles, place_roles, ranks_of_roles, start_roles, worker_logs
from roll.pipelines.run_folder import FINAL_MODEL
from roll.pipelines.tracker import EVALUATION, RunTracker, Sample
from roll.pipelines.warm_start import find_model, make_model
from roll.protocol import DataProto
from roll.workers import start_ray
from roll.workers.model_roles import Actor, Critic, Reference
from roll.workers.output import FollowedOutput
from roll.workers.weight_sync import WeightSync


def run_rl(config: RLConfig, data: PromptData, console: Console | None = None) -> Path:
    """Run the algorithm as configured, on a Ray that is there or is started here; the folder of the run.

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
                total_steps=config.steps,
                title=f"{find_algorithm(config.algorithm.name).__name__} on {config.task.name}",
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
        RLPipeline(config, data, roles, tracker).run()
    return config.run_dir


class RLPipeline:
    """The training loop over roles that are running."""

    def __init__(self, config: RLConfig, data: PromptData, roles: Roles, tracker: RunTracker) -> None:
        self.config, self.data, self.roles, self.tracker = config, data, roles, tracker
        self.prompts = PromptSampler(len(data.train), config.prompts_per_step, config.seed)
        self.algorithm = make_algorithm(config.algorithm)
        learned_from = {name for terms in self.algorithm.losses().values() for name in fields_of(terms)}
        self.read = self.algorithm.reads | (learned_from - self.algorithm.makes)
        self.episodes = EpisodePlayer(roles.rollout, roles.reward, RowLimits.of(config, data.tokenizer))
        self.weights = WeightSync(roles.actor, roles.rollout, int(config.rollout.weight_bucket_mb * 2**20))

    def run(self) -> None:
        """All steps, with an evaluation before the first, every `eval_every` steps, and after the last."""
        config = self.config
        for note in rate_zero_notes(config, self.algorithm):
            self.tracker.note(note)
        self.sync_weights()
        self.tracker.log(0, self.evaluate())
        for step in range(1, config.steps + 1):
            metrics, tokens = self.step(step)
            if step % config.eval_every == 0 or step == config.steps:
                metrics |= self.evaluate()
            self.tracker.log(step, metrics, tokens=tokens)
        with self.tracker.phase("save"):
            self.roles.actor.save_hf((config.run_dir / FINAL_MODEL).absolute())

    def step(self, step: int) -> tuple[StepMetrics, int]:
        """One step; its metrics, and the number of tokens in its batch."""
        batch, episode_metrics = self.sample(step)
        batch = self.look_up(batch)
        credit = self.algorithm.credit(readable(batch, self.algorithm.reads))
        learnable = with_credit(batch, credit, self.algorithm.makes)
        self.algorithm.observe(credit.metrics, len(batch))
        metrics = step_metrics(self.learn(step, learnable), batch, credit.metrics) | episode_metrics
        self.sync_weights()
        self.record_samples(step, batch)
        return metrics, int(batch["attention_mask"].sum())

    def sample(self, step: int) -> tuple[DataProto, StepMetrics]:
        """Scored episodes of the current policy on the next prompts, and which have one prompt: `group`."""
        times = self.config.responses_per_prompt
        prompts = self.data.train.select_idxs(next(self.prompts)).repeat(times)
        batch, metrics = self.episodes.play(prompts, seed=self._seed(step), phase=self.tracker.phase)
        if self.config.rollout.sleep_while_training:
            self.roles.rollout.sleep()
        return batch.union(DataProto.from_dict({"group": torch.arange(len(batch)) // times})), metrics

    def look_up(self, batch: DataProto) -> DataProto:
        """Add what the models say of the sampled tokens, where the algorithm reads it: `log_probs` and `entropy`,
        `ref_log_probs`, `values`.
        """
        tokens, roles = batch.select(TOKENS, []), self.roles
        policy = reference = values = None
        with self.tracker.phase("log_probs"):
            if self.read & MADE_BY["actor"]:
                policy = roles.actor.compute_log_probs.submit(self._planned(tokens, roles.actor))
            if roles.reference is not None:
                reference = roles.reference.compute_log_probs.submit(self._planned(tokens, roles.reference))
            if roles.critic is not None:
                values = roles.critic.compute_values.submit(self._planned(tokens, roles.critic))
            if policy is not None:
                batch = batch.union(policy.result())
            if reference is not None:
                batch = batch.update({"ref_log_probs": reference.result()["log_probs"]})
            return batch if values is None else batch.union(values.result())

    def learn(self, step: int, batch: DataProto) -> StepMetrics:
        """The optimizer steps of this step: `epochs` passes over the batch in mini-batches."""
        losses = {role: terms for role, terms in self.algorithm.losses().items() if self.algorithm.trains(role, step)}
        fields = {name for terms in losses.values() for name in fields_of(terms)}
        updates: dict[str, list[StepMetrics]] = {role: [] for role in losses}
        config = self.config
        with self.tracker.phase("train"):
            rows = batch.select(fields, [])
            for mini_batch in rows.make_iterator(config.mini_batch_size, config.epochs, seed=self._seed(step)):
                # One role after the other: they share devices, and would only hold up each other's collectives.
                for name, terms in losses.items():
                    role = self.roles.trained(name)
                    sent = self._planned(mini_batch.select(fields_of(terms)), role)
                    updates[name] += role.train(sent, terms)[:1]
        return update_metrics(updates)

    def sync_weights(self) -> None:
        """Give the rollout role the actor's weights."""
        with self.tracker.phase("sync"):
            self.weights.sync()

    def evaluate(self) -> StepMetrics:
        """Greedy episodes on the held-out prompts."""
        with self.tracker.phase(EVALUATION):
            scored, metrics = self.episodes.play(self.data.held_out, seed=0, greedy=True)
        own = {f"eval/{name}": value for name, value in metrics.items()}
        exact, reward = float(scored["exact"].mean()), float(scored["scores"].mean())
        return {"eval/exact_match": exact, "eval/reward": reward} | own

    def record_samples(self, step: int, batch: DataProto) -> None:
        """Write down the first completions of the step."""
        if step % self.config.sample_every:
            return
        texts = batch.non_tensor_batch
        self.tracker.log_samples(
            step,
            [
                Sample(texts["prompt"][i], texts["response"][i], float(batch["scores"][i]), texts["entry"][i]["answer"])
                for i in range(min(self.config.samples_per_step, len(batch)))
            ],
        )

    def _planned(self, batch: DataProto, role: Actor | Critic | Reference) -> DataProto:
        """The batch with a micro-batch plan for this role."""
        settings = self.config.model_role(role.cluster.role)
        return with_plan(batch, role.cluster.degrees.dp, settings.micro_batch)

    def _seed(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step
