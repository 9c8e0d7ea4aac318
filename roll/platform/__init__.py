"""The device behind one small interface, and what Megatron-Core needs to run without CUDA."""

from roll.platform.platform import CpuPlatform, CudaPlatform, Platform, get_platform

__all__ = ["CpuPlatform", "CudaPlatform", "Platform", "get_platform"]
