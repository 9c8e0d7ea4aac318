"""Sequence parallelism for training loops of your own: a long sequence is split over ranks that attend to all of it.

    init_dist("pytorch")
    init_sequence_parallel(4)
    loader = DataLoader(dataset, sampler=SequenceParallelSampler(dataset))
    dispatch_modules(model)
    for input_ids, labels in loader:
        input_ids, labels, _, _ = pad_for_sequence_parallel(input_ids, labels)
        input_ids, labels, _ = split_for_sequence_parallel(input_ids, labels)
        outputs = model(input_ids=input_ids, labels=labels)
        loss = reduce_sequence_parallel_loss(outputs.loss, (labels != -100).sum())

transformers is imported by `dispatch_modules` only, and nothing here needs Megatron-Core or Ray.
"""

from roll.parallel.sequence.collectives import Reducer, all_to_all, gather_tensor
from roll.parallel.sequence.dispatch import dispatch_modules, dispatched_modules, undispatch_modules
from roll.parallel.sequence.groups import (
    SequenceParallelGroups,
    destroy_sequence_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_sequence_parallel_group,
    get_sequence_parallel_groups,
    get_sequence_parallel_mesh,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    init_sequence_parallel,
    is_sequence_parallel_initialized,
    sequence_parallel_groups,
)
from roll.parallel.sequence.launch import init_dist
from roll.parallel.sequence.loss import reduce_sequence_parallel_loss
from roll.parallel.sequence.padding import (
    PackedInputs,
    pad_for_sequence_parallel,
    pad_packed_for_sequence_parallel,
    pad_tensor,
    shift_labels,
    split_for_sequence_parallel,
    split_tensor,
)
from roll.parallel.sequence.sampler import SequenceParallelSampler

__all__ = [
    "PackedInputs",
    "Reducer",
    "SequenceParallelGroups",
    "SequenceParallelSampler",
    "all_to_all",
    "destroy_sequence_parallel",
    "dispatch_modules",
    "dispatched_modules",
    "gather_tensor",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_groups",
    "get_sequence_parallel_mesh",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "init_dist",
    "init_sequence_parallel",
    "is_sequence_parallel_initialized",
    "pad_for_sequence_parallel",
    "pad_packed_for_sequence_parallel",
    "pad_tensor",
    "reduce_sequence_parallel_loss",
    "sequence_parallel_groups",
    "shift_labels",
    "split_for_sequence_parallel",
    "split_tensor",
    "undispatch_modules",
]
