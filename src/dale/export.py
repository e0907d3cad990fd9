"""Export: a run's model for use elsewhere, as weights, as a torch program or as ONNX, checked before it is kept.

The check runs the file itself, read back, on images that depend on nothing but their number, alone and as a batch, and
compares its logits z' with the model's z:  |z' - z| <= tolerance * (1 + max |z|)  for every entry. A file that
disagrees is not kept.
"""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dale import random
from dale.errors import DaleError, unknown
from dale.files import write_bytes, write_text
from dale.models import create_model, load_weights
from dale.reports.card import model_card
from dale.reports.runs import read_run
from dale.training.runs import Run

SUFFIXES = {"safetensors": "model.safetensors", "torch-export": "model.pt2", "onnx": "model.onnx"}
FORMATS = tuple(SUFFIXES)
IMAGES = 64
TOLERANCE = 1e-4  # float32 sums in another order; the same weights differ far less


@dataclass(frozen=True)
class Exported:
    """What was written: the model and its card, with the largest difference of logits that the check saw."""

    path: Path
    card: Path
    difference: float


def export_run(run: Run, format: str = "safetensors", out: str | Path | None = None) -> Exported:
    """Write the model of a run in a format, and its model card, into the folder `out` (default: RUN/export/FORMAT)."""
    if format not in SUFFIXES:
        raise unknown("format", format, FORMATS)
    facts = _facts(run.path / "model.safetensors")
    shape = tuple(int(n) for n in facts["image_shape"])
    model = run.model.cpu().eval()
    folder = Path(run.path / "export" / format if out is None else out)
    target = folder / SUFFIXES[format]
    images = random.uniform(random.key(0).fold("export"), torch.arange(IMAGES), shape)
    write, read = {"safetensors": (_copy(run), _weights(run, facts)), "torch-export": _PROGRAM, "onnx": _ONNX}[format]
    with tempfile.TemporaryDirectory(prefix="dale-export-") as place:
        part = Path(place) / target.name
        write(model, images, part)
        difference = agreement(model, read(part), images)
        write_bytes(target, part.read_bytes())
    usage = _usage(format, facts) + (
        f"\n\nThe file was read back and compared with the trained model on batches of 1 and of {IMAGES} images: its "
        f"logits differ by at most {difference:.2g}."
    )
    files = read_run(run.path)
    write_text(folder / "config.yaml", files.config_text)
    card = folder / "README.md"
    write_text(card, model_card(replace(files, path=Path()), usage, [target.name, "config.yaml"]))
    return Exported(target, card, difference)


def agreement(model: nn.Module, other: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Return the largest difference of logits between two models, for one image and for all; too large is an error."""
    largest = 0.0
    for part in (images[:1], images):
        with torch.no_grad():
            expected, found = model(part), other(part)
        if found.shape != expected.shape:
            raise DaleError(
                f"the exported model returns {tuple(found.shape)} where the model returns {tuple(expected.shape)}; "
                "the file was not kept"
            )
        difference = float((found - expected).abs().max())
        if not difference <= TOLERANCE * (1.0 + float(expected.abs().max())):
            raise DaleError(
                f"the exported model disagrees with the trained one: logits differ by {difference:.3g}; "
                "the file was not kept"
            )
        largest = max(largest, difference)
    return largest


def _facts(weights: Path) -> dict[str, Any]:
    """What the weights file says about the model it belongs to."""
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        facts: dict[str, Any] = json.loads((file.metadata() or {})["dale-model"])
    return facts


Writer = Callable[[nn.Module, Tensor, Path], None]
Reader = Callable[[Path], Callable[[Tensor], Tensor]]


def _copy(run: Run) -> Writer:
    """The weights as they are, with what is needed to build the model again beside them."""

    def write(model: nn.Module, images: Tensor, path: Path) -> None:
        del model, images
        path.write_bytes((run.path / "model.safetensors").read_bytes())

    return write


def _weights(run: Run, facts: dict[str, Any]) -> Reader:
    def read(path: Path) -> Callable[[Tensor], Tensor]:
        channels, height, width = facts["image_shape"]
        model = create_model(
            run.config.model.name,
            channels=channels,
            size=(height, width),
            num_classes=facts["num_classes"],
            activation=run.config.model.activation,
            seed=1,  # other initial weights than the run's: what was not in the file would show
        )
        load_weights(model, path)
        return model.eval()

    return read


def _traced(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The model as a graph, for any number of images."""
    batch = torch.export.Dim("batch", min=1, max=2**16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own deprecations, of no use to whoever exports
        try:
            return torch.export.export(model, (images[:2],), dynamic_shapes=({0: batch},))
        except Exception as error:  # torch raises many kinds for what a user's model may do
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DaleError(f"torch cannot export this model: {line}") from error


def _write_program(model: nn.Module, images: Tensor, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(_traced(model, images), path)


def _read_program(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def _write_onnx(model: nn.Module, images: Tensor, path: Path) -> None:
    _needed("onnx"), _needed("onnxscript"), _needed("onnxruntime")
    program = _traced(model, images)
    # it lists what it could do with packages that are not here
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
            verbose=False,
        )
    assert made is not None
    made.save(str(path), external_data=False)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    runtime = _needed("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DaleError(f"the onnx format needs {name}: pip install 'dale[onnx]'") from error


_PROGRAM: tuple[Writer, Reader] = (_write_program, _read_program)
_ONNX: tuple[Writer, Reader] = (_write_onnx, _read_onnx)


def _usage(format: str, facts: dict[str, Any]) -> str:
    channels, height, width = facts["image_shape"]
    lines = {
        "safetensors": [
            "from dale.models import create_model, load_weights",
            f"model = create_model({facts['name']!r}, channels={channels}, size=({height}, {width}), "
            f"num_classes={facts['num_classes']}, activation={facts['activation']!r})",
            'load_weights(model, "model.safetensors")',
            "logits = model.eval()(images)",
        ],
        "torch-export": ["import torch", 'logits = torch.export.load("model.pt2").module()(images)'],
        "onnx": [
            "import onnxruntime",
            'session = onnxruntime.InferenceSession("model.onnx")',
            '(logits,) = session.run(["logits"], {"images": images})  # a float32 array',
        ],
    }[format]
    return "```python\n" + "\n".join(lines) + "\n```"
