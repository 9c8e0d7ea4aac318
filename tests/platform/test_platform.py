"""Which platform a process gets, and how far Megatron-Core's stand-ins for CPU reach."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from roll.platform import CpuPlatform, CudaPlatform, get_platform
from roll.platform.megatron_on_cpu import MODULES_THAT_ASK_FOR_CUDA


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    """Each test chooses for itself, and what it chose is forgotten."""
    get_platform.cache_clear()
    yield
    get_platform.cache_clear()


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found: bool = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    return found


@pytest.mark.parametrize(
    ("gpu", "wanted", "kind"),
    [
        (False, None, CpuPlatform),
        (True, None, CudaPlatform),
        (False, "cpu", CpuPlatform),
        (True, "cpu", CpuPlatform),
        (True, "cuda", CudaPlatform),
    ],
    indirect=["gpu"],
)
def test_the_choice(gpu: bool, wanted: str | None, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if wanted is None:
        monkeypatch.delenv("ROLL_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("ROLL_PLATFORM", wanted)
    assert type(get_platform()) is kind
    assert get_platform() is get_platform()


@pytest.mark.parametrize(
    ("gpu", "wanted", "message"),
    [
        (True, "gpu", "ROLL_PLATFORM must be cpu or cuda, got 'gpu'"),
        (False, "CUDA", "ROLL_PLATFORM must be cpu or cuda, got 'CUDA'"),
        (False, "", "ROLL_PLATFORM must be cpu or cuda, got ''"),
        (False, "cuda", "ROLL_PLATFORM is cuda, but torch finds no GPU"),
    ],
    indirect=["gpu"],
)
def test_a_choice_that_cannot_be(gpu: bool, wanted: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_PLATFORM", wanted)
    with pytest.raises(ValueError, match=message):
        get_platform()


def test_names_that_others_go_by() -> None:
    assert (CpuPlatform.name, CpuPlatform.collective_backend, CpuPlatform.ray_resource) == ("cpu", "gloo", "CPU")
    assert (CudaPlatform.name, CudaPlatform.collective_backend, CudaPlatform.ray_resource) == ("cuda", "nccl", "GPU")
    assert CpuPlatform().device() == torch.device("cpu")


def test_random_numbers_are_seeded_and_restored() -> None:
    platform = CpuPlatform()
    before = platform.rng_state()
    try:
        platform.manual_seed(5)
        state = platform.rng_state()
        first = torch.rand(3)
        platform.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        platform.manual_seed(5)
        assert torch.equal(torch.rand(3), first)
        platform.manual_seed(6)
        assert not torch.equal(torch.rand(3), first)
    finally:
        platform.set_rng_state(before)


def test_memory_of_this_process_is_counted_in_bytes() -> None:
    platform = CpuPlatform()
    before = platform.memory_allocated()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    grown = platform.memory_allocated() - before
    assert 48 << 20 < grown < 80 << 20
    assert platform.peak_memory_allocated() >= before + (48 << 20)
    assert held.numel() == 64 << 20


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    CudaPlatform().bind(1)
    assert used == [1]
    with pytest.raises(ValueError, match="local rank 2 has no GPU: this process sees 2"):
        CudaPlatform().bind(2)
    assert used == [1]


# A process of its own, since what is looked at is changed for the rest of a process's life. It prints what it finds
# after a CUDA platform was bound, after a CPU platform was, and after the latter was bound again.
LOOK = '''
import ast, importlib, inspect, json, sys, types, warnings
import torch
from roll.platform import CpuPlatform, CudaPlatform
from roll.platform.megatron_on_cpu import MODULES_THAT_ASK_FOR_CUDA

modules = {name: importlib.import_module(name) for name in MODULES_THAT_ASK_FOR_CUDA}
spaces = {"torch": torch, "torch.cuda": torch.cuda, "torch.cuda.random": torch.cuda.random, "Tensor": torch.Tensor,
          "TensorBase": torch._C.TensorBase, "torch.nn.functional": torch.nn.functional}
originals = {name: dict(vars(space)) for name, space in spaces.items()}
random = modules["megatron.core.tensor_parallel.random"]
random_originals = (random._get_cuda_rng_state, random._set_cuda_rng_state)

def asks(name, source):
    """The answer of code in a module of this name, or what it raises."""
    space = {"__name__": name, "tensor": torch.ones(2), "torch": torch}
    try:
        exec("answer = " + source, space)
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return str(space["answer"])

def look():
    changed = [f"{name}.{key}" for name, before in originals.items() for key, value in before.items()
               if vars(spaces[name]).get(key) is not value]
    # Tensor inherits its methods; one that is set on the class itself hides the inherited one.
    changed += [f"{name}.{key}" for name in ("Tensor", "TensorBase") for key in vars(spaces[name])
                if key not in originals[name]]
    questions = ["tensor.type()", "tensor.type(torch.float64)", "tensor.type(dtype=torch.int32)", "tensor.cuda()",
                 "tensor.bfloat16().type()", "torch.nn.Parameter(tensor).type()"]
    return {
        "changed": sorted(changed),
        "everywhere_torch": [name for name, module in sys.modules.items() if name.startswith("megatron.")
                             and isinstance(vars(module).get("torch", torch), types.ModuleType)
                             and vars(module).get("torch", torch) is not torch],
        "rng_replaced": (random._get_cuda_rng_state, random._set_cuda_rng_state) != random_originals,
        "outside": {question: asks("somebody.elses", question) for question in questions},
        "megatron": {question: asks("megatron.core.some.module", question) for question in questions},
        "ids": [id(module.torch) for module in modules.values()] + [id(torch.Tensor.type), id(torch.Tensor.cuda)],
    }

def stand_in():
    theirs = modules["megatron.core.optimizer.optimizer"].torch
    same = [name for name in ("float32", "Tensor", "nn", "distributed", "cat", "stack", "no_grad")
            if getattr(theirs, name) is getattr(torch, name)]
    made = [theirs.zeros(2, device="cuda"), theirs.tensor([1.0], device=theirs.cuda.current_device()),
            theirs.empty(2, dtype=torch.bfloat16, device="cuda:0"), theirs.ones_like(torch.ones(1), device="cuda")]
    state = theirs.cuda.get_rng_state()
    theirs.cuda.manual_seed(3)
    seeded = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
    theirs.cuda.set_rng_state(state)
    restored = torch.equal(torch.get_rng_state(), state)
    with theirs.cuda.stream(theirs.cuda.Stream()):
        theirs.cuda.current_stream().wait_stream(theirs.cuda.Stream())
        theirs.cuda.synchronize()
    return {"same": same, "devices": [str(tensor.device) for tensor in made], "seeded": seeded, "restored": restored}

def names_cuda(module):
    """Whether its code, comments and docstrings aside, has torch.cuda, .cuda() or the device 'cuda'."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    return any(getattr(node, "attr", None) == "cuda" or getattr(node, "value", None) == "cuda" for node in nodes)

found = {"sources": {name: names_cuda(module) for name, module in modules.items()}}
torch.cuda.device_count, torch.cuda.set_device = (lambda: 1), (lambda index: None)
CudaPlatform().bind(0)
torch.cuda.device_count = originals["torch.cuda"]["device_count"]
torch.cuda.set_device = originals["torch.cuda"]["set_device"]
found["cuda"] = look()
CpuPlatform().bind(0)
found["cpu"] = look()
found["stand_in"] = stand_in()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    CpuPlatform().bind(0)
    told.clear()
    warnings.warn("for overlap, set the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1")
    warnings.warn("something else")
found["told"] = [str(warning.message) for warning in told]
found["again"] = look()
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", LOOK]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    looked_at: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
    return looked_at


# On a machine without CUDA; where there is a GPU, `tensor.cuda()` works for everybody outside Megatron-Core.
PLAIN = {
    "tensor.type()": "torch.FloatTensor",
    "tensor.type(torch.float64)": "tensor([1., 1.], dtype=torch.float64)",
    "tensor.type(dtype=torch.int32)": "tensor([1, 1], dtype=torch.int32)",
    "tensor.bfloat16().type()": "torch.BFloat16Tensor",
    "torch.nn.Parameter(tensor).type()": "torch.FloatTensor",
}
ON_CPU = PLAIN | {
    "tensor.type()": "torch.cuda.FloatTensor",
    "tensor.cuda()": "tensor([1., 1.])",
    "tensor.bfloat16().type()": "torch.cuda.BFloat16Tensor",
    "torch.nn.Parameter(tensor).type()": "torch.cuda.FloatTensor",
}


def test_a_cuda_process_is_left_untouched(found: dict[str, Any]) -> None:
    assert found["cuda"]["changed"] == []
    assert found["cuda"]["everywhere_torch"] == []
    assert not found["cuda"]["rng_replaced"]
    assert found["cuda"]["megatron"] == found["cuda"]["outside"]
    assert found["cuda"]["outside"].items() >= PLAIN.items()


def test_torch_itself_is_left_untouched_on_cpu(found: dict[str, Any]) -> None:
    # Two methods of tensors, which answer as before for everybody but Megatron-Core, and nothing else.
    assert found["cpu"]["changed"] == ["Tensor.cuda", "Tensor.type"]
    assert found["cpu"]["outside"] == found["cuda"]["outside"]


def test_megatron_core_is_answered_for_cpu(found: dict[str, Any]) -> None:
    assert sorted(found["cpu"]["everywhere_torch"]) == sorted(MODULES_THAT_ASK_FOR_CUDA)
    assert found["cpu"]["rng_replaced"]
    assert found["cpu"]["megatron"] == ON_CPU


def test_the_stand_in_makes_cpu_tensors_and_is_torch_otherwise(found: dict[str, Any]) -> None:
    assert found["stand_in"] == {
        "same": ["float32", "Tensor", "nn", "distributed", "cat", "stack", "no_grad"],
        "devices": ["cpu"] * 4,
        "seeded": True,
        "restored": True,
    }


def test_binding_again_changes_nothing(found: dict[str, Any]) -> None:
    assert found["again"] == found["cpu"]


def test_advice_about_cuda_kernels_is_not_given_on_cpu(found: dict[str, Any]) -> None:
    assert found["told"] == ["something else"]


def test_every_listed_module_asks_for_cuda(found: dict[str, Any]) -> None:
    assert [name for name, mentions in found["sources"].items() if not mentions] == []
    assert sorted(found["sources"]) == sorted(MODULES_THAT_ASK_FOR_CUDA)
