"""Bad input, through the real command line: one clear line, the right exit code, nothing overwritten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import TINY, Result

Dale = Callable[..., Result]

USAGE, FAILURE = 2, 1

# arguments of `dale train`, what the line must hold
REQUESTS: list[tuple[str, tuple[str, ...]]] = [
    ("--algorithm dael", ("unknown algorithm 'dael'", "did you mean 'dale'?")),
    ("--dataset digitz", ("unknown dataset 'digitz'", "did you mean 'digits'?")),
    ("--epoch 3", ("unknown option --epoch", "did you mean --epochs?")),
    ("--min-acuracy 0.9", ("unknown option --min-acuracy", "did you mean --min-accuracy?")),
    ("--model convnt", ("unknown model 'convnt'", "did you mean 'convnet'?")),
    ("--attacks fgsm fgsm", ("'fgsm' is listed more than once",)),
    ("--attacks square10 --set rotation", ("square",)),
    ("--attacks pdg20", ("unknown attack 'pdg20'", "did you mean 'pgd20'?")),
    ("--compare erm pdg", ("unknown algorithm 'pdg'", "did you mean 'pgd'?")),
    ("--set linv --epsilon 0.1", ("unknown PerturbationSet 'linv'", "did you mean 'Linf'?")),
    ("--sampler chian", ("unknown Sampler 'chian'", "did you mean 'Chain'?")),
    ("--loss cross-entrop", ("did you mean",)),
    ("--optimiser adamv", ("unknown Optimiser 'adamv'", "did you mean 'AdamW'?")),
    ("--schedule cosin", ("unknown Schedule 'cosin'", "did you mean 'Cosine'?")),
    ("--augmentation [RandomFlop]", ("unknown Augmentation 'RandomFlop'", "did you mean 'RandomFlip'?")),
    ("--activation reul", ("unknown activation 'reul'", "did you mean 'relu'?")),
    ("--precision float16", ("unknown Training.precision 'float16'", "did you mean 'bfloat16'?")),
    ("--by clas", ("unknown --by 'clas'", "did you mean 'class'?")),
    ("--device cudda", ("no device 'cudda'",)),
    ("--epsilon -0.1", ("epsilon", "-0.1")),
    ("--epsilon nan", ("--epsilon: expected a number, got 'nan'",)),
    ("--epsilon 1/0", ("--epsilon: expected a number, got '1/0'",)),
    ("--epsilon wide", ("--epsilon: expected a number, got 'wide'",)),
    ("--rho -1", ("limit must be a finite number of at least 0, got -1",)),
    ("--rho nan", ("--rho: expected float, got 'nan'",)),
    ("--algorithm pgd --dual-upper 1", ("'--dual-upper'", "Valid: --robust-loss, --sampler, --step-size, --steps")),
    ("--rho .nan", ("--rho: expected a number, got nan",)),
    ("--rho much", ("--rho",)),
    ("--rho [0.1,0.2]", ("one limit for all, got 2",)),
    ("--rho [0.1,0.2] --by class", ("2 limits for 10 values of 'class'",)),
    ("--rho []", ("limit is empty",)),
    ("--min-accuracy 1.5", ("min_accuracy is a share in (0, 1]", "1.5")),
    ("--min-accuracy 0", ("min_accuracy is a share in (0, 1]",)),
    ("--by group", ("no group labels",)),
    ("--algorithm erm --rho 0.1", ("unknown option of algorithm 'erm' '--rho'",)),
    ("--algorithm pgd --beta 2", ("unknown option of algorithm 'pgd' '--beta'",)),
    ("--option nothing", ("--option: expected NAME=VALUE, got 'nothing'",)),
    ("--set linf", ("needs a radius: give --epsilon",)),
    ("--set rotation --epsilon 0.1", ("has no radius",)),
    ("--set {epsilon:0.1}", ("--set: expected a name or a mapping with `type`",)),
    ("--epsilon 8", ("a pixel has the range [0, 1], got 8", "did you mean 8/255?")),
    ("--set linf --epsilon 300", ("a pixel has the range [0, 1], got 300",)),
    ("--set {type:", ("--set: not valid YAML",)),
    ("--epochs 0", ("epochs must be at least 1, got 0",)),
    ("--epochs many", ("--epochs", "many")),
    ("--batch-size -5", ("batch_size must be at least 1, got -5",)),
    ("--train-size 0", ("train_size must be at least 1, got 0",)),
    ("--train-size 99999", ("is more than the 1797 examples there are",)),
    ("--steps 0", ("steps",)),
    ("--steps 2.5", ("--steps: expected int, got 2.5",)),
    ("--lr 0", ("learning_rate must be a finite number above 0",)),
    ("--lr fast", ("--lr: expected a number, got 'fast'",)),
    ("--weight-decay -1", ("weight_decay must be a finite number of at least 0",)),
    ("--ema 1", ("decay lies in [0, 1)",)),
    ("--seed -1", ("seed must be a whole number",)),
    ("--seed 99999999999999999999", ("seed must be a whole number",)),
    ("--examples 0", ("--examples: expected at least 1, got 0",)),
    ("--validate-every 0", ("every must be at least 1",)),
    ("--model no.such:Net", ("cannot import 'no.such:Net'",)),
    (
        "--algorithm pgd --rho 0.1",
        ("unknown option of algorithm 'pgd' '--rho', which dale, dale-optimal have", "Valid: "),
    ),
    ("--algorithm dale --nu 3", ("unknown option of algorithm 'dale' '--nu', which dale-fixed have",)),
    ("--set rotation --epsilon 0.1", ("rotation has no radius; its options are degrees",)),
    ("--device gpu", ("no device 'gpu' here (unknown)", "`cuda` is a GPU")),
    ("--model torch.nn:Flaten", ("cannot import 'torch.nn:Flaten'", "did you mean 'Flatten'?")),
    ("--log tensorbord", ("unknown logger 'tensorbord'", "did you mean 'tensorboard'?")),
    ("--algorithm math:nothing", ("cannot import 'math:nothing'",)),
    ("--config missing.yaml", ("there is no file 'missing.yaml'",)),
    ("--resume missing", ("missing is not a run folder",)),
    ("--tighten perhaps", ("--tighten: expected bool, got 'perhaps'",)),
]


def _check(result: Result, code: int, *expected: str) -> None:
    assert result.code == code, result
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("dale: error: ")
    for text in expected:
        assert text in lines[0]
    assert result.out == ""


@pytest.mark.parametrize(("arguments", "expected"), REQUESTS, ids=[r[0] for r in REQUESTS])
def test_a_request_that_cannot_be_met(arguments: str, expected: tuple[str, ...], dale: Dale, tmp_path: Path) -> None:
    _check(dale("train", "--quiet", "--out", "run", *arguments.split()), USAGE, *expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("trian", ("unknown command 'trian'", "did you mean 'train'?")),
        ("", ("COMMAND",)),
        ("list algoritms", ("unknown kind 'algoritms'", "did you mean 'algorithms'?")),
        ("certify", ("RUN",)),
        ("export zoo:mnist-convnet-dale", ("dale export takes a run", "mnist-convnet-dale.safetensors")),
        ("certify nowhere", ("nowhere is not a run folder",)),
        ("certify nowhere --method magic", ("magic",)),
        ("check-model convnt", ("unknown model 'convnt'", "did you mean 'convnet'?")),
        ("check-model convnet --device cudda", ("no device 'cudda'",)),
        ("check-model convnet --classes 1", ("num_classes must be at least 2",)),
    ],
)
def test_other_commands(arguments: str, expected: tuple[str, ...], dale: Dale) -> None:
    _check(dale(*arguments.split()), USAGE, *expected)


def _arrays(**changes: Any) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    images = generator.random((60, 1, 8, 8), dtype=np.float32)
    return {"images": images, "labels": generator.integers(0, 3, 60)} | changes


_BASE = _arrays()
_OUTSIDE, _NAN = _BASE["images"].copy(), _BASE["images"].copy()
_OUTSIDE[7, 0, 0, 0], _NAN[3, 0, 2, 2] = 200.0, np.nan
DATA: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("outside", _arrays(images=_OUTSIDE), ("image 7", "[0, 1]")),
    ("nan", _arrays(images=_NAN), ("image 3 has NaN",)),
    ("flat", _arrays(images=_BASE["images"].reshape(60, 64)), ("images", "60, 64")),
    ("few-labels", _arrays(labels=_BASE["labels"][:50]), ("labels", "50")),
    ("negative-label", _arrays(labels=np.where(np.arange(60) == 5, -1, _BASE["labels"])), ("label",)),
    ("float-labels", _arrays(labels=_BASE["labels"].astype(np.float32)), ("labels must be integers",)),
    ("empty", _arrays(images=_BASE["images"][:0], labels=_BASE["labels"][:0]), ("no images",)),
    ("no-labels", {"images": _BASE["images"]}, ("labels",)),
    ("bad-groups", _arrays(groups=np.zeros(9, dtype=np.int64)), ("groups",)),
]


@pytest.mark.parametrize(("name", "arrays", "expected"), DATA, ids=[d[0] for d in DATA])
def test_data_that_is_not_what_it_should_be(
    name: str, arrays: dict[str, Any], expected: tuple[str, ...], dale: Dale, tmp_path: Path
) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    _check(dale("train", "--dataset", "mine.npz", "--out", "run", "--quiet"), FAILURE, "mine.npz", *expected)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_archive(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(b"nothing of the kind")
    _check(dale("train", "--dataset", "mine.npz", "--out", "run", "--quiet"), FAILURE, "mine.npz")
    _check(dale("train", "--dataset", "no/such.npz", "--out", "run", "--quiet"), FAILURE, "no/such.npz")


def test_an_empty_folder_of_images(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    _check(dale("train", "--dataset", "images", "--out", "run", "--quiet"), FAILURE, "no class folders")


NETS = """
import torch
from torch import nn
class Five(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 5))
class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(100, 10))
class Pair(Five):
    def forward(self, x):
        return x, x
class Map(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 10, 1))
class Broken(Five):
    def forward(self, x):
        raise KeyError("what")
class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.requires_grad_(False)
def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Five", ("the model has 5 outputs, digits has 10 classes",)),
        ("Wide", ("the model does not accept images of 1x8x8",)),
        ("Pair", ("the model returned tuple; expected a tensor of logits",)),
        ("Map", ("the model returned shape (1, 10, 8, 8) for one image; expected (1, 10)",)),
        ("Broken", ("the model does not accept images of 1x8x8", "KeyError: 'what' (bad_nets.py, line ")),
        ("Frozen", ("no parameters to train",)),
        ("nothing", ("NoneType, expected an nn.Module",)),
    ],
)
def test_models_that_do_not_fit(model: str, expected: tuple[str, ...], dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "bad_nets.py").write_text(NETS)
    sys.modules.pop("bad_nets", None)
    _check(dale("train", "--model", f"bad_nets:{model}", "--quiet", "--out", "run"), USAGE, *expected)


def test_a_row_of_the_users_that_is_none(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "bad_rows.py").write_text("def row(perturbations, *, rho=0.1):\n    return rho\n")
    _check(dale("train", "--algorithm", "bad_rows:row", "--quiet"), USAGE, "returned float; a row returns")
    _check(dale("train", "--algorithm", "bad_rows:row", "--quiet", "--beta", 1), USAGE, "--beta", "--rho")


def test_an_existing_run_folder_is_left_as_it_is(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("four years of work")
    _check(dale("train", *TINY, "--out", "run", "--quiet"), USAGE, "run already exists", "--resume run")
    assert [p.name for p in (tmp_path / "run").rglob("*")] == ["thesis.txt"]
    _check(dale("train", *TINY, "--out", "run/thesis.txt", "--quiet"), USAGE, "already exists")
    assert (tmp_path / "run" / "thesis.txt").read_text() == "four years of work"


def test_a_folder_that_cannot_be_made(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _check(dale("train", *TINY, "--out", "file/run", "--quiet"), FAILURE, "cannot write in file/run", "Not a directory")
    # where even root may not write
    _check(dale("train", *TINY, "--out", "/proc/dale-run", "--quiet"), FAILURE, "cannot write in /proc/dale-run")


def test_a_configuration_of_another_version(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("format: 2\nfuture: [1]\n")
    _check(dale("train", "--config", "config.yaml"), USAGE, "configuration format 2; this version of dale reads")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {epoch: 3}", "did you mean 'epochs'?"),
        ("training: {epochs: three}", "config.yaml.training.epochs: expected int, got 'three'"),
        ("training: {seed: -4}", "seed must be a whole number"),
        ("objective: {name: dael}", "unknown algorithm 'dael'; did you mean 'dale'?"),
        ("objective: {name: erm, options: {rho: 0.1}}", "unknown option of algorithm 'erm' 'rho'"),
        ("[1, 2]", "expected the configuration of a run"),
        ("a: [", "not valid YAML"),
        ("", "expected the configuration of a run"),
    ],
)
def test_configurations_that_cannot_be_read(text: str, expected: str, dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    _check(dale("train", "--config", "config.yaml", "--out", "run", "--quiet"), USAGE, expected)


def test_a_configuration_that_is_no_text(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    _check(dale("train", "--config", "config.yaml"), FAILURE, "is not a text file")


def test_weights_that_do_not_fit(dale: Dale, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x10\x00\x00\x00")
    _check(dale("train", "--init", "weights.safetensors", "--quiet", "--out", "run"), FAILURE, "truncated")
    _check(dale("train", "--init", "gone.safetensors", "--quiet", "--out", "run"), FAILURE, "no such weights file")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from dale.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_in_a_process_of_its_own(tmp_path: Path) -> None:
    """No file may grow beyond 100 kB: writes fail for real, as on a full disk, at the first checkpoint."""
    command = [sys.executable, "-c", LIMITED, "train", *TINY, "--out", "run", "--quiet"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    result = Result(ended.returncode, ended.stdout, ended.stderr)
    _check(result, FAILURE, "cannot write run/checkpoints/step-000000000.safetensors: File too large")
    left = {p.name for p in (tmp_path / "run").rglob("*") if p.is_file()} - {".lock"}
    assert {name for name in left if not name.startswith("events")} == {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
    }


def test_no_traceback_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dale", "train", "--epsilon", "-1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    _check(Result(ended.returncode, ended.stdout, ended.stderr), USAGE, "epsilon")
