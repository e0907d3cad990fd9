"""Run folders: self-contained, written atomically, locked while a process trains in them.

config.yaml  environment.json  metrics.jsonl  events.*  checkpoints/  model.safetensors  last.safetensors
evaluation.json  report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from dale.components import parse_yaml, to_plain
from dale.data import Dataset
from dale.environment import environment, find_device
from dale.errors import CheckpointError, DaleError, UsageError
from dale.files import (
    digest,
    finite,
    read_json,
    read_tensors,
    read_text,
    write_json,
    write_safetensors,
    write_tensors,
    write_text,
)
from dale.models import create_model, load_weights, save_weights
from dale.objectives import Objective
from dale.training.checkpoints import Snapshot
from dale.training.config import RunConfig, changed
from dale.training.state import TrainState

LOCK = ".lock"
KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._needed: frozenset[int] = frozenset()  # candidates that the newest checkpoint on disk may still select

    @property
    def exists(self) -> bool:
        """Whether there is anything at this place already, but for what a process killed at its start left behind."""
        if not self.path.is_dir():
            return self.path.exists() or self.path.is_symlink()
        inside = (path for path in self.path.iterdir() if not is_temporary(path) and path.name != LOCK)
        return any(path != self.checkpoints or not path.is_dir() or any(path.iterdir()) for path in inside)

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        try:
            self.config()
            trust = ""
        except DaleError:  # it names code of the user's own
            trust = " --trust"
        return f"dale train --resume {shlex.quote(str(self.path))}{trust}"

    def refuse(self) -> NoReturn:
        """Say that there is something here already."""
        raise UsageError(
            f"{self.path} already exists; choose another --out (in Python, out), "
            f"or continue it with `{self.resume_command}`"
        )

    def create(self, config: RunConfig) -> None:
        """Make the folder a new run's, under the lock: of two processes that begin at once one is turned away."""
        if self.exists:
            self.refuse()
        # the configuration first: with it the folder is a run that can be continued, whatever happens next
        write_text(self.path / "config.yaml", config.to_yaml())

    def environment(self) -> dict[str, Any]:
        """What the run was begun on, as far as it says so."""
        path = self.path / "environment.json"
        found = read_json(path) if path.exists() else {}
        return found if isinstance(found, dict) else {}

    def write_environment(self, objective: Objective, splits: Mapping[str, str]) -> None:
        """Say what the run is made on, where that has not been said yet."""
        path = self.path / "environment.json"
        if not path.exists():
            write_json(path, environment() | {"objective": repr(objective), "splits": dict(splits)})

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run: a second process that trains in the same folder is turned away."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("w")
        except OSError as error:
            raise DaleError(f"cannot write in {self.path}: {error.strerror or error}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DaleError(f"{self.path} is in use: another process is training in it") from error
            for folder in (self.path, self.checkpoints):
                for left in filter(is_temporary, folder.glob(".*")):
                    left.unlink(missing_ok=True)  # of a process that was killed while writing
            yield

    def config(self, *, trust: bool = False) -> RunConfig:
        """Read the configuration."""
        path = self.path / "config.yaml"
        if not path.is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.yaml")
        return RunConfig.from_yaml(read_text(path), where=str(path), trust=trust)

    def require_same(self, config: RunConfig) -> None:
        """Refuse to continue the run under another configuration."""
        path = self.path / "config.yaml"
        if not path.is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.yaml")
        if found := changed(parse_yaml(read_text(path), str(path)), to_plain(config)):
            raise UsageError(f"{self.path} continues as it was configured: {found}")

    def save_checkpoint(self, state: TrainState, batches: int) -> None:
        """Write the state now."""
        self.write_checkpoint(Snapshot.of(state, batches))

    def write_checkpoint(self, snapshot: Snapshot, metadata: Mapping[str, str] | None = None) -> None:
        """Write a snapshot and its candidates, and let go of what neither it nor the checkpoint before it needs."""
        snapshot.to_host()
        for epoch, weights in snapshot.candidates.items():  # before the checkpoint, which counts on them
            write_safetensors(self.candidate(epoch), weights, {**(metadata or {}), "digest": digest(weights, "")})
        write_tensors(self.checkpoint(snapshot.step), snapshot.tensors, snapshot.facts)
        found = self._found()
        usable = [path for number, path in found if number <= snapshot.step]
        for _, path in found:
            if path not in usable[-KEPT:]:  # older ones, and later ones that could not be read on resuming
                path.unlink(missing_ok=True)
        # only now: had the process been killed earlier, the checkpoint before would have needed them
        kept = {self.candidate(epoch) for epoch in snapshot.needed | self._needed}
        for path in self.checkpoints.glob("candidate-*.safetensors"):
            if path not in kept:
                path.unlink(missing_ok=True)
        self._needed = snapshot.needed

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, readable or not."""
        found = self._found()
        return found[-1][1] if found else None

    def _found(self) -> list[tuple[int, Path]]:
        pattern = re.compile(r"step-(\d{9})\.safetensors")
        matches = [(pattern.fullmatch(p.name), p) for p in self.checkpoints.glob("step-*.safetensors")]
        return sorted((int(match.group(1)), path) for match, path in matches if match)

    def restore(self, state: TrainState) -> list[str]:
        """Restore the newest checkpoint that can be read; returns a line for each that could not."""
        notes: list[str] = []
        for _, path in reversed(self._found()):
            try:
                tensors, facts = read_tensors(path)
            except CheckpointError as error:
                notes.append(str(error))
                continue
            state.restore(tensors, facts, path.name)
            self._needed = frozenset(state.selection.candidates)
            return [f"{note}; falling back to the checkpoint before it" for note in notes]
        if notes:
            raise CheckpointError(f"no checkpoint of {self.path} can be read: {'; '.join(notes)}")
        if (self.path / "summary.json").is_file():  # to begin anew would replace its weights
            raise CheckpointError(
                f"{self.path} is finished, and its checkpoints are gone: there is nothing to continue"
            )
        return notes

    def checkpoint(self, step: int) -> Path:
        """Where the state after a step lies; that of step 0 is the start."""
        return self.checkpoints / f"step-{step:09d}.safetensors"

    def candidate(self, epoch: int) -> Path:
        """Where the weights of a candidate for selection lie."""
        return self.checkpoints / f"candidate-{epoch:05d}.safetensors"

    def load_candidate(self, model: nn.Module, epoch: int) -> None:
        """Load the weights of a candidate, checking their checksum."""
        _load_checked(model, self.candidate(epoch))

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write all log lines anew, as after a resume: those after the checkpoint are gone."""
        write_text(self.path / "metrics.jsonl", "".join(_line(record) for record in history))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append one log line."""
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(_line(record))
        except OSError as error:
            raise DaleError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror or error}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """Read the log; a last line cut short by a crash is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records: list[dict[str, Any]] = []
        lines = read_text(path).splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not a record")
            except (ValueError, RecursionError) as error:
                if number == len(lines):
                    break
                raise CheckpointError(f"{path}, line {number}: {error}") from error
            records.append(record)
        return records


def is_temporary(path: Path) -> bool:
    """Tell whether a file is one that atomic writing leaves behind when the process is killed."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"


def model_metadata(config: RunConfig, data: Dataset) -> dict[str, str]:
    """What is written beside weights: all that is needed to build the model again."""
    facts = {
        "name": config.model.name,
        "activation": config.model.activation,
        "image_shape": list(data.image_shape),
        "num_classes": data.num_classes,
        "dataset": data.name,
        "class_names": list(data.class_names),
    }
    return {"format": "pt", "dale-model": json.dumps(facts)}


def save_model(model: nn.Module, path: Path, config: RunConfig, data: Dataset) -> None:
    """Write weights with all that is needed to build the model again."""
    metadata = model_metadata(config, data) | {"digest": _digest_of(model)}
    save_weights(model, path, metadata=metadata)


def _digest_of(model: nn.Module) -> str:
    """The checksum of a model's weights, by the names that files have (without torch.compile's prefix)."""
    return digest({name.removeprefix("_orig_mod."): tensor for name, tensor in model.state_dict().items()}, "")


def _load_checked(model: nn.Module, path: Path) -> None:
    """Load weights; where a checksum lies beside them, it must match what was read."""
    recorded = load_weights(model, path).get("digest")
    if recorded is not None and recorded != _digest_of(model):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")


@dataclass
class Run:
    """A finished run: its folder, its selected model in eval mode, its configuration and results."""

    folder: RunFolder
    model: nn.Module
    config: RunConfig
    objective: Objective
    summary: dict[str, Any]

    @property
    def path(self) -> Path:
        """Where the run lies."""
        return self.folder.path

    def data(self, data_dir: str | None = None) -> Dataset:
        """Load the data set of the run; a path of the user's that is not there is looked for above the run folder."""
        return self.config.data.load(data_dir, self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """The log lines, one per epoch."""
        return self.folder.metrics()


def load_run(path: Path | str, *, trust: bool = False, device: str = "cpu") -> Run:
    """Load a finished run: configuration, objective and the selected model."""
    folder = RunFolder(path)
    place = find_device(device)
    config = folder.config(trust=trust)
    weights = folder.path / "model.safetensors"
    if not weights.is_file():
        raise CheckpointError(
            f"{folder.path} has no model.safetensors yet; finish it with `dale train --resume {folder.path}`"
        )
    summary_path = folder.path / "summary.json"
    summary = read_json(summary_path) if summary_path.exists() else {}
    return Run(folder, _build(weights, config).to(place).eval(), config, config.build_objective(), summary)


def _build(weights: Path, config: RunConfig) -> nn.Module:
    """Build the model that a weights file belongs to and load it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("dale-model", "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{weights} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(facts, dict):
        raise CheckpointError(
            f"{weights} does not say which model it belongs to; build it and use dale.models.load_weights"
        )
    try:
        channels, height, width = (int(n) for n in facts["image_shape"])
        num_classes = int(facts["num_classes"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weights}: its description of the model is damaged: {error}") from error
    model = create_model(
        config.model.name,
        channels=channels,
        size=(height, width),
        num_classes=num_classes,
        activation=config.model.activation,
    )
    _load_checked(model, weights)
    return model


def load_model(path: Path | str, *, trust: bool = False, device: str = "cpu") -> nn.Module:
    """Load the selected model of a run, in eval mode: a plain module from [0, 1] images to logits."""
    return load_run(path, trust=trust, device=device).model
