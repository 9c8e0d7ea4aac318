"""A transformers model that learns from sequences split over two ranks, beside one that learns from them whole.

    torchrun --nproc-per-node 2 examples/sequence_parallel_hf.py

The loop is your own: no trainer, no strategy, no config file. Both columns print the same loss, step by step.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from roll.parallel import sequence as sp


def make_model() -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=4, **sizes))


def main() -> None:
    """What every rank does."""
    sp.init_dist("pytorch")
    sp.init_sequence_parallel(dist.get_world_size())
    # 51 tokens: one of padding makes them divide.
    rows = [(torch.arange(51) * step) % 97 for step in range(1, 17)]
    loader = DataLoader(rows, batch_size=4, sampler=sp.SequenceParallelSampler(rows, seed=0))

    one, model = make_model(), make_model()
    sp.dispatch_modules(model)
    ddp = DistributedDataParallel(model)  # averages gradients, as reduce_sequence_parallel_loss expects by default
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (one, model)]

    for step, ids in enumerate(loader):
        tokens, labels, _, _ = sp.pad_for_sequence_parallel(ids, ids)
        tokens, labels, _ = sp.split_for_sequence_parallel(tokens, labels)
        outputs = ddp(input_ids=tokens, labels=labels)  # labels that are shifted already go in as shift_labels
        split_loss = sp.reduce_sequence_parallel_loss(outputs.loss, (labels != -100).sum())
        whole_loss = one(input_ids=ids, labels=ids).loss
        for loss, optimizer in zip((whole_loss, split_loss), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {whole_loss:.6f} whole  {split_loss:.6f} over {dist.get_world_size()} ranks")
    sp.destroy_sequence_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
