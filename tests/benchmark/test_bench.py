from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dale.algorithms import dale, erm
from dale.benchmark import bench, machine, matmul_ceiling, synthetic_dataset
from dale.benchmark.flops import count_flops
from dale.benchmark.workload import Workload
from dale.errors import UsageError
from dale.models import create_model, load_weights
from dale.perturbations import Linf
from dale.training import fit
from dale.training.recipes import default_config, with_algorithm
from dale.training.steps import PlainStep

CPU = torch.device("cpu")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fast.py"


@pytest.fixture(scope="module")
def data():
    return synthetic_dataset("digits", 64)


@pytest.fixture(scope="module")
def config():
    found = default_config("digits")
    return replace(found, training=replace(found.training, batch_size=16))


def test_synthetic_data_has_the_shape_and_number_of_the_set():
    found = synthetic_dataset("CIFAR-10", 100)
    assert found.image_shape == (3, 32, 32)
    assert len(found.train) == 100
    assert found.train.images.dtype == torch.uint8
    assert torch.equal(found.train.images, synthetic_dataset("cifar10", 100).train.images)
    assert len(synthetic_dataset("digits").train) == 1797
    with pytest.raises(UsageError, match="cifar10"):
        synthetic_dataset("cifar1")


def test_operations_of_a_step_follow_from_those_of_a_forward_pass():
    """Attack: the clean pass and two per step. Training: three for clean and perturbed, less the stem's input."""
    model = create_model("resnet18", channels=3, size=8, num_classes=10)
    ball = Linf(epsilon=8 / 255)
    counts = {
        steps: count_flops(model, dale(ball, rho=0.8, steps=steps).for_run(1, 1), (3, 8, 8), 10) for steps in (1, 2)
    }
    forward = counts[1].forward
    assert counts[1].attack == 3 * forward
    assert counts[2].attack == 5 * forward
    stem = 2 * 8 * 8 * 64 * 27
    assert counts[2].training == counts[1].training == 6 * forward - 2 * stem
    assert count_flops(model, erm(), (3, 8, 8), 10).attack == 0.0


def test_operations_of_resnet18_are_those_worked_out_by_hand():
    """Multiply-adds: the stem, four 64-channel convolutions, three stages of four and a shortcut, the last product."""
    model = create_model("resnet18", channels=3, size=32, num_classes=10)
    convolution = 64 * 64 * 9 * 32 * 32  # the same in every stage: half the side, twice the channels
    stage = convolution // 2 + 3 * convolution + 64 * 128 * 16 * 16
    expected = 3 * 64 * 9 * 32 * 32 + 4 * convolution + 3 * stage + 512 * 10
    assert count_flops(model, erm(), (3, 32, 32), 10).forward == 2 * expected


def test_counting_leaves_the_model_alone(data):
    model = create_model("convnet", data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    count_flops(model, dale(Linf(epsilon=0.25), rho=0.1).for_run(1, 1), data.image_shape, 10)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_ceiling_is_a_rate():
    assert 1e-4 < matmul_ceiling("cpu", sizes=(128,)) < 1e3


@pytest.mark.parametrize(("product", "convolution"), [(1e-3, 1.0), (1.0, 1e-3)])
def test_the_faster_of_two_libraries_sets_the_ceiling_of_a_cpu(product, convolution, monkeypatch):
    """By a clock of the test's own, which a product of 128 numbers square and a convolution set forward."""
    now = [0.0]

    def takes(seconds):
        return lambda *_, **__: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(machine, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "mm", takes(product))
    monkeypatch.setattr(torch, "conv2d", takes(convolution))
    rates = (2 * 128**3 / product, 2 * 9 * 32 * 8 * 8 * 256 * 256 / convolution)
    assert matmul_ceiling("cpu", sizes=(128,)) == pytest.approx(max(rates) / 1e12)


def test_bench_adds_up(config, data):
    found = bench(config, data, device="cpu", steps=2, ceiling=0.1)
    assert found.path == "plain"
    assert found.images_per_second == pytest.approx(16 / found.step_seconds)
    assert found.seconds_per_epoch >= 4 * found.step_seconds
    assert found.share == pytest.approx(found.flops.total * 16 / found.step_seconds / 0.1e12)
    parts = vars(found.split)
    assert all(value >= 0 for value in parts.values())
    assert sum(parts.values()) >= found.step_seconds * (1 - 1e-9)
    assert found.split.attack > found.split.data
    plain = json.loads(json.dumps(found.to_plain(), allow_nan=False))
    assert plain["environment"]["torch"] == torch.__version__
    assert plain["config"]["training"]["batch_size"] == 16
    assert "images/s" in str(found)
    assert ("says nothing here" in str(found)) == (found.split.training == 0.0)
    overlong = dataclasses.replace(found, split=dataclasses.replace(found.split, training=0.0))
    assert str(overlong).endswith("took longer than the whole step: the split says nothing here.")


def test_bench_takes_any_row_and_the_fast_path(config, data):
    assert bench(config, data, device="cpu", fast="on", steps=1, ceiling=1.0).path == "folded"
    erm_only = bench(with_algorithm(config, "erm"), data, device="cpu", steps=1, ceiling=1.0)
    assert erm_only.split.attack == 0.0
    own = bench(config, data, device="cpu", steps=1, ceiling=1.0, make=lambda m, o, t, d: PlainStep(o, t, d))
    assert own.path == "plain"


def test_a_workload_does_the_steps_of_training(config, data, tmp_path):
    """An epoch of `fit` and as many steps of the workload end at the same weights."""
    config = replace(config, training=replace(config.training, epochs=1, averaging=None))
    work = Workload(config, data, CPU)
    work.advance(len(work.loader))
    model = create_model("convnet", data, seed=config.training.seed)
    fit(model, config.build_objective(), data, out=tmp_path / "run", config=config, progress=False, loggers=())
    load_weights(model, tmp_path / "run" / "last.safetensors")
    for mine, theirs in zip(work.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_bench_refuses_what_it_cannot_time(config, data):
    with pytest.raises(UsageError, match="at least 1"):
        bench(config, data, device="cpu", steps=0)
    fixed = replace(config, training=replace(config.training, deterministic=True))
    with pytest.raises(UsageError, match="deterministic"):
        bench(fixed, data, device="cpu", steps=1)


def test_the_script_runs_its_sections_and_keeps_what_it_measured(tmp_path):
    out = tmp_path / "fast.json"
    sections = ["batch512", "plain", "mnist", "eval", "linear", "table", "cpu"]
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--smoke", "--out", str(out), "--only", *sections]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found["sections"]) == sections
    assert found["smoke"]
    assert found["figures"]["CPU: times as fast as plain"] > 0
    assert set(found["sections"]["linear"]["milliseconds"]) == {"1", "2", "5"}


@pytest.mark.verify
def test_the_script_runs_what_takes_longer(tmp_path):
    out = tmp_path / "fast.json"
    sections = ["batch128", "resnet50", "wrn", "warmup", "autoattack"]
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--smoke", "--out", str(out), "--only", *sections]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(json.loads(out.read_text())["sections"]) == sections
