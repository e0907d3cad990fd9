"""Sweeps on a Ray cluster that the test starts itself, and the job array for Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dale.cli import main

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 10**8})
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
TINY = {
    "device": "cpu",
    "epochs": 2,
    "batch_size": 32,
    "steps": 1,
    "train_size": 64,
    "validation_size": 20,
    "certification_size": 20,
    "test_size": 20,
    "validation_steps": 1,
    "validation_examples": 5,
    "no_evaluate": True,
    "algorithm": "pgd",
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: dale[ray]")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of two cores; it ends when its process's input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    address = next((line.split()[1] for line in process.stdout if line.startswith("address ")), None)
    assert address is not None, "the cluster did not start"
    yield address
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def sweep(folder: Path, address: str, epochs: int) -> subprocess.Popen[str]:
    plain = {"base": TINY | {"epochs": epochs}, "grid": {"seed": [0, 1]}}
    (folder / "s.yaml").write_text(json.dumps(plain))
    words = [sys.executable, "-m", "dale", "sweep", "s.yaml", "--out", "out", "--ray", address]
    return subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )


@needs_ray
@pytest.mark.verify
def test_a_sweep_on_ray(cluster, tmp_path):
    process = sweep(tmp_path, cluster, epochs=2)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    for seed in (0, 1):
        assert (tmp_path / "out" / f"seed={seed}" / "model.safetensors").is_file()
        assert f"seed={seed} finished" in output
    assert (tmp_path / "out" / "results.csv").read_text().count("finished") == 2


@needs_ray
@pytest.mark.verify
def test_sigkill_of_the_ray_driver(cluster, tmp_path):
    """Its runs end with it; the same command continues them."""
    process = sweep(tmp_path, cluster, epochs=400)
    runs = [tmp_path / "out" / f"seed={seed}" for seed in (0, 1)]

    def steps(run: Path) -> int:
        return max((int(p.stem[5:]) for p in run.glob("checkpoints/step-*.safetensors")), default=0)

    _wait(lambda: all(steps(run) for run in runs), 120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _wait(lambda: not _training(tmp_path), 60)
    reached = [steps(run) for run in runs]
    again = sweep(tmp_path, cluster, epochs=400)
    _wait(lambda: all(steps(run) > n for run, n in zip(runs, reached, strict=True)), 120)
    again.send_signal(signal.SIGKILL)
    output, _ = again.communicate()
    assert output.count("(continued)") == 2
    _wait(lambda: not _training(tmp_path), 60)


def _wait(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.02)


def _training(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and any(str(folder).encode() in word for word in words):
            found.append(int(entry.parent.name))
    return found


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there(address, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(json.dumps({"base": TINY, "grid": {"seed": [0]}}))
    assert main(["sweep", "s.yaml", "--ray", address]) == 1
    assert capsys.readouterr().err == f"dale: error: cannot reach a Ray cluster at '{address}': Connection refused\n"


def test_without_ray_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(json.dumps({"base": TINY, "grid": {"seed": [0]}}))
    assert main(["sweep", "s.yaml", "--ray", "auto"]) == 2
    assert capsys.readouterr().err == "dale: error: --ray needs Ray: pip install 'dale[ray]'\n"


def test_a_job_array_for_slurm(tmp_path, monkeypatch, capsys):
    """Valid shell; as many tasks as runs; each task is `dale sweep --only` its own number."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's a sweep.yaml").write_text(json.dumps({"base": TINY, "grid": {"seed": [0, 1, 2]}}))
    words = ["sweep", "it's a sweep.yaml", "--out", "my out", "--slurm", "jobs.sh", "--gpus", "2", "--cpus", "4"]
    assert main(words) == 0
    assert "3 runs; submit them with: sbatch jobs.sh" in capsys.readouterr().out
    text = (tmp_path / "jobs.sh").read_text()
    for line in ("--array=0-2", "--cpus-per-task=4", "--gpus-per-task=2", "--requeue", "--signal=B:TERM@60"):
        assert f"#SBATCH {line}\n" in text
    assert (tmp_path / "my out" / "logs").is_dir()  # Slurm does not make the folder of its output
    # bash itself reads the command: `exec` becomes a function that prints its words, one a line
    shown = subprocess.run(
        ["bash", "-c", 'exec() { printf "%s\\n" "$@"; }; . ./jobs.sh'],
        env=os.environ | {"SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[1:4] == ["-m", "dale", "sweep"]
    sweep_path, out = str(tmp_path / "it's a sweep.yaml"), str(tmp_path / "my out")
    assert shown[4:] == [sweep_path, "--out", out, "--workers", "1", "--only", "1"]
