"""CPU and CUDA behind one interface. Nothing outside this package names a device or a collective backend."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from roll.errors import UserError


class Platform(ABC):
    """Where tensors live and how ranks talk. One instance per process, from `get_platform()`."""

    name: str
    """The torch device type."""
    collective_backend: str
    """The torch.distributed backend for tensors on this device."""
    ray_resource: str
    """The Ray resource that one rank occupies."""

    @abstractmethod
    def use_device(self, local_rank: int) -> None:
        """Make this process use the device of `local_rank`."""

    def bind(self, local_rank: int) -> None:
        """The same, and prepare Megatron-Core for it."""
        self.use_device(local_rank)

    @abstractmethod
    def quiet_megatron(self) -> AbstractContextManager[None]:
        """A block in which Megatron-Core is imported or configured, and may have something to say of CUDA."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device this process computes on."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of this process, Megatron-Core's tracker aside."""

    @abstractmethod
    def rng_state(self) -> dict[str, Tensor]:
        """The state of every torch generator of this process."""

    @abstractmethod
    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `rng_state` returned."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the work that was handed to the device."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Bytes in use: of the device for CUDA, of this process (resident set) for CPU."""

    @abstractmethod
    def peak_memory_allocated(self) -> int:
        """The highest `memory_allocated` of this process so far, in bytes."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached device memory back."""


class CpuPlatform(Platform):
    """Tensors in main memory, collectives over gloo."""

    name = "cpu"
    collective_backend = "gloo"
    ray_resource = "CPU"

    def use_device(self, local_rank: int) -> None:
        """Nothing to choose: all ranks share the memory."""

    def bind(self, local_rank: int) -> None:
        from roll.platform.megatron_on_cpu import enable_megatron_on_cpu

        with self.quiet_megatron():
            enable_megatron_on_cpu()
        # layers.py:738 advises how to overlap CUDA kernels, when a layer first runs. The filter is set here because the
        # end of `quiet_megatron` forgets what was set inside.
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
        # torch 2.13 has newer names for two collectives, which Megatron-Core does not use yet.
        warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated.*")

    @contextmanager
    def quiet_megatron(self) -> Iterator[None]:
        """Without its warnings: that packages and settings for CUDA are missing is no news on a CPU."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield

    def device(self) -> torch.device:
        return torch.device("cpu")

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])

    def synchronize(self) -> None:
        """Nothing to wait for: CPU kernels return when they are done."""

    def memory_allocated(self) -> int:
        import psutil

        return psutil.Process().memory_info().rss

    def peak_memory_allocated(self) -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB.

    def empty_cache(self) -> None:
        """Nothing to give back."""


class CudaPlatform(Platform):
    """One NVIDIA GPU per process, collectives over NCCL."""

    name = "cuda"
    collective_backend = "nccl"
    ray_resource = "GPU"

    def use_device(self, local_rank: int) -> None:
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"local rank {local_rank} has no GPU: this process sees {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)

    def quiet_megatron(self) -> AbstractContextManager[None]:
        return nullcontext()

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # Seeds every CUDA generator too.

    def rng_state(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        torch.cuda.set_rng_state(state["cuda"])

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


@cache
def get_platform() -> Platform:
    """The platform of this process: CUDA where torch finds a GPU, else CPU. `ROLL_PLATFORM` overrides the choice.

    Raises:
        ValueError: `ROLL_PLATFORM` is neither `cpu` nor `cuda`, or asks for a GPU that is not there.
    """
    found = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = os.environ.get("ROLL_PLATFORM", found)
    if wanted not in ("cpu", "cuda"):
        raise UserError(f"ROLL_PLATFORM must be cpu or cuda, got {wanted!r}")
    if wanted == "cuda" and found == "cpu":
        raise UserError("ROLL_PLATFORM is cuda, but torch finds no GPU")
    return CpuPlatform() if wanted == "cpu" else CudaPlatform()
