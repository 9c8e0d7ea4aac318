"""transformers' own model in one process: the reference that parallel strategies are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from roll.checkpoint.checksums import check_files, checksums_of, read_checksums, write_checksums
from roll.checkpoint.companions import announced_companions, refuse_to_delete, write_companions
from roll.checkpoint.folders import Kind, alone, new_folder
from roll.checkpoint.hf_writer import ShardWriter, write_index
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ModelConfig, OptimizerSettings, StrategySettings, expand_path
from roll.data.micro_batches import cut_micro_batches, join_results
from roll.errors import UserError
from roll.models.family_tensors import to_family
from roll.models.hf_layout import hf_shapes
from roll.models.transformers_model import (
    as_family_names,
    build_transformers_model,
    canonical_tensors,
    forget_lengths,
    in_transformers,
    load_tensors,
)
from roll.models.weight_rules import is_trained
from roll.platform import get_platform
from roll.protocol import DataProto, check_model_batch, count_loss_tokens
from roll.strategies.base import Metrics, TrainStrategy, check_response_mask, different_names
from roll.strategies.buckets import in_buckets
from roll.strategies.learning_rate import learning_rate
from roll.strategies.master_weights import MasterWeights
from roll.strategies.output import ForwardFunc, LossFunc
from roll.strategies.padded_output import PaddedOutput
from roll.strategies.progress import EndOfSchedule, continued_steps, progress_of


class HfStrategy(TrainStrategy):
    """transformers' own model (for InternLM2 its Llama), on padded rows as they are: slower, and hard to get wrong.

    It shares with the Megatron strategies only the interface and the loss contract; layers, log-probs, optimizer and
    schedule are torch's and transformers' own.
    """

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self.model_config = ModelConfig.from_folder(settings.model_path, settings.family)
        self.device = get_platform().device()
        self.trained: MasterWeights | None = None
        self.steps = 0

    def initialize(self) -> None:
        settings = self.settings
        dtype = getattr(torch, settings.dtype)
        self.network = build_transformers_model(self.model_config, dtype).to(self.device)
        self.value_head = nn.Linear(self.model_config.hidden_size, 1, bias=False, device=self.device, dtype=dtype)
        source = tensor_source(
            settings.model_path, self.model_config, init=settings.init, head=settings.head, seed=settings.seed
        )
        self._companions = announced_companions(settings.model_path)
        shapes = hf_shapes(self.model_config, settings.head)
        for name in shapes:
            self.update_weights(dict(to_family(self.model_config, [(name, source.part(name, None, 0, 1))])))
        names = in_transformers(self.model_config).family.names
        for name, parameter in self._weights():
            canonical = names.canonical(name)
            assert canonical is not None, name
            parameter.requires_grad_(is_trained(canonical))
        if settings.optimizer is not None:
            self.trained = MasterWeights(dict(self._weights()), settings.optimizer)
            self._end_of_schedule = EndOfSchedule(settings.optimizer)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """What this model is made of, under transformers' names."""
        for name, parameter in self.network.named_parameters():
            if name != "lm_head.weight" or self.settings.head == "lm":
                yield name, parameter
        if self.settings.head == "value":
            yield "v_head.weight", self.value_head.weight

    def update_weights(self, bucket: Mapping[str, Tensor]) -> None:
        """Take over weights in Hugging Face layout, all or some of them.

        Raises:
            ValueError: a tensor is unknown or has another shape.
        """
        rest, filled = dict(bucket), set()
        if self.settings.head == "value" and "v_head.weight" in rest:
            with torch.no_grad():
                self.value_head.weight.copy_(rest.pop("v_head.weight"))
            filled.add("v_head.weight")
        filled |= load_tensors(self.network, self.model_config, rest.items())
        if self.trained is not None:
            self.trained.follow_model(filled & self.trained.weights.keys())

    def get_data_input(self, batch: DataProto, keys: Sequence[str] | None = None) -> DataProto:
        if keys is not None:
            batch = batch.select(keys)
        check_model_batch(
            batch,
            vocab_size=self.model_config.vocab_size,
            max_positions=self.model_config.context_length,
        )
        return batch.to(self.device)

    @torch.no_grad()
    def forward_step(self, batch: DataProto, forward_func: ForwardFunc) -> dict[str, Tensor]:
        micro_batches, order = cut_micro_batches(self.get_data_input(batch), self.settings.micro_batch, 0)
        return join_results([forward_func(part, self.inner_forward_step(part)) for part in micro_batches], order)

    def inner_forward_step(self, micro_batch: DataProto) -> PaddedOutput:
        """The model's output for one micro-batch."""
        mask = micro_batch["attention_mask"]
        inputs = {
            # Padding may hold anything, also ids that no embedding has.
            "input_ids": micro_batch["input_ids"].masked_fill(mask == 0, 0),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        }
        tensor = self._run_rows(inputs)
        return PaddedOutput(tensor, mask.bool(), head=self.settings.head, temperature=self.settings.temperature)

    def _run_rows(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What `_run` gives, also for no rows, and for rows whose RoPE depends on their length."""
        rows, width = inputs["input_ids"].shape
        if rows == 0:  # transformers cannot run no rows: one runs, left out of the output but not of the graph.
            return self._run({name: tensor.new_ones(1, width) for name, tensor in inputs.items()})[:0]
        scaling = self.model_config.rope_scaling
        if scaling is None or scaling.rope_type != "dynamic":
            return self._run(inputs)
        outputs = []
        for row in range(rows):  # One by one: together, transformers gives all rows the base of the longest.
            forget_lengths(self.network)
            outputs.append(self._run({name: tensor[row : row + 1] for name, tensor in inputs.items()}))
        return torch.cat(outputs)

    def _run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits `[b, S, V]`, or with a value head values `[b, S]`."""
        if self.settings.head == "value":
            hidden = self.network.model(**inputs, use_cache=False).last_hidden_state
            return self.value_head(hidden).float().squeeze(-1)
        return self.network(**inputs, use_cache=False).logits

    def _training(self, what: str) -> tuple[OptimizerSettings, MasterWeights]:
        """What updates the weights. Raises ValueError, before anything is touched, if there is no optimizer."""
        if self.settings.optimizer is None:
            raise UserError(f"strategy hf {what} only when `optimizer` is set; got null")
        assert self.trained is not None, "initialize() comes first"
        return self.settings.optimizer, self.trained

    def train_step(self, batch: DataProto, loss_func: LossFunc) -> Metrics:
        settings, trained = self._training("trains")
        check_response_mask(batch)
        batch = self.get_data_input(batch)
        normalizers = count_loss_tokens(batch["response_mask"][:, 1:])
        lr = learning_rate(settings, self.steps)
        if normalizers.tokens == 0:
            return {"lr": lr, "skipped_steps": 1.0}
        trained.zero()
        totals: Metrics = {}
        for micro_batch in cut_micro_batches(batch, self.settings.micro_batch, 0)[0]:
            loss, metrics = loss_func(micro_batch.with_normalizers(normalizers), self.inner_forward_step(micro_batch))
            loss.backward()
            trained.collect()
            if totals and totals.keys() != {*metrics, "loss"}:
                raise UserError(different_names([totals, {**metrics, "loss": loss}]))
            for name, value in (metrics | {"loss": loss}).items():
                totals[name] = totals.get(name, 0.0) + float(torch.as_tensor(value).detach())
        grad_norm = trained.clip()
        stepped = math.isfinite(grad_norm)
        if stepped:
            self._end_of_schedule.check(self.steps)
            trained.step(lr)
            self.steps += 1
        return totals | {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not stepped)}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, fp32 gradient) after `train_step`, clipped."""
        _, trained = self._training("has gradients")
        yield from canonical_tensors(self.model_config, trained.gradients())

    def model_update(self, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
        yield from in_buckets(as_family_names(self.model_config, dict(self._weights())), bucket_bytes)

    def save_checkpoint(self, folder: str | Path) -> None:
        settings, trained = self._training("saves a checkpoint")
        state = trained.state_dict() | {"progress": progress_of(settings, self.steps)}
        with new_folder(expand_path(folder), Kind.CHECKPOINT, alone) as unfinished:
            with (unfinished / "state.pt").open("wb") as file:  # By its name, torch hides the system's reason.
                torch.save(state, file)
            write_checksums(unfinished, checksums_of(unfinished, ["state.pt"]))

    def load_checkpoint(self, folder: str | Path) -> None:
        settings, trained = self._training("loads a checkpoint")
        folder = expand_path(folder)
        sums = read_checksums(folder)
        if "state.pt" not in sums:
            raise UserError(f"{folder} is not a checkpoint of strategy hf: it holds no state.pt")
        check_files(folder, sums)
        state = torch.load(folder / "state.pt", map_location=self.device, weights_only=True)
        steps = continued_steps(state, settings)
        trained.load_state_dict(state)
        self.steps = steps
        self._end_of_schedule = EndOfSchedule(settings)

    def save_hf(self, folder: str | Path) -> None:
        source, folder = self.settings.model_path, expand_path(folder)
        refuse_to_delete(source, folder)
        folder = folder.resolve()
        with new_folder(folder, Kind.MODEL, alone) as unfinished:
            writer = ShardWriter(unfinished)
            for name, tensor in as_family_names(self.model_config, dict(self._weights())):
                writer.add(name, tensor)
            writer.flush()
            write_index(unfinished, [writer.file_of])
            write_companions(unfinished, folder, self.model_config, self.network.dtype, source, self._companions)
