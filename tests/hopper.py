"""Compile the fast path's GPU code on a machine without a GPU: `python tests/hopper.py resnet18 dale`.

A captured step runs on the CPU. Each graph that torch.compile makes of it is moved to an H200 that is not there: its
tensors have shapes, but no values. Inductor writes Triton code for it, which Triton compiles to machine code of that
GPU's architecture; the CPU goes on with the graph as it is. The kernels written by hand are compiled where they would
be launched, and leave their outputs unwritten: what the step computes is of no interest here.

Of torch and Triton it replaces what would ask the driver for a device. Their caches remember the answers, so it belongs
in a process of its own; it prints one JSON object.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch._inductor.runtime.triton_helpers
import triton
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dale import algorithms, fused, kernels
from dale.batch import Batch
from dale.data import Loader, RandomCrop, RandomCropShift, RandomCutout, RandomFlip, Split
from dale.folding import Replica, replicate
from dale.models import create_model
from dale.perturbations import Linf
from dale.training import SGD, Averaging, TrainState
from dale.training.averaging import AveragedModel
from dale.training.fast import CapturedStep
from dale.training.weights import WeightPerturbation

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    total_memory=140 << 30,
    L2_cache_size=50 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
)


class Driver:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


class Guard:
    """A context that would make a device the current one."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def pretend() -> None:
    """From here on this process has an H200, as far as compilers can see."""

    def answer(value: Any) -> Any:
        return staticmethod(lambda *_, **__: value)

    for place in (torch.cuda, CudaInterface, CudaInterface.Worker):
        place.is_available = answer(True)
        place.current_device = answer(0)
        place.device_count = answer(1)
        place.get_device_properties = answer(H200)
        place.synchronize = answer(None)
        place.device = Guard
    torch.cuda.get_device_capability = answer((9, 0))
    torch.cuda._lazy_init = torch.cuda.random._lazy_init = answer(None)
    torch.cuda.get_rng_state = answer(torch.zeros(16, dtype=torch.uint8))
    torch.cuda.set_rng_state = answer(None)
    torch.cuda._DeviceGuard = Guard
    torch._C._cuda_getCurrentRawStream = answer(0)
    torch.version.cuda = "13.0"
    CudaInterface.get_compute_capability = answer(90)
    CudaInterface.is_triton_capable = answer(True)
    CudaInterface.raise_if_triton_unavailable = answer(None)
    # these look for attention and for products worth padding by trying them on the device
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = misc_patterns._misc_patterns_init = answer(None)
    triton.runtime.driver.set_active(Driver())
    torch._inductor.runtime.triton_helpers.set_driver_to_gpu = answer(None)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.compile_threads = 1
    # what the package decides by the device
    kernels.INTERPRETED = True
    fused.spreading_pays = lambda x: torch.compiler.is_compiling()


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Go round two methods of a tensor that enter its device first, which a CPU build of torch cannot, even in play."""
    plain_item = Tensor.__getitem__

    def copy_(mine: Tensor, other: Tensor) -> Tensor:
        return torch.ops.aten.copy_.default(mine, other)

    def item(tensor: Tensor, index: Any) -> Tensor:
        return tensor.select(0, index) if isinstance(index, int) else plain_item(tensor, index)

    with mock.patch.object(Tensor, "copy_", copy_), mock.patch.object(Tensor, "__getitem__", item):
        yield


def moved(graph: fx.GraphModule, inputs: list[Any]) -> tuple[fx.GraphModule, list[Any], FakeTensorMode]:
    """A copy of a graph on the GPU, and inputs of the same shapes there."""

    def there(value: Any) -> Any:
        return GPU if isinstance(value, torch.device) else value

    graph, mode = copy.deepcopy(graph), FakeTensorMode(allow_non_fake_inputs=True)
    for node in graph.graph.nodes:
        node.args = tuple(there(value) for value in node.args)
        node.kwargs = {name: there(value) for name, value in node.kwargs.items()}
    graph.recompile()
    with mode:
        images = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU) if isinstance(t, Tensor) else t
            for t in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*images)
    return graph, images, mode


class Compiler:
    """Compiles functions for the H200, counts the kernels of each, and runs their graphs as they are."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()  # of each function that was compiled; one written by hand is its own
        self.failures: list[str] = []
        self.part = ""  # the function whose graph is being compiled
        AsyncCompile.triton = lambda _, name, source, device_str="cuda": self._generated(name, source)
        JITFunction.__getitem__ = lambda program, grid: functools.partial(self._written, program, grid)

    @functools.cache  # noqa: B019 - it lives as long as the process
    def __call__(self, function: Any) -> Any:
        compile_graph = functools.partial(self._graph, function.__name__)
        return torch.compile(
            function,
            dynamic=False,
            backend=lambda graph, inputs: compile_fx.compile_fx(graph, inputs, inner_compile=compile_graph),
        )

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:2000]}")

    def _graph(self, name: str, graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        self.part = name
        with self._noting(name), unguarded():
            elsewhere, images, mode = moved(graph, inputs)
            with tracing(TracingContext(mode)), mode:
                compile_fx.compile_fx_inner(elsewhere, images, **options)

        def run(arguments: list[Any]) -> Any:
            taken = list(arguments)
            arguments.clear()
            return graph(*taken)

        run._boxed_call = True  # the list is handed over: AOT autograd frees what nobody else needs
        return run

    def _generated(self, name: str, source: str) -> None:
        """Compile a kernel as Inductor's workers do, with the first of the tile sizes that it would try."""
        self.kernels[self.part] += 1
        with self._noting(f"{self.part}, {name}"):
            kernel = getattr(PyCodeCache.load(source), name)
            if kernel.configs is not None:  # None: compiled before, for another graph
                kernel.configs = kernel.configs[:1]
                kernel.precompile(warm_cache_only=True)

    def _written(self, program: JITFunction, grid: Any, *arguments: Any, **options: Any) -> None:
        """Compile a kernel of the package for these arguments, in place of its launch."""
        self.kernels[program.__name__] += 1
        with self._noting(program.__name__):
            compiled = program.run(*arguments, grid=grid, warmup=True, **options)
            needed, there = compiled.metadata.shared, H200.shared_memory_per_block_optin
            assert needed <= there, f"{needed} bytes of shared memory of {there}"


def step(compiler: Compiler, network: str, row: str) -> None:
    """Compile a captured step in bfloat16."""
    size, shape = 16, (1, 28, 28) if network.startswith("convnet") else (3, 32, 32)
    model = create_model(network, channels=shape[0], size=shape[1], num_classes=10).train()
    model.to(memory_format=torch.channels_last)
    replica = replicate(model, dtype=torch.bfloat16, channels_last=True)
    assert isinstance(replica, Replica)
    options: dict[str, Any] = {"rho": 0.8, "start": "away"} if row == "dale" else {}
    objective = algorithms.build(row, Linf(epsilon=8 / 255), steps=2, **options).for_run(1000, 10)
    captured = CapturedStep(objective, torch.bfloat16, CPU, replica)
    captured.compiler = replica.compiler = compiler
    captured.weight_perturbation = WeightPerturbation()
    captured.word = torch.zeros((), dtype=torch.int64)
    images = torch.zeros(size, *shape).to(memory_format=torch.channels_last)
    batch = Batch(images, torch.arange(size) % 10, torch.arange(size), None)
    duals, average = objective.initial_duals(10), AveragedModel(model, Averaging())
    captured._step_in_place(TrainState(model, SGD(nesterov=True).build(model), duals, average), batch)


def loader(compiler: Compiler) -> None:
    """Compile the way from stored images to a batch, with every augmentation that is compiled."""
    images = torch.zeros(48, 3, 32, 32, dtype=torch.uint8)
    split = Split.of(images, torch.arange(48) % 10, 10)
    found = Loader(split, 16, seed=0, augmentation=(RandomCrop(), RandomCropShift(), RandomFlip(), RandomCutout()))
    found.compiler = compiler
    for _ in found.epoch(0):
        pass


def programs() -> None:
    """Compile the kernels written by hand: every shape of tile in bfloat16, and the commonest in float16."""
    narrow = [(torch.bfloat16, 3, outputs) for outputs in (16, 32, 64, 128)]
    narrow += [(torch.bfloat16, 1, 64), (torch.bfloat16, 4, 64), (torch.float16, 3, 64)]
    for dtype, inputs, outputs in narrow:
        weight, x = torch.zeros(outputs, inputs, 3, 3, dtype=dtype), torch.zeros(2, inputs, 32, 32, dtype=dtype)
        assert kernels.fits_narrow(x, weight, (1, 1), (1, 1), 1)
        kernels.narrow_conv_relu(x, weight, torch.zeros(outputs, dtype=dtype))
        kernels.narrow_input_gradient(torch.zeros(2, outputs, 32, 32, dtype=dtype), weight)
    for dtype, width in [*((torch.bfloat16, width) for width in (8, 16, 32, 64)), (torch.float16, 32)]:
        x, weight = torch.zeros(2, 64, 64, width, dtype=dtype), torch.zeros(64, 64, 3, 3, dtype=dtype)
        assert kernels.fits_wide(x)
        for given in ({"mask": x}, {"add": x}, {"add": x, "mask": x}):
            kernels.wide_input_gradient(x, weight, **given)


if __name__ == "__main__":
    pretend()
    compiler = Compiler()
    if sys.argv[1:] == ["programs"]:
        programs()
    elif sys.argv[1:] == ["loader"]:
        loader(compiler)
    else:
        step(compiler, *sys.argv[1:])
    print(json.dumps({"kernels": compiler.kernels, "failures": compiler.failures}))
