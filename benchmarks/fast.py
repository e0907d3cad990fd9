"""Every figure of the fast path, measured in one go: python benchmarks/fast.py [--only batch512 batch128 ...]

    batch512 batch128   DALE with KL, ResNet-18, CIFAR-10 shapes, 10 attack steps, bfloat16; everything included
    plain               the same loop as public code writes it: float32 (strict, and with TF32 in convolutions, which is
                        torch's default), eager, channels-first, batch 128
    mnist               the MNIST network, 7 attack steps, batch 128
    resnet50 wrn        two larger networks
    linear              step time and memory over the number of attack steps, and one forward-backward of the replica
    table               each optimisation off / on
    eval                PGD-20 on 10,000 images: TF32 search with confirmation, and all strict
    autoattack          the full AutoAttack (minutes; only when named)
    profile             where a step's time goes, kernel by kernel
    warmup              the first step in a new process, with an empty compile cache and with a full one (--cache keeps
                        it, for the sections and runs after it)
    cpu                 the fast path on a CPU against the plain one, step by step in turn (only when named on a GPU)

Images are random bytes through the product's own loader; `eval` and `autoattack` take CIFAR-10 where it is on disk, and
weights with --weights. The JSON is written after each section, so that what was measured survives. --smoke runs every
line at a size that means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dale import folding, kernels, load_dataset, winograd
from dale.benchmark import bench, matmul_ceiling, synthetic_dataset
from dale.benchmark.machine import peak_memory, seconds_of, start_memory, wait
from dale.benchmark.workload import MakeStep, Workload, capture
from dale.data import Dataset, Split
from dale.environment import environment, kept_memory, no_denormals, require_bfloat16
from dale.errors import UsageError
from dale.evaluation import evaluate
from dale.evaluation.judge import matmul_precision
from dale.files import finite, write_json
from dale.folding import Replica, replicate
from dale.models import create_model
from dale.objectives import Objective
from dale.perturbations import Linf
from dale.samplers.base import Problem
from dale.training import RunConfig
from dale.training.fast import CapturedStep, FastStep
from dale.training.recipes import default_config
from dale.training.steps import PlainStep
from plain import EPSILON, plain_loop

OWN_KERNELS = {"+ own kernels for the stem": ("narrow",), "+ own kernels for 64 channels": ("narrow", "wide")}
RESULTS = Path(__file__).resolve().parent / "results"
# figure -> (at most, unit); what the issue of the fast path asks of one H200, and of two cores
TARGETS = {
    "batch512 seconds per epoch": 3.8,
    "batch128 seconds per epoch": 5.5,
    "mnist seconds per epoch": 2.5,
    "pgd20 seconds, tf32 search": 4.0,
    "pgd20 seconds, strict": 20.0,
    "autoattack seconds": 480.0,
    "warm-up seconds, cold": 60.0,
    "warm-up seconds, cached": 15.0,
}


class Lab:
    """What the sections share: the device, the sizes, the data, the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.smoke, self.steps = args.smoke, 2 if args.smoke else args.steps
        self.cuda = self.device.type == "cuda"
        self.results: dict[str, Any] = {}
        self._data: dict[str, Dataset] = {}
        self.ceiling = matmul_ceiling(
            self.device, torch.bfloat16 if self.cuda else torch.float32, (256,) if self.smoke else None
        )

    def data(self, name: str) -> Dataset:
        if name not in self._data:
            self._data[name] = synthetic_dataset(name, 64 if self.smoke else None)
        return self._data[name]

    def recipe(
        self, dataset: str = "cifar10", model: str | None = None, batch_size: int = 512, steps: int | None = None
    ) -> RunConfig:
        config = default_config("digits" if self.smoke else dataset)
        if model is not None and not self.smoke:
            config = replace(config, model=replace(config.model, name=model))
        attack_steps = 1 if self.smoke and steps is None else steps
        if attack_steps is not None:
            options = config.objective.options | {"steps": attack_steps}  # type: ignore[union-attr]
            config = replace(config, objective=replace(config.objective, options=options))  # type: ignore[type-var]
        precision = "bfloat16" if self.cuda else "float32"
        size = 8 if self.smoke else batch_size
        return replace(config, training=replace(config.training, batch_size=size, precision=precision))

    def measure(self, config: RunConfig, make: MakeStep | None = None, steps: int | None = None) -> dict[str, Any]:
        if make is None and self.args.uncompiled:
            make = variant({"compiled": False})
        data = self.data(config.data.dataset)
        found = bench(
            config, data, device=self.device, fast="on", steps=steps or self.steps, make=make, ceiling=self.ceiling
        )
        plain = found.to_plain()
        plain["environment"] = None  # once for all sections is enough
        return plain

    def workload(self, config: RunConfig, fast: Any = "on") -> Workload:
        return Workload(config, self.data(config.data.dataset), self.device, fast)


def variant(step: dict[str, bool], folding: dict[str, bool] | None = None, captured: bool = True) -> MakeStep:
    """The fast path with some of its switches set."""

    def make(model: nn.Module, objective: Objective, dtype: torch.dtype, device: torch.device) -> PlainStep:
        replica = replicate(model, dtype=dtype, channels_last=True, **(folding or {}))
        assert isinstance(replica, Replica)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if device.type == "cuda" and captured:
            torch.backends.cudnn.benchmark = True
            return CapturedStep(objective, dtype, device, replica, **step)
        return FastStep(objective, dtype, device, replica)

    return make


def training(dataset: str = "cifar10", model: str | None = None, batch_size: int = 512) -> Callable[[Lab], Any]:
    return lambda lab: lab.measure(lab.recipe(dataset, model, batch_size))


def switches(function: Callable[..., Any]) -> dict[str, bool]:
    """The on/off switches that a function takes, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    elsewhere = ("channels_last", "minimal_filtering")  # always on, and for a CPU
    return {p.name: p.default for p in parameters if isinstance(p.default, bool) and p.name not in elsewhere}


@contextlib.contextmanager
def only_kernels(*names: str) -> Iterator[None]:
    """With these of the package's own GPU kernels alone, while a step is built and captured: narrow, wide."""
    saved = kernels.fits_narrow, kernels.fits_wide, folding.blocks_pay
    if "narrow" not in names:
        kernels.fits_narrow = lambda *_: False
    if "wide" not in names:
        kernels.fits_wide = folding.blocks_pay = lambda *_: False
    try:
        yield
    finally:
        kernels.fits_narrow, kernels.fits_wide, folding.blocks_pay = saved


def table(lab: Lab) -> dict[str, Any]:
    """Each optimisation on top of those before it; then the whole fast path without one switch at a time."""
    step, joins = switches(CapturedStep.__init__), switches(replicate)
    config, plain32 = lab.recipe(), lab.recipe()
    plain32 = replace(plain32, training=replace(plain32.training, precision="float32"))

    def eager(model: nn.Module, objective: Objective, dtype: torch.dtype, device: torch.device) -> PlainStep:
        return PlainStep(objective, dtype, device)

    off_step, off_joins = dict.fromkeys(step, False), dict.fromkeys(joins, False)
    rows: dict[str, tuple[RunConfig, MakeStep]] = {  # the library's kernels alone
        "plain float32": (plain32, eager),
        "plain bfloat16": (config, eager),
        "folded replica": (config, variant({}, off_joins, captured=False)),
        "one CUDA graph": (config, variant(off_step, off_joins)),
    }
    if not lab.cuda:
        rows = {"plain float32": rows["plain float32"], "folded replica": rows["folded replica"]}
    elif not lab.args.uncompiled:
        for name in step:
            off_step = off_step | {name: True}
            rows[f"+ {name}"] = (config, variant(off_step, off_joins))
        for name in joins:
            off_joins = off_joins | {name: True}
            rows[f"+ {name} (replica)"] = (config, variant(off_step, off_joins))
        for name in OWN_KERNELS:
            rows[name] = (config, variant(off_step, off_joins))
    found, steps = {}, max(2, lab.steps // 2)
    for name, (recipe, make) in rows.items():
        with only_kernels(*OWN_KERNELS.get(name, ())):
            work = Workload(recipe, lab.data(recipe.data.dataset), lab.device, make=make)
            work.advance(3)
        found[name] = 1e3 * seconds_of(functools.partial(work.advance, steps), lab.device) / steps
        print(f"    {name:32s} {found[name]:8.2f} ms a step", flush=True)
        del work
        free(lab)
    return {"batch_size": config.training.batch_size, "steps": steps, "milliseconds": found}


def linear(lab: Lab) -> dict[str, Any]:
    """Step time over the number of attack steps; its slope against one forward-backward pass of the replica."""
    work = lab.workload(lab.recipe(steps=10))
    sampler: Any = work.objective.sampler
    prototype = work.step
    times, memory = {}, {}
    for count in (1, 2, 5) if lab.smoke else (1, 2, 5, 10, 20):
        work.step = copy.copy(prototype)  # the same replica and compiled functions, captured anew
        work.step.objective = replace(work.objective, sampler=sampler.with_steps(count))
        if isinstance(work.step, CapturedStep):
            work.step.steps = None  # compiled, however short a run would be
        free(lab)
        start_memory(lab.device)
        work.advance(2)
        times[count] = seconds_of(lambda: work.advance(lab.steps), lab.device) / lab.steps
        memory[count] = peak_memory(lab.device)
    slope, intercept = statistics.linear_regression(list(times), list(times.values()))
    batch, key = work.static_batch()
    assert isinstance(prototype, FastStep)
    loss, perturbations = work.objective.perturbation_loss, work.objective.perturbations
    assert perturbations is not None
    with work.step.precision(), torch.no_grad():
        problem = Problem(prototype.replica, batch, perturbations, loss, sampler.log)
        state = sampler.kernel.init(problem, sampler.begin(problem, key), key)
        delta = sampler.kernel.step(problem, state, 0, key)["delta"]  # in the middle of a chain

    def once() -> None:
        with work.step.precision(), torch.no_grad():
            problem.value_and_gradient(delta)

    run = capture(once, lab.device).replay if lab.cuda else once
    run()
    passes = seconds_of(run, lab.device, lab.steps)
    return {
        "milliseconds": {k: 1e3 * v for k, v in times.items()},
        "peak_memory_gib": memory,
        "slope_milliseconds": 1e3 * slope,
        "intercept_milliseconds": 1e3 * intercept,
        "forward_backward_milliseconds": 1e3 * passes,
        "slope_over_forward_backward": slope / passes,
    }


def plain(lab: Lab) -> dict[str, Any]:
    """The same loop as public code writes it (plain.py), at batch 128."""
    config = lab.recipe(batch_size=128)
    data, size = lab.data(config.data.dataset), config.training.batch_size
    torch.backends.cudnn.benchmark = True  # as public code has it, to its advantage
    model = create_model(config.model.name, data).to(lab.device)
    images, labels = data.train.images.to(lab.device), data.train.labels.to(lab.device)
    sampler: Any = config.build_objective().sampler
    step, count = plain_loop(model, images, labels, size, sampler.steps), max(2, lab.steps // 2)
    found: dict[str, Any] = {"batch_size": size}
    for name in ("ieee", "tf32"):
        with matmul_precision(lab.device, name):
            step()
            step()
            seconds = seconds_of(step, lab.device, count)
        found[name] = {"step_seconds": seconds, "seconds_per_epoch": len(images) / size * seconds}
    return found


def judged(lab: Lab) -> tuple[nn.Module, Split, str]:
    """A model and 10,000 images to attack, and a line on what they are."""
    model = create_model("convnet" if lab.smoke else "resnet18", lab.data("digits" if lab.smoke else "cifar10"))
    root = os.environ.get("DALE_DATA")
    if lab.args.weights is not None:
        model = create_model("resnet18", lab.data("cifar10"), init=lab.args.weights)
    if lab.args.weights is not None and root and not lab.smoke:
        split = load_dataset("cifar10", data_dir=root).test
        return model.to(lab.device).eval(), split, f"CIFAR-10's test set, {Path(lab.args.weights).name}"
    # a network that no attack fools: every image is searched to the end, as long as an attack can last
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        last.bias[0] += 100.0
    source = lab.data("digits" if lab.smoke else "cifar10").train.first(10_000)
    split = Split.of(source.images, torch.zeros(len(source), dtype=torch.int64), 10)
    return model.to(lab.device).eval(), split, "a stand-in that no attack fools: an upper bound on the time"


def attacked(lab: Lab, attack: str, strict: bool, examples: int | None = None) -> dict[str, Any]:
    model, split, line = judged(lab)
    split = split if examples is None else split.first(examples)
    ball = Linf(epsilon=EPSILON)

    def run(part: Split) -> Any:
        return evaluate(model, part, ball, [attack], strict=strict, progress=False, checks=False, device=lab.device)

    if attack != "autoattack":
        run(split.first(1024))  # warm-up: the library chooses its kernels
    started = time.perf_counter()
    result = run(split)
    wait(lab.device)
    return {
        "seconds": time.perf_counter() - started,
        "n": result.n,
        "clean": result.clean.value,
        "accuracy": result.worst.value,
        "refuted": [a.refuted for a in result.attacks],
        "on": line,
    }


def evaluation(lab: Lab) -> dict[str, Any]:
    return {"tf32": attacked(lab, "pgd20", strict=False), "strict": attacked(lab, "pgd20", strict=True)}


def autoattack(lab: Lab) -> dict[str, Any]:
    return attacked(lab, "autoattack", strict=False, examples=16 if lab.smoke else lab.args.examples)


# what a kernel's name says of it, the first that fits
KINDS = {
    "own kernels": ("narrow_", "wide_"),
    "compiled": ("triton_",),
    "convolutions": ("conv", "xmma", "cutlass", "nvjet", "sm90", "cudnn", "implicit"),
    "optimiser": ("multi_tensor", "fused"),
    "copies": ("Memcpy", "Memset", "copy"),
}


def profile(lab: Lab) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the longest kernels."""
    work, count = lab.workload(lab.recipe()), 3
    work.advance(5)
    wait(lab.device)
    activity = torch.profiler.ProfilerActivity.CUDA if lab.cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as seen:
        work.advance(count)
        wait(lab.device)
    time_of = "self_device_time_total" if lab.cuda else "self_cpu_time_total"
    rows = [(e.key, getattr(e, time_of) / count / 1e3, e.count / count) for e in seen.key_averages()]
    rows.sort(key=lambda row: -row[1])
    kinds = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, milliseconds, _ in rows:
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        kinds[kind] += milliseconds
    return {
        "batch_size": work.training.batch_size,
        "milliseconds": sum(row[1] for row in rows),
        "kernels": sum(row[2] for row in rows),
        "by_kind": kinds,
        "longest": [{"name": n[:120], "milliseconds": m, "times": t} for n, m, t in rows[:60]],
    }


def first_step(lab: Lab) -> dict[str, Any]:
    """The product's first step in this process; for `warmup`."""
    started = time.perf_counter()
    work = lab.workload(lab.recipe())
    work.advance()
    wait(lab.device)
    return {"first_step_seconds": time.perf_counter() - started}


def warmup(lab: Lab) -> dict[str, Any]:
    """The first step in a new process: cold, then with the compile cache that the first one left."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = lab.args.cache or stack.enter_context(tempfile.TemporaryDirectory())
        if Path(folder).is_dir() and any(Path(folder).iterdir()):
            raise ValueError(f"--cache: expected an empty folder, so that the first process starts cold, got {folder}")
        cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("cold", "cached"):
            out = Path(folder) / f"{name}.json"
            out.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, __file__, "--only", "first", "--device", str(lab.device), "--out", str(out)]
            command += ["--smoke"] if lab.smoke else []
            started = time.perf_counter()
            subprocess.run(command, check=True, env={**os.environ, **cache}, stdout=subprocess.DEVNULL)
            seconds = json.loads(out.read_text())["sections"]["first"]["first_step_seconds"]
            found[name] = {"first_step_seconds": seconds, "process_seconds": time.perf_counter() - started}
    return found


def cpu(lab: Lab) -> dict[str, Any]:
    """Plain and fast steps in turn on the CPU, so that other work slows all alike; bfloat16 where it has it."""
    lab = copy.copy(lab)
    lab.device, lab.cuda = torch.device("cpu"), False
    config = lab.recipe(batch_size=32, steps=2 if lab.smoke else 10)
    works = {name: lab.workload(config, fast) for name, fast in (("plain", "off"), ("fast", "on"))}
    data = lab.data(config.data.dataset)
    works["folded replica alone"] = Workload(config, data, lab.device, make=variant({}, {"fuse": False}))
    if bfloat16_pays(lab):
        half = replace(config, training=replace(config.training, precision="bfloat16"))
        works |= {"plain, bfloat16": lab.workload(half, "off"), "fast, bfloat16": lab.workload(half, "on")}
    rounds = 2 if lab.smoke else max(3, lab.steps // 8)
    with kept_memory(lab.device):
        times = in_turn(works, rounds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    found = {"threads": torch.get_num_threads(), "batch_size": config.training.batch_size, "step_seconds": times}
    found |= {"median_step_seconds": middle, "minimal_filtering": winograd.pays(), "memory": memory(lab, rounds)}
    return found | {"speed_up": {name: middle["plain"] / seconds for name, seconds in middle.items()}}


def in_turn(works: dict[str, Workload], rounds: int) -> dict[str, list[float]]:
    """Seconds of single steps, each work's after the other's."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work.advance()
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds_of(work.advance, work.device))
    return times


def memory(lab: Lab, rounds: int) -> dict[str, Any]:
    """The plain step with freed memory returned to the system, and kept: tensors of 38 MB and of 34."""
    recipes = {
        "mnist, batch 256": lab.recipe("mnist", batch_size=256),
        "cifar10, batch 128": lab.recipe(batch_size=128),
    }
    found = {}
    for name, config in recipes.items():
        work, seconds = {"plain": lab.workload(config, "off")}, {}
        for way, context in (("returned", nullcontext()), ("kept", kept_memory(lab.device))):
            with context:
                seconds[way] = statistics.median(in_turn(work, min(3, rounds))["plain"])
        found[name] = {"step_seconds": seconds, "speed_up": seconds["returned"] / seconds["kept"]}
    return found


def bfloat16_pays(lab: Lab) -> bool:
    """Whether products of bfloat16 run, and faster than those of float32."""
    try:
        require_bfloat16()
    except UsageError:
        return False
    return lab.smoke or matmul_ceiling("cpu", torch.bfloat16) > 1.2 * matmul_ceiling("cpu")


def free(lab: Lab) -> None:
    gc.collect()
    if lab.cuda:
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[Lab], Any]] = {
    "batch512": training(),
    "batch128": training(batch_size=128),
    "plain": plain,
    "mnist": training("mnist", batch_size=128),
    "eval": evaluation,
    "linear": linear,
    "resnet50": training(model="resnet50"),
    "wrn": training(model="wrn-28-10"),
    "profile": profile,
    "warmup": warmup,
    "table": table,
    "cpu": cpu,
    "autoattack": autoattack,
    "first": first_step,
}
DEFAULT = {"cuda": [n for n in SECTIONS if n not in ("cpu", "autoattack", "first")], "cpu": ["cpu"]}


def figures(sections: dict[str, Any]) -> dict[str, float]:
    """The figures that have a target, and the two ratios."""

    def dig(*path: str) -> Any:
        value: Any = sections
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    found = {f"{name} seconds per epoch": dig(name, "seconds_per_epoch") for name in ("batch512", "batch128", "mnist")}
    found["batch512 share of the ceiling"] = dig("batch512", "share")
    found |= {f"{name} share of the ceiling": dig(name, "share") for name in ("resnet50", "wrn")}
    if dig("plain") and dig("batch512"):
        own = dig("batch512", "seconds_per_epoch")
        found["times as fast as plain float32"] = dig("plain", "tf32", "seconds_per_epoch") / own
        found["times as fast as plain strict float32"] = dig("plain", "ieee", "seconds_per_epoch") / own
    found["pgd20 seconds, tf32 search"] = dig("eval", "tf32", "seconds")
    found["pgd20 seconds, strict"] = dig("eval", "strict", "seconds")
    found["autoattack seconds"] = dig("autoattack", "seconds")
    found["warm-up seconds, cold"] = dig("warmup", "cold", "first_step_seconds")
    found["warm-up seconds, cached"] = dig("warmup", "cached", "first_step_seconds")
    found["slope over forward-backward"] = dig("linear", "slope_over_forward_backward")
    found["CPU: times as fast as plain"] = dig("cpu", "speed_up", "fast")
    found["CPU: times as fast as plain, bfloat16"] = dig("cpu", "speed_up", "fast, bfloat16")
    return {name: value for name, value in found.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--steps", type=int, default=30, help="steps to time in each section")
    parser.add_argument("--weights", help="a .safetensors of a robust ResNet-18 on CIFAR-10, for eval and autoattack")
    parser.add_argument("--examples", type=int, help="images of autoattack (default: all)")
    parser.add_argument("--cache", help="for warmup: an empty folder to keep the compile cache in")
    parser.add_argument("--uncompiled", action="store_true", help="capture without compiling: a quick look")
    parser.add_argument("--smoke", action="store_true", help="run every line at sizes that mean nothing")
    parser.add_argument("--out", type=Path, help="the JSON to write (default: results/fast-DEVICE.json)")
    args = parser.parse_args()
    out = args.out or RESULTS / f"fast-{torch.device(args.device).type}.json"
    chosen = args.only or ([*SECTIONS][:-1] if args.smoke else DEFAULT[torch.device(args.device).type])
    with no_denormals():
        lab = Lab(args)
        found: dict[str, Any] = {"environment": environment(), "seed": 0, "steps_timed": lab.steps}
        found |= {"matmul_tflops": lab.ceiling, "smoke": lab.smoke, "seconds": {}, "sections": {}}
        print(f"matmul ceiling {lab.ceiling:.4g} TFLOP/s", flush=True)
        for name in chosen:
            started = time.perf_counter()
            try:
                found["sections"][name] = SECTIONS[name](lab)
            except Exception as error:  # the other sections are worth having all the same
                found["sections"][name] = {"error": f"{type(error).__name__}: {error}"}
            free(lab)
            found["seconds"][name] = time.perf_counter() - started
            found["figures"] = figures(found["sections"])
            write_json(out, finite(found))
            error = found["sections"][name].get("error", "")
            print(f"{name}: {found['seconds'][name]:.1f} s {error}", flush=True)
    print()
    for name, value in found["figures"].items():
        target = f"   (at most {TARGETS[name]:g})" if name in TARGETS else ""
        print(f"{name:36s}{value:10.3f}{target}")
    if any("error" in section for section in found["sections"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
