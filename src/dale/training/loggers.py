"""Live views of a run behind one small interface: TensorBoard always, Weights & Biases and MLflow where asked for.

A logger is told four things: the configuration when the run starts, a record after every epoch, pictures, and the
summary at the end. Numbers have the same names everywhere, grouped as TensorBoard groups them: `train/...`,
`validation/...`, `constraint/...`, `time/...`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import io
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dale.errors import DaleError, unknown
from dale.files import read_json

Image = npt.NDArray[np.uint8]  # (height, width, 3)


class Logger(ABC):
    """Something that shows a run while it trains."""

    @abstractmethod
    def start(self, config: Mapping[str, Any]) -> None:
        """Take note of the configuration, as nested plain values."""

    @abstractmethod
    def epoch(self, record: Mapping[str, Any]) -> None:
        """Take note of an epoch: the record that goes to metrics.jsonl."""

    @abstractmethod
    def images(self, name: str, image: Image, step: int) -> None:
        """Show a picture, (height, width, 3) bytes."""

    @abstractmethod
    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Take note of the result and close; None for a run that was interrupted."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an epoch's record under names that group well."""
    found: dict[str, Any] = {
        f"train/{key}": record.get(key)
        for key in ("loss", "robust_loss", "nominal_loss", "clean_accuracy", "robust_accuracy", "learning_rate")
    }
    held = record.get("validation") or {}
    found |= {f"validation/{key}": held.get(key) for key in ("clean_accuracy", "robust_accuracy", "nominal_loss")}
    found |= {f"time/{key}_seconds": value for key, value in (record.get("seconds") or {}).items()}
    constraints = record.get("constraints", ())
    names = [constraint["name"] for constraint in constraints]
    for number, constraint in enumerate(constraints):
        name = names[number] if names.count(names[number]) == 1 else f"{names[number]}.{number}"
        for key in ("multiplier", "violation", "measure", "limit"):
            values = constraint.get(key, ())
            for group, value in enumerate(values):
                suffix = f"/{group}" if len(values) > 1 else ""
                found[f"constraint/{name}/{key}{suffix}"] = value
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, `training.optimiser.learning_rate` and so on; lists become text."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif value is not None:
            found[name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found


def results(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a run's summary that tell one run from another."""
    held = summary.get("validation") or {}
    found: dict[str, Any] = {
        f"result/{key}": held.get(key) for key in ("clean_accuracy", "robust_accuracy", "nominal_loss")
    }
    found |= {f"result/{key}": summary.get(key) for key in ("violation", "selected_epoch", "seconds")}
    return {name: float(value) for name, value in found.items() if _is_number(value)}


LAYOUT = {
    "DALE": {
        "losses and the limit": [
            "Multiline",
            ["train/nominal_loss", "train/robust_loss", "validation/nominal_loss", "constraint/loss/limit"],
        ],
        "multiplier": ["Multiline", ["constraint/.*/multiplier.*"]],
        "held-out accuracy": ["Multiline", ["validation/clean_accuracy", "validation/robust_accuracy"]],
    }
}


class TensorBoard(Logger):
    """Event files in the run folder, so that `tensorboard --logdir runs` shows every run side by side.

    Scalars by group; a custom layout with the paper's Figure 2 (losses with the limit, the multiplier); the
    configuration as text; hyperparameters with the results at the end. A resumed run starts `after` the epochs it
    keeps. Where tensorboardX cannot be imported nothing is written: a run must not fail for its picture.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {}
        try:
            from tensorboardX.event_file_writer import EventsWriter
        except ImportError:
            self.writer = None
            return
        # not SummaryWriter: its thread and its work at exit meet a full disk with tracebacks of their own
        self.writer = EventsWriter(str(folder / "events"))
        if after is not None:
            from tensorboardX.proto.event_pb2 import SessionLog

            self._write(after, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **content: Any) -> None:
        """Write one event to the disk; a full one is one clear line."""
        from tensorboardX.proto.event_pb2 import Event

        assert self.writer is not None
        try:
            self.writer.write_event(Event(wall_time=time.time(), step=step, **content))
            self.writer.flush()
        except OSError as error:
            raise DaleError(f"cannot write {self.folder}/events.*: {error.strerror or error}") from error

    def start(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as text, and the layout."""
        self.config = flat(config)
        if self.writer is None:
            return
        from tensorboardX.summary import custom_scalars, text

        lines = "\n".join(f"    {k}: {v}" for k, v in self.config.items())
        self._write(0, summary=text("configuration", lines))
        self._write(0, summary=custom_scalars(LAYOUT))

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Write an epoch's numbers."""
        self._scalars(scalars(record), record["epoch"])

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        if self.writer is None:
            return
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write(step, summary=scalar(name, value))

    def images(self, name: str, image: Image, step: int) -> None:
        """Write a picture."""
        if self.writer is None:
            return
        from tensorboardX.summary import image as picture

        self._write(step, summary=picture(name, image, dataformats="HWC"))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write hyperparameters with results, and close the file."""
        if self.writer is None:
            return
        if summary is not None:
            from tensorboardX.summary import hparams

            found = results(summary)
            settings = {name: value for name, value in self.config.items() if not name.endswith(("type", "format"))}
            for part in hparams(settings, dict(found)):
                self._write(0, summary=part)
            self._scalars(found, int(summary.get("epochs", 0)))
        with contextlib.suppress(OSError):  # of a full disk, which was reported when it filled
            self.writer.close()


class WeightsAndBiases(Logger):
    """A run in the project "dale" of Weights & Biases, whose own settings (WANDB_PROJECT, WANDB_MODE) are honoured."""

    def __init__(self, folder: Path, after: int | None = None) -> None:
        del after
        self.library = _optional("wandb", "wandb")
        self.folder = folder
        self.run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run; a resumed one continues under its old name."""
        place = str(self.folder.resolve())
        identity = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        settings = {"dir": place, "name": self.folder.name, "id": identity, "resume": "allow", "config": dict(config)}
        if "WANDB_PROJECT" not in os.environ:
            settings["project"] = "dale"
        self.run = self.library.init(**settings)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Send an epoch's numbers."""
        self.run.log(scalars(record), step=record["epoch"])

    def images(self, name: str, image: Image, step: int) -> None:
        """Send a picture."""
        self.run.log({name: self.library.Image(image)}, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the results and close."""
        if self.run is not None:
            if summary is not None:
                self.run.summary.update(results(summary))
            self.run.finish(exit_code=0 if summary is not None else 1)


class MLflow(Logger):
    """A run in MLflow's experiment "dale", on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, after: int | None = None) -> None:
        del after
        self.library = _optional("mlflow", "mlflow")
        self.folder = folder
        self.open = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run and send its settings."""
        self.library.set_experiment("dale")
        self.library.start_run(run_name=self.folder.name)
        self.open = True
        self.library.log_params({name: str(value)[:500] for name, value in flat(config).items()})

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Send an epoch's numbers."""
        self.library.log_metrics(scalars(record), step=record["epoch"])

    def images(self, name: str, image: Image, step: int) -> None:
        """Send a picture."""
        self.library.log_image(image, f"{name.replace('/', '-')}-{step:05d}.png")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the results and close."""
        if self.open:
            if summary is not None:
                self.library.log_metrics(results(summary))
            self.library.end_run("FINISHED" if summary is not None else "KILLED")


class Several(Logger):
    """Tells several loggers the same."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)

    def start(self, config: Mapping[str, Any]) -> None:
        """Tell all."""
        for logger in self.loggers:
            logger.start(config)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Tell all."""
        for logger in self.loggers:
            logger.epoch(record)

    def images(self, name: str, image: Image, step: int) -> None:
        """Tell all."""
        for logger in self.loggers:
            logger.images(name, image, step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Tell all."""
        for logger in self.loggers:
            logger.finish(summary)


LOGGERS: dict[str, type[TensorBoard] | type[WeightsAndBiases] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def require_loggers(names: Sequence[str], *, packages: bool = True) -> None:
    """Raise for an unknown name, and for a logger whose package is not there (where training is to be, it may be)."""
    for name in names:
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)
        if packages and name != "tensorboard":  # which says by itself that it is not there, and training goes on
            _optional(name, name)


def make_logger(names: Sequence[str], folder: Path | None, after: int | None = None) -> Logger:
    """Return the loggers of the given names as one.

    `after` drops what a resumed run will write again. Without a folder, as in all processes of a run but the first,
    nothing is logged.
    """
    if folder is None:
        return Several([])
    return Several([LOGGERS[name](folder, after) for name in dict.fromkeys(names)])


def _optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DaleError(f"the logger {module} needs the package {package}: pip install {package}") from error


def log_gallery(artefacts: Path, logger: Logger, step: int) -> None:
    """Show the pictures of `artefacts.json`: per radius one sheet, clean images over perturbations over their sums."""
    from PIL import Image as Pillow

    def picture(text: str, side: int) -> Image:
        with Pillow.open(io.BytesIO(base64.b64decode(text))) as opened:
            shown = opened.convert("RGB").resize((side, side), Pillow.Resampling.NEAREST)
        return np.pad(np.asarray(shown, dtype=np.uint8), ((1, 1), (1, 1), (0, 0)), constant_values=128)

    gallery = read_json(artefacts)["gallery"]
    for level, radius in enumerate(gallery["radii"]):
        columns = []
        for example in gallery["examples"]:
            shown = example["levels"][level]
            three = (example["clean"], shown["delta"], shown["perturbed"])
            columns.append(np.vstack([picture(text, 64) for text in three]))
        logger.images(f"gallery/{gallery['unit'].replace(' ', '_')}={radius:.4g}", np.hstack(columns), step)
