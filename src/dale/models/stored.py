"""Stored models, read: what a zoo's description of one says, and its weights. `dale.zoo` writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor, nn

from dale.components import from_plain, refuse_code
from dale.environment import find_device
from dale.errors import CheckpointError, UsageError, unknown
from dale.files import read_json
from dale.perturbations import PerturbationSet

FORMAT = 1
PREFIX = "zoo:"


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
    def activation(self) -> str:
        """The activation of its network, which no shape of a weight tells."""
        return str(self.plain.get("activation"))

    @property
    def rho(self) -> float | None:
        """The limit on its nominal loss."""
        found = self.plain.get("rho")
        return None if found is None else float(found)

    @property
    def config(self) -> str:
        """The configuration of the run that it was trained by, as YAML."""
        return str(self.plain.get("config", ""))

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

    def load_into(self, model: nn.Module) -> None:
        """Load the weights into a model of the same architecture, in the model's own dtype."""
        _load(model, self.weights)

    def load(self, device: str = "cpu", *, trust: bool = False) -> nn.Module:
        """Build the model and load its weights, to float32, in eval mode. Code that it names is run only if trusted."""
        from dale.models.factory import create_model  # which loads entries in its turn, as a start

        if not trust:
            refuse_code(self.plain.get("model"), f"{self.path}: model")
        try:
            channels, height, width = (int(side) for side in self.plain["image_shape"])
            model = create_model(
                str(self.plain["model"]),
                _Shape((channels, height, width), int(self.plain["num_classes"]), self.dataset),
                activation=self.activation,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its description of the model is damaged: {error}") from error
        self.load_into(model)
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
    return Path(given).expanduser() if given else Path(__file__).resolve().parents[3] / "zoo"


def entries(place: Path | None = None) -> list[Entry]:
    """The models of a zoo, by name."""
    place = folder() if place is None else place
    return [_read(path) for path in sorted(place.glob("*.json"), key=lambda path: path.stem)]


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
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not describe a stored model, format {FORMAT}")
    names = plain.get("weights")
    if not isinstance(names, list) or not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise CheckpointError(f"{path}: its weights are a list of files beside it, names without a path, got {names!r}")
    return Entry(path, plain)


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
