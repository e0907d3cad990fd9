"""The zoo: stored models with published numbers. `dale.load_model("zoo:NAME")` loads one, in float32 and eval mode.

NAME.json says what the model is and what its stored weights score; NAME.safetensors holds them in float16, or, where
they are larger than 16 MiB, NAME-0.safetensors, NAME-1.safetensors, ... A zoo is a folder: `$DALE_ZOO`, or `zoo/` of
the checkout that dale runs from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from dale.components import to_plain
from dale.errors import CheckpointError, UsageError
from dale.files import write_json, write_safetensors
from dale.models.stored import FORMAT, PREFIX, Entry, entries, find, folder
from dale.models.weights import stored_tensors
from dale.training import runs
from dale.training.runs import Run

__all__ = ["PREFIX", "Entry", "entries", "find", "folder", "load_model", "require_name", "store", "write_shards"]

SHARD = 16 * 2**20  # bytes of weights in a file, at most


def load_model(path: Path | str, *, trust: bool = False, device: str = "cpu") -> nn.Module:
    """Load the selected model of a run, or "zoo:NAME", in eval mode: a plain module from [0, 1] images to logits."""
    if isinstance(path, str) and path.startswith(PREFIX):
        return find(path).load(device, trust=trust)
    return runs.load_model(path, trust=trust, device=device)


def store(run: Run, name: str, place: Path) -> Entry:
    """Store the selected model of a run in float16, under a name; nothing is published about it yet."""
    require_name(name)
    data = run.config.data.dataset
    shape, num_classes = _facts(run.path / "model.safetensors")
    (place / f"{name}.json").unlink(missing_ok=True)  # first: weights must never lie under another's numbers
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
        "rho": run.objective.rho,
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
