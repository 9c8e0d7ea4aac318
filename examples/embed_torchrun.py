"""The strategies under a launcher of your own: no Ray, no pipeline, no config file.

    torchrun --nproc-per-node 2 examples/embed_torchrun.py

Two ranks hold an InternLM2 at tensor parallel 2, compute the log-probabilities of a batch, and take a training step.
"""

import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from roll.config import ModelConfig, OptimizerSettings, ParallelSettings, StrategySettings
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import MegatronTrainStrategy, ModelOutput


def make_model_folder(folder: Path) -> Path:
    """A config.json is all that `init="random"` needs; give a folder with weights and `init="load"` for your model."""
    model = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    (folder / "config.json").write_text(json.dumps(model.to_hf_dict()))
    return folder


def make_batch() -> DataProto:
    """Four rows of 16 tokens: prompts of different lengths padded on the left, then 8 response tokens."""
    ids = torch.randint(3, 512, (4, 16), generator=torch.Generator().manual_seed(0))
    attention_mask = (torch.arange(16) >= torch.tensor([0, 3, 5, 7]).unsqueeze(1)).long()
    response_mask = (torch.arange(16) >= 8).long().repeat(4, 1)
    return DataProto(
        batch={"input_ids": ids * attention_mask, "attention_mask": attention_mask, "response_mask": response_mask},
        non_tensor_batch={"answer": ["4", "7", "1", "9"]},
        # `_broadcast_non_tensor_batch` sends the answers along too. `micro_batch_size` counts where no plan does.
        meta_info={"global_step": 100, "micro_batch_size": 2, "_broadcast_non_tensor_batch": True},
    )


def log_probs(data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
    """What `forward_step` computes of each micro-batch."""
    return {"log_probs": output.log_probs(data["input_ids"], data["response_mask"])}


def loss(data: DataProto, output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood, divided by the response tokens of the whole step, so that parts simply add up."""
    assert data.normalizers is not None
    return -output.log_probs(data["input_ids"], data["response_mask"]).sum() / data.normalizers.tokens, {}


def main() -> None:
    """What every rank does."""
    with tempfile.TemporaryDirectory() as folder, parallel_groups(ParallelSettings(tp=2)) as state:
        settings = StrategySettings(
            name="megatron_train",
            model_path=make_model_folder(Path(folder)),
            init="random",
            parallel=ParallelSettings(tp=2),
            optimizer=OptimizerSettings(lr=1e-3),
        )
        strategy = MegatronTrainStrategy(settings, state)
        strategy.initialize()
        # Only the leader of a model-parallel group needs the data; `get_data_input` gives it to the others, rows and
        # meta_info alike. The steps below call it themselves: they take the leader's batch and the others' empty one.
        batch = make_batch() if state.is_leader else DataProto()
        received = strategy.get_data_input(batch)
        if state.rank == 1:
            print(
                f"rank 1: {tuple(received['input_ids'].shape)}, {received['answer']}, {received.meta_info}", flush=True
            )
        results = strategy.forward_step(batch, log_probs)
        before = strategy.train_step(batch, loss)
        after = strategy.train_step(batch, loss)
        if state.is_reporter and results is not None:
            print(f"log-probs {tuple(results['log_probs'].shape)}, of row 0: {results['log_probs'][0, 7:11].tolist()}")
            print(f"loss {before['loss']:.4f}, after one step {after['loss']:.4f}")


if __name__ == "__main__":
    main()
