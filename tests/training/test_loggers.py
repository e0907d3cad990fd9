"""Loggers: the same names for the same numbers, whoever shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dale.errors import DaleError, UsageError
from dale.training.loggers import flat, log_gallery, make_logger, require_loggers, results, scalars

RECORD = {
    "epoch": 2,
    "epochs": 3,
    "loss": 1.5,
    "robust_loss": None,
    "nominal_loss": 0.5,
    "clean_accuracy": 0.75,
    "robust_accuracy": float("nan"),
    "learning_rate": 0.1,
    "constraints": [
        {"name": "loss", "by": "class", "limit": [0.1, 0.1], "multiplier": [1.0, None], "violation": [0.0, 0.5]}
    ],
    "validation": {"clean_accuracy": 0.5, "nominal_loss": 0.25},
    "seconds": {"train": 1.0, "total": 2.0},
}
SUMMARY = {"epochs": 3, "validation": {"clean_accuracy": 0.5}, "violation": None, "selected_epoch": 2, "seconds": 4.0}
CONFIG = {
    "type": "RunConfig",
    "training": {"epochs": 3, "optimiser": {"type": "SGD", "nesterov": True}, "augmentation": [1]},
}


def test_scalars_are_grouped_and_finite():
    assert scalars(RECORD) == {
        "train/loss": 1.5,
        "train/nominal_loss": 0.5,
        "train/clean_accuracy": 0.75,
        "train/learning_rate": 0.1,
        "validation/clean_accuracy": 0.5,
        "validation/nominal_loss": 0.25,
        "time/train_seconds": 1.0,
        "time/total_seconds": 2.0,
        "constraint/loss/multiplier/0": 1.0,
        "constraint/loss/violation/0": 0.0,
        "constraint/loss/violation/1": 0.5,
        "constraint/loss/limit/0": 0.1,
        "constraint/loss/limit/1": 0.1,
    }
    assert scalars({"epoch": 1}) == {}


def test_constraints_of_one_kind_have_names_of_their_own():
    record = {"constraints": [{"name": n, "multiplier": [float(i)]} for i, n in enumerate(["loss", "error", "loss"])]}
    assert scalars(record) == {
        "constraint/loss.0/multiplier": 0.0,
        "constraint/error/multiplier": 1.0,
        "constraint/loss.2/multiplier": 2.0,
    }


def test_settings_become_one_level():
    assert flat(CONFIG) == {
        "type": "RunConfig",
        "training.epochs": 3,
        "training.optimiser.type": "SGD",
        "training.optimiser.nesterov": True,
        "training.augmentation": "[1]",
    }


def events(folder):
    """What TensorBoard would read: (tag, step, kind) of every value in a folder's event files."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(v.tag, event.step, v.WhichOneof("value") or "metadata") for v in event.summary.value]
    return found


def test_tensorboard_holds_scalars_images_text_layout_and_hyperparameters(tmp_path):
    logger = make_logger(["tensorboard"], tmp_path, after=1)
    logger.start(CONFIG)
    logger.epoch(RECORD)
    logger.images("gallery/epsilon=0.1", np.zeros((4, 6, 3), dtype=np.uint8), 2)
    logger.finish(SUMMARY)
    found = events(tmp_path)
    assert ("train/loss", 2, "simple_value") in found
    assert ("result/clean_accuracy", 3, "simple_value") in found
    kinds = {kind for tag, _, kind in found if tag.startswith("gallery/")}
    assert kinds == {"image"}
    tags = {tag for tag, _, _ in found}
    assert {"configuration/text_summary", "custom_scalars__config__", "_hparams_/experiment"} <= tags
    assert sorted(tmp_path.iterdir()) == sorted(tmp_path.glob("events.*"))  # no second run in a folder of its own


def test_an_interrupted_run_has_no_results(tmp_path):
    logger = make_logger(["tensorboard"], tmp_path)
    logger.start(CONFIG)
    logger.finish(None)
    assert not [tag for tag, _, _ in events(tmp_path) if tag.startswith(("result/", "_hparams_"))]


def test_training_goes_on_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    logger = make_logger(["tensorboard"], tmp_path)
    logger.start(CONFIG)
    logger.epoch(RECORD)
    logger.images("x", np.zeros((2, 2, 3), dtype=np.uint8), 1)
    logger.finish(SUMMARY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DaleError, match=f"pip install {name}"):
        require_loggers(["tensorboard", name])


def test_processes_that_do_not_write_log_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = make_logger(["tensorboard"], None)
    logger.start(CONFIG)
    logger.epoch(RECORD)
    logger.finish(SUMMARY)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_logger_gets_the_nearest_name():
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        require_loggers(["tensorbord"])


def test_weights_and_biases_is_told_the_same(tmp_path, monkeypatch):
    said = []
    run = SimpleNamespace(
        log=lambda values, step: said.append((step, values)),
        summary={},
        finish=lambda exit_code: said.append(("closed", exit_code)),
    )
    library = SimpleNamespace(init=lambda **settings: said.append(settings) or run, Image=lambda image: image.shape)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    logger = make_logger(["wandb"], tmp_path)
    logger.start(CONFIG)
    logger.epoch(RECORD)
    logger.images("picture", np.zeros((2, 3, 3), dtype=np.uint8), 2)
    logger.finish(SUMMARY)
    assert said[0]["project"] == "dale"
    assert said[0]["config"] == CONFIG
    assert said[1:] == [(2, scalars(RECORD)), (2, {"picture": (2, 3, 3)}), ("closed", 0)]
    assert run.summary == results(SUMMARY)
    again = make_logger(["wandb"], tmp_path)
    again.start(CONFIG)
    assert said[-1]["id"] == said[0]["id"]  # a resumed run continues


def test_mlflow_is_told_the_same(tmp_path, monkeypatch):
    said = []
    calls = ("set_experiment", "start_run", "log_params", "log_metrics", "log_image", "end_run")
    library = SimpleNamespace(
        **{name: lambda *a, _name=name, **k: said.append((_name, a, k)) for name in calls}  # every call, as it came
    )
    monkeypatch.setitem(sys.modules, "mlflow", library)
    logger = make_logger(["mlflow"], tmp_path / "my-run")
    logger.start(CONFIG)
    logger.epoch(RECORD)
    logger.images("a/b", np.zeros((2, 2, 3), dtype=np.uint8), 2)
    logger.finish(None)
    names = [name for name, _, _ in said]
    assert names == ["set_experiment", "start_run", "log_params", "log_metrics", "log_image", "end_run"]
    assert said[1][2] == {"run_name": "my-run"}
    assert said[2][1][0]["training.epochs"] == "3"
    assert said[3] == ("log_metrics", (scalars(RECORD),), {"step": 2})
    assert said[4][1][1] == "a-b-00002.png"
    assert said[5][1] == ("KILLED",)


def test_the_gallery_is_shown_radius_by_radius(tmp_path):
    import torch

    from dale.training.artefacts import _png

    white, black = (_png(torch.full((1, 8, 8), value)) for value in (1.0, 0.0))
    example = {"clean": white, "levels": [{"delta": black, "perturbed": white}, {"delta": white, "perturbed": black}]}
    plain = {"gallery": {"unit": "epsilon", "radii": [0.0, 0.25], "examples": [example] * 3}}
    (tmp_path / "artefacts.json").write_text(json.dumps(plain))
    seen = {}
    logger = SimpleNamespace(images=lambda name, image, step: seen.update({name: (image, step)}))
    log_gallery(tmp_path / "artefacts.json", logger, 5)
    assert list(seen) == ["gallery/epsilon=0", "gallery/epsilon=0.25"]
    image, step = seen["gallery/epsilon=0.25"]
    assert (image.shape, step) == ((3 * 66, 3 * 66, 3), 5)
    assert image[30, 30, 0] == 255  # clean
    assert image[30 + 66, 30, 0] == 255  # perturbation
    assert image[30 + 132, 30, 0] == 0  # perturbed


FULL = """
import resource, sys
from pathlib import Path
from dale.errors import DaleError
from dale.training.loggers import TensorBoard
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
board = TensorBoard(Path(sys.argv[1]), 1)
names = ("learning_rate", "loss", "robust_loss", "nominal_loss", "clean_accuracy", "robust_accuracy")
try:
    for epoch in range(1, 20):
        board.epoch({"epoch": epoch, "constraints": [], **dict.fromkeys(names, 0.5)})
except DaleError as error:
    print(error)
board.finish(None)
"""


def test_tensorboard_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond 600 bytes."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"cannot write {tmp_path}/events.*: File too large\n"
