"""`dale train` on real MNIST and CIFAR-10, from the command line, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.verify
@pytest.mark.parametrize(("dataset", "train_size", "chance"), [("mnist", 6000, 0.5), ("cifar10", 500, 0.0)])
def test_training_on_real_data(tmp_path: Path, real_data: Path, dataset: str, train_size: int, chance: float) -> None:
    words = ["--algorithm", "dale", "--rho", "0.5", "--epochs", "1", "--train-size", str(train_size)]
    if dataset == "cifar10":  # ResNet-18 on a CPU: fewer images under attack, so that the check stays within its time
        words += ["--validation-size", "200", "--validation-examples", "20", "--examples", "20"]
    done = subprocess.run(
        [sys.executable, "-m", "dale", "train", "--dataset", dataset, *words, "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "DALE_DATA": str(real_data)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pgd20" in done.stdout
    run = tmp_path / "run"
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["clean"]["accuracy"] >= chance  # one epoch on 500 images of CIFAR-10 promises nothing
    assert evaluation["worst"]["accuracy"] <= evaluation["clean"]["accuracy"]
    assert "certificate" in evaluation
    assert (run / "report.html").stat().st_size < 6_000_000
