"""The zoo: stored models with published numbers. `dale.load_model("zoo:NAME")` loads one, in float32 and eval mode.

NAME.json says what the model is and what its stored weights score; NAME.safetensors holds them in float16, or, where
they are larger than 16 MiB, NAME-0.safetensors, NAME-1.safetensors, ... A zoo is a folder: `$DALE_ZOO`, or `zoo/` of
the checkout that dale runs from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from dale.components import from_plain, to_plain
from dale.environment import find_device
from dale.errors import CheckpointError, UsageError, unknown
from dale.files import read_json, write_json, write_safetensors
from dale.models import create_model
from dale.models.weights import stored_tensors
from dale.perturbations import PerturbationSet
from dale.training import runs
from dale.training.runs import Run

FORMAT = 1
PREFIX = "zoo:"
SHARD = 16 * 2**20  # bytes of weights in a file, at most


@dataclass(frozen=True)
class Entry:
    """A stored model: what its JSON file says, and where it lies."""

    path: Path
    plain: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name in the zoo."""
        return self.path.stem

    @property
    def dataset(self) -> str:
        """The data set that it was trained on."""
        return str(self.plain["dataset"])

    @property
    def rho(self) -> float | None:
        """The limit on its nominal loss."""
        found = self.plain.get("rho")
        return None if found is None else float(found)

    @property
    def published(self) -> Sequence[Mapping[str, Any]]:
        """What the stored weights score: parts with the number of test images `n` and `accuracies` by attack."""
        found: Sequence[Mapping[str, Any]] = self.plain.get("published", ())
        return found

    @property
    def weights(self) -> list[Path]:
        """The files of its weights."""
        return [self.path.with_name(str(name)) for name in self.plain["weights"]]

    def perturbations(self) -> PerturbationSet:
        """The set that it was trained against."""
        found: PerturbationSet = from_plain(self.plain["perturbations"], PerturbationSet, where=str(self.path))
        return found

    def load(self, device: str = "cpu") -> nn.Module:
        """Build the model and load its weights, to float32, in eval mode."""
        try:
            channels, height, width = (int(side) for side in self.plain["image_shape"])
            model = create_model(
                str(self.plain["model"]),
                _Shape((channels, height, width), int(self.plain["num_classes"]), self.dataset),
                activation=str(self.plain["activation"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its description of the model is damaged: {error}") from error
        _load(model, self.weights)
        return model.to(find_device(device)).eval()


@dataclass(frozen=True)
class _Shape:
    """What building a model asks of data."""

    image_shape: tuple[int, int, int]
    num_classes: int
    name: str


def folder() -> Path:
    """The zoo: `$DALE_ZOO`, or that of the checkout."""
    given = os.environ.get("DALE_ZOO")
    return Path(given).expanduser() if given else Path(__file__).resolve().parents[2] / "zoo"


def entries(place: Path | None = None) -> list[Entry]:
    """The models of a zoo, by name."""
    place = folder() if place is None else place
    return [_read(path) for path in sorted(place.glob("*.json"))]


def find(name: str, place: Path | None = None) -> Entry:
    """The entry of a name, with or without "zoo:"."""
    place = folder() if place is None else place
    name = name.removeprefix(PREFIX)
    path = place / f"{name}.json"
    known = [found.stem for found in place.glob("*.json")]
    if name not in known:
        if not known:
            raise UsageError(f"there is no model {name!r}: no zoo at {place}; set DALE_ZOO to a folder that holds one")
        raise unknown("model of the zoo", name, known)
    return _read(path)


def _read(path: Path) -> Entry:
    plain = read_json(path)
    if not isinstance(plain, dict) or plain.get("format") != FORMAT or not isinstance(plain.get("weights"), list):
        raise CheckpointError(f"{path} does not describe a stored model, format {FORMAT}")
    if any(not isinstance(name, str) or Path(name).name != name for name in plain["weights"]):
        raise CheckpointError(f"{path}: its weights lie beside it, under names without a path")
    return Entry(path, plain)


def load_model(path: Path | str, *, trust: bool = False, device: str = "cpu") -> nn.Module:
    """Load the selected model of a run, or "zoo:NAME", in eval mode: a plain module from [0, 1] images to logits."""
    if isinstance(path, str) and path.startswith(PREFIX):
        return find(path).load(device)
    return runs.load_model(path, trust=trust, device=device)


def store(run: Run, name: str, place: Path) -> Entry:
    """Store the selected model of a run in float16, under a name; nothing is published about it yet."""
    require_name(name)
    data = run.config.data.dataset
    limits = [c.limit for c in run.objective.constraints if not c.on_accuracy and isinstance(c.limit, float)]
    shape, num_classes = _facts(run.path / "model.safetensors")
    for old in (place / f"{name}.safetensors", *place.glob(f"{name}-[0-9]*.safetensors")):
        old.unlink(missing_ok=True)
    plain = {
        "format": FORMAT,
        "model": run.config.model.name,
        "activation": run.config.model.activation,
        "image_shape": shape,
        "num_classes": num_classes,
        "dataset": data,
        "perturbations": to_plain(run.objective.perturbations),
        "rho": limits[0] if limits else None,
        "weights": write_shards(stored_tensors(run.model, torch.float16), name, place),
        "summary": run.summary,
        "config": run.config.to_yaml(),
        "published": [],
    }
    write_json(place / f"{name}.json", plain)
    return find(name, place)


def require_name(name: str) -> None:
    """Refuse a name that could not be a file's everywhere."""
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise UsageError(
            f"a model's name has letters, digits, '-', '_' and '.', such as cifar10-resnet18; got {name!r}"
        )


def write_shards(tensors: Mapping[str, Tensor], name: str, place: Path, limit: int = SHARD) -> list[str]:
    """Write tensors as one file, or as several of at most `limit` bytes (a larger tensor alone); returns the names."""
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][key] = tensor
        room -= size
    names = [f"{name}.safetensors"] if len(shards) == 1 else [f"{name}-{k}.safetensors" for k in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        write_safetensors(place / file, shard, {"format": "pt"})
    return names


def _facts(weights: Path) -> tuple[list[int], int]:
    """The image's shape and the number of classes, as a run's weights file says."""
    try:
        with safetensors.safe_open(weights, framework="pt") as file:
            plain = json.loads((file.metadata() or {})["dale-model"])
            return [int(side) for side in plain["image_shape"]], int(plain["num_classes"])
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weights} does not say which model it belongs to: {error}") from error


def _load(model: nn.Module, files: Sequence[Path]) -> None:
    """Load shards into a model: names and shapes are compared before a tensor is read, and nothing may be missing."""
    expected = model.state_dict()
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name not in expected or list(file.get_slice(name).get_shape()) != list(expected[name].shape):
                        raise CheckpointError(f"{path}: {name!r} does not belong to this model")
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                        raise CheckpointError(f"{path}: {name!r} has values that are not finite")
                    found[name] = tensor.to(expected[name].dtype)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read the weights: {str(error).splitlines()[0]}") from error
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(f"{files[0].parent}: the weights lack {missing[0]!r}")
    model.load_state_dict(found)
