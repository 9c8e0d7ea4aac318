"""Megatron-Core itself on CPU.

Megatron-Core asks for CUDA by name in a few dozen lines, although nearly all of its work is plain torch. Here each of
its modules that has such a line gets, in place of its global name `torch`, a stand-in that answers those lines for CPU
and hands everything else to torch. Torch itself is left alone for everybody else, with two exceptions that Python
forces, since tensors carry their own methods: `Tensor.type()` and `Tensor.cuda()` answer differently when the caller
is a Megatron-Core module, and only then.

Line numbers are those of megatron-core 0.16.1; 0.19 has the same lines a little further down. Nothing here runs unless
`CpuPlatform.bind` asks for it, so a process that uses a GPU never sees it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MODULES_THAT_ASK_FOR_CUDA: dict[str, str] = {
    "megatron.core.parallel_state": "198, 933: torch.cuda.synchronize() after a group is made",
    "megatron.core.utils": "631: a buffer on torch.cuda.current_device()",
    "megatron.core.tensor_parallel.layers": "261, 552, 597, 873: weights and gather buffers on current_device()",
    "megatron.core.tensor_parallel.mappings": "91, 141, 181, 442: gather and scatter outputs on current_device()",
    "megatron.core.tensor_parallel.random": "235-238, 422: seeds and states of the RNG tracker",
    "megatron.core.tensor_parallel.utils": "70, 91: buffers of split_tensor_into_1d_equal_chunks",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "78, 162: inverse frequencies on current_device()",
    "megatron.core.models.common.language_module.language_module": "244: tied weights of the last stage to .cuda()",
    "megatron.core.pipeline_parallel.schedules": "596, 983, 2138: total_num_tokens on 'cuda'",
    "megatron.core.pipeline_parallel.p2p_communication": "190-202, 313, 321: shapes, receive buffers; 242, 398: sync",
    "megatron.core.distributed.distributed_data_parallel": "230: a side stream; 588, 611: sync",
    "megatron.core.distributed.param_and_grad_buffer": "417-422, 529: streams; 783-806: gradient buffers",
    "megatron.core.optimizer.optimizer": "473-485, 907, 1141: scalars on 'cuda'",
    "megatron.core.optimizer.distrib_optimizer": "791, 1077: state buffers on current_device()",
    "megatron.core.optimizer.clip_grads": "90, 103, 115, 174, 207: norms on 'cuda'",
    "megatron.core.optimizer.grad_scaler": "15, 88-94: scalars on 'cuda'",
    "megatron.core.transformer.module": "249: a buffer on current_device()",
    "megatron.core.transformer.transformer_layer": "1147: a buffer on current_device()",
    "megatron.core.dist_checkpointing.exchange_utils": "104, 110, 326: exchanged shards on 'cuda'",
    "megatron.core.dist_checkpointing.strategies.async_utils": "165, 604: flags on current_device(); 212: sync",
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "230: sync before writing",
    "megatron.core.dist_checkpointing.strategies.fully_parallel": "272, 281: sync around the exchange",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": "204, 252: flags on 'cuda'",
}

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")


class _NoStream:
    """A stream that has nothing to wait for: CPU kernels run in program order."""

    def wait_stream(self, stream: _NoStream) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _no_stream(*args: object, **kwargs: object) -> _NoStream:
    return _NoStream()


class _TorchForCpu(ModuleType):
    """`torch` as Megatron-Core's modules see it: CUDA's names answer for CPU, the rest is torch."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = SimpleNamespace(
            current_device=lambda: torch.device("cpu"),
            is_available=lambda: False,
            is_current_stream_capturing=lambda: False,
            device_count=lambda: 0,
            set_device=_nothing,
            synchronize=_nothing,
            empty_cache=_nothing,
            Stream=_no_stream,
            current_stream=_no_stream,
            default_stream=_no_stream,
            stream=lambda stream: nullcontext(),
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
            manual_seed=torch.manual_seed,
            CUDAGraph=torch.cuda.CUDAGraph,
            OutOfMemoryError=torch.cuda.OutOfMemoryError,
            Event=torch.cuda.Event,
            nvtx=SimpleNamespace(range_push=_nothing, range_pop=_nothing),
            amp=torch.cuda.amp,
        )
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, with `device="cuda"` read as CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _called_by_megatron() -> bool:
    """Whether the function two frames up (the caller of a tensor method) belongs to Megatron-Core."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")


def _answer_tensor_methods() -> None:
    """`Tensor.type()` and `Tensor.cuda()` for Megatron-Core's callers.

    `type()`: optimizer.py:671-690, distrib_optimizer.py:361-420 and clip_grads.py:167 compare it with CUDA names.
    `cuda()`: language_module.py:244, optimizer.py:375, distrib_optimizer.py:1089, exchange_utils.py:336.
    """
    plain_type, plain_cuda = Tensor.type, Tensor.cuda

    @functools.wraps(plain_type)
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        if not args and not kwargs and isinstance(answer, str) and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    @functools.wraps(plain_cuda)
    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if _called_by_megatron() else plain_cuda(self, *args, **kwargs)

    Tensor.type = type_  # type: ignore[method-assign, assignment]
    Tensor.cuda = cuda  # type: ignore[method-assign, assignment]


@functools.cache
def enable_megatron_on_cpu() -> None:
    """Let Megatron-Core run in this process without CUDA. Calling it again changes nothing."""
    stand_in = _TorchForCpu()
    for name in MODULES_THAT_ASK_FOR_CUDA:
        module: Any = importlib.import_module(name)
        assert module.torch is torch, f"{name} no longer imports torch under its own name"
        module.torch = stand_in
    # tensor_parallel/random.py:48-110 reaches below torch.cuda's public functions, so both are replaced whole.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _answer_tensor_methods()
