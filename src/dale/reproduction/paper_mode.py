"""Accuracy with the model in train mode, as the paper's code measured it: an explanation, never a headline.

Its attacks ran in eval mode and left the model in train mode, so that perturbed images were classified with BatchNorm
statistics of their own batch and with dropout on; clean images were classified in eval mode. The batch of 128 decides
these numbers as much as the model does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dale import random
from dale.attacks import parse
from dale.attacks.gradient import PGD
from dale.certificates import clopper_pearson
from dale.data import Split
from dale.losses import CrossEntropy
from dale.modes import evaluating
from dale.reproduction.recipes import Spec, paper_attack
from dale.samplers import Chain, fgsm, pgd

BATCH = 128


def train_mode_accuracies(model: nn.Module, split: Split, spec: Spec) -> dict[str, Any]:
    """Clean accuracy in eval mode, and under the paper's FGSM and PGD with the final forward pass in train mode."""
    examples = spec.stages()[0].examples
    split = split if examples is None else split.first(examples)
    perturbations = spec.config().build_objective().perturbations
    assert perturbations is not None
    strong = parse(paper_attack(spec.dataset, "pgd"))
    assert isinstance(strong, PGD)
    attacks: dict[str, Chain] = {
        "fgsm": fgsm(perturbations.radius),
        "pgd": pgd(strong.steps, strong.step_size),
    }
    own = copy.deepcopy(model)  # a forward pass in train mode moves the running statistics
    saved = {name: buffer.clone() for name, buffer in own.named_buffers()}
    device = next(own.parameters()).device
    key = random.key(spec.seed).fold("paper mode")
    right = dict.fromkeys(("clean", *attacks), 0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(spec.seed)
        for whole in split.batches(BATCH):
            batch = whole.to(device)
            with evaluating(own):
                right["clean"] += _right(own, batch.images, batch.labels)
                moved = {
                    name: perturbations.apply(
                        batch.images, chain(own, batch, perturbations, CrossEntropy(), key=key.fold(name))[0]
                    )
                    for name, chain in attacks.items()
                }
            for name, images in moved.items():
                own.train()
                right[name] += _right(own, images, batch.labels)
                for buffer_name, buffer in own.named_buffers():
                    buffer.copy_(saved[buffer_name])
    n = len(split)
    interval = {name: clopper_pearson(k, n, 0.05) for name, k in right.items()}
    return {
        "note": f"perturbed images in train mode, batches of {BATCH}; not comparable with any other number here",
        "accuracies": {
            name: {"correct": k, "n": n, "accuracy": k / n, "lower": interval[name][0], "upper": interval[name][1]}
            for name, k in right.items()
        },
    }


@torch.no_grad()
def _right(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    return int((model(images).argmax(dim=1) == labels).sum())
