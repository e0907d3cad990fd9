"""What a report shows and only a model can make: example pictures under attack, and perturbations seen from afar.

Written once, at the end of a run, as `artefacts.json`: small PNGs and numbers, so that the page is made without torch.

The projection is the paper's Figure 1. With the centred training images as rows of X (n, d) and the two largest
eigenpairs X X' u_k = s_k^2 u_k, the principal components are v_k = X' u_k / s_k, and a perturbation G(x, delta) - x is
drawn at its coordinates along v_1 and v_2. The Gram matrix is small whatever the size of an image.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dale import random
from dale.batch import Batch
from dale.data import Dataset, Split
from dale.files import finite, write_text
from dale.losses import KL, CrossEntropy, Loss
from dale.modes import evaluating, frozen
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.samplers import Chain, Langevin, Sampler, fgsm, langevin, pgd
from dale.training.runs import Run

FORMAT = 1
EXAMPLES = 10  # pictures in the gallery
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # radii of the gallery, in units of the run's own
POINTS = 120  # perturbations per sampler in the projection
STEPS = 10  # of the gallery's PGD
BUDGET = 2 * 2**20  # bytes of pictures
_SIDE = 96  # larger images are thinned out for the gallery
_PIXELS = 20_000_000  # numbers in the matrix that principal components are computed of


def write_artefacts(run: Run, data: Dataset, folder: Path | str) -> Path | None:
    """Write `artefacts.json` of a finished run into `folder`; None, and no file, for a row without a set."""
    perturbations = run.objective.perturbations
    if perturbations is None:
        return None
    key = random.key(run.config.training.seed).fold("artefacts")
    with evaluating(run.model), frozen(run.model):
        plain = {
            "format": FORMAT,
            "class_names": list(data.class_names),
            "gallery": gallery(run.model, data.test, perturbations, key.fold("gallery")),
            "projection": projection(run, data, perturbations, key.fold("projection")),
        }
    target = Path(folder) / "artefacts.json"
    write_text(target, json.dumps(finite(plain), allow_nan=False) + "\n")
    return target


def scaled(perturbations: PerturbationSet, factor: float) -> PerturbationSet | None:
    """The set with its radius times `factor`; None for a set without an `epsilon`."""
    if "epsilon" not in {entry.name for entry in fields(perturbations)}:
        return None
    return replace(perturbations, epsilon=factor * perturbations.radius)  # type: ignore[call-arg]


def gallery(model: nn.Module, split: Split, perturbations: PerturbationSet, key: Key) -> dict[str, Any]:
    """A few test images, attacked by PGD at growing radii, with what the model says.

    A set without an `epsilon` is attacked once, and the perturbation found is scaled down along the way to zero.
    """
    device = next(model.parameters()).device
    chosen = split.take(_one_per_class(split.labels))
    batch = next(iter(chosen.batches(len(chosen)))).to(device)
    balls = scaled(perturbations, 1.0) is not None
    whole = None if balls else pgd(STEPS)(model, batch, perturbations, CrossEntropy(), key=key)[0]
    factors = [factor for factor in FACTORS if balls or factor <= 1.0]
    moved, logits = [], []
    for factor in factors:
        ball = scaled(perturbations, factor) if factor > 0.0 else None
        images = batch.images
        if ball is not None:
            images = ball.apply(images, pgd(STEPS)(model, batch, ball, CrossEntropy(), key=key)[0]).clamp(0.0, 1.0)
        elif whole is not None and factor > 0.0:
            images = perturbations.apply(images, perturbations.project(factor * whole, images)).clamp(0.0, 1.0)
        with torch.no_grad():
            logits.append(model(images).float().softmax(dim=1).cpu())
        moved.append(images.cpu())
    return {
        "attack": f"pgd{STEPS}",
        "unit": "epsilon" if balls else "share of the set",
        "radii": [factor * (perturbations.radius if balls else 1.0) for factor in factors],
        "trained": perturbations.radius if balls else 1.0,
        "examples": _examples(batch.images.cpu(), batch, torch.stack(moved), torch.stack(logits)),
    }


def _examples(clean: Tensor, batch: Batch, moved: Tensor, probabilities: Tensor) -> list[dict[str, Any]]:
    """The gallery's entries, as many as the budget of bytes allows."""
    entries: list[dict[str, Any]] = []
    spent = 0
    for i in range(len(batch)):
        difference = moved[:, i] - clean[i]
        reach = float(difference.abs().max().clamp_min(1e-8))
        levels = []
        for level in range(len(moved)):
            top = probabilities[level, i].topk(min(3, probabilities.shape[2]))
            levels.append(
                {
                    "perturbed": _png(moved[level, i]),
                    "delta": _png(_signed(difference[level] / reach)),
                    "top": [[int(k), round(float(p), 4)] for p, k in zip(top.values, top.indices, strict=True)],
                }
            )
        entry = {
            "index": int(batch.index[i]),
            "label": int(batch.labels[i]),
            "clean": _png(clean[i]),
            "reach": reach,
            "levels": levels,
        }
        spent += len(json.dumps(entry))
        if entries and spent > BUDGET:
            break
        entries.append(entry)
    return entries


def _one_per_class(labels: Tensor) -> list[int]:
    """The first example of each class, then the next ones in order, until the gallery is full."""
    seen: set[int] = set()
    first: list[int] = []
    others: list[int] = []
    for place, label in enumerate(labels.tolist()):
        (others if label in seen else first).append(place)
        seen.add(label)
    return sorted((first + others)[:EXAMPLES], key=lambda place: int(labels[place]))


def _signed(values: Tensor) -> Tensor:
    """A picture of numbers in [-1, 1]: one channel from blue over white to red, three channels around grey."""
    if values.shape[0] == 3:
        return 0.5 + values / 2
    level = values.mean(dim=0)
    negative, positive = (-level).clamp_min(0), level.clamp_min(0)
    return torch.stack([1 - 0.87 * negative, 1 - 0.62 * negative - 0.72 * positive, 1 - 0.25 * negative - positive])


def _png(image: Tensor) -> str:
    """An image (C, H, W) in [0, 1] as a PNG in base64; more than three channels become their mean."""
    from PIL import Image

    if image.shape[0] not in (1, 3):
        image = image.mean(dim=0, keepdim=True)
    # thinned, not averaged: averaging would wipe out the very perturbation that is to be seen
    stride = -(-max(image.shape[1:]) // _SIDE)
    pixels = (image[:, ::stride, ::stride].clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def projection(run: Run, data: Dataset, perturbations: PerturbationSet, key: Key) -> dict[str, Any]:
    """Perturbations of test images along the first two principal components of the training images."""
    device = next(run.model.parameters()).device
    components, shares = principal_components(data.train)
    size = components.shape[1]
    chosen = data.test.first(max(1, min(POINTS, _PIXELS // size)))
    samplers: dict[str, tuple[Sampler, Loss]] = {
        "FGSM": (fgsm(perturbations.radius), CrossEntropy()),
        "PGD": (pgd(), CrossEntropy()),
        "Langevin": _own_langevin(run),
    }
    series: dict[str, list[list[float]]] = {name: [] for name in samplers}
    for batch in chosen.batches(POINTS):
        batch = batch.to(device)  # noqa: PLW2901 (the same batch, elsewhere)
        for name, (sampler, loss) in samplers.items():
            delta = sampler(run.model, batch, perturbations, loss, key=key.fold(name))[0]
            difference = (perturbations.apply(batch.images, delta) - batch.images).flatten(1).cpu()
            series[name] += [[round(value, 5) for value in row] for row in (difference @ components.T).tolist()]
    return {"explained": shares, "num_training_images": _count(data.train), "series": series}


def _own_langevin(run: Run) -> tuple[Sampler, Loss]:
    """The Langevin sampler that the row trained with, or the paper's where it has none."""
    sampler, loss = run.objective.sampler, run.objective.perturbation_loss
    if isinstance(sampler, Chain) and isinstance(sampler.kernel, Langevin) and loss is not None:
        kernel = sampler.kernel
        if kernel.noise != "none" and (kernel.noise_scale or kernel.temperature):
            return replace(sampler, num_chains=1, keep="last", burn_in=0), loss
    return langevin(), KL()


def _count(split: Split) -> int:
    return min(len(split), 1000, max(2, _PIXELS // split.images[0].numel()))


def principal_components(split: Split, count: int = 2) -> tuple[Tensor, list[float]]:
    """The first `count` principal components of a split's images, (count, d), and the shares of variance they explain.

    Components that the images do not have (fewer than three of them, say) are zero.
    """
    some = split.first(_count(split))
    images = next(iter(some.batches(len(some)))).images.flatten(1).cpu().double()
    centred = images - images.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred @ centred.T)
    total = float(values.clamp_min(0).sum())
    components = torch.zeros(count, images.shape[1])
    shares = [0.0] * count
    for k in range(min(count, len(values))):
        value, vector = float(values[-1 - k]), vectors[:, -1 - k]
        if value <= 1e-9 * max(total, 1e-30):
            break
        direction = centred.T @ vector / value**0.5
        # an eigenvector is known up to its sign: fix it, so that two reports of one run look the same
        components[k] = (direction * direction[direction.abs().argmax()].sign()).float()
        shares[k] = value / total
    return components, shares
