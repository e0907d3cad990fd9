"""Defaults by data set: what `dale train --dataset NAME` does when nothing else is said.

For MNIST and CIFAR-10 the paper's sets, attacks and optimisers on schedules that fit a working day; the paper's own
schedules are recipes of `dale reproduce`. For a data set of the user's: the settings of the digits, with the network
and the set scaled to the image.
"""

from __future__ import annotations

from dataclasses import replace

from dale.data import RandomCrop, RandomFlip
from dale.perturbations import Linf
from dale.training.averaging import Averaging
from dale.training.config import Algorithm, DataConfig, ModelConfig, RunConfig, Training
from dale.training.optimisers import SGD, Adadelta, AdamW, Constant, Cosine, OneCycle

_DIGITS = RunConfig(
    data=DataConfig(dataset="digits"),
    model=ModelConfig(name="convnet"),
    objective=Algorithm(name="dale", perturbations=Linf(epsilon=0.25), options={"rho": 0.1}),
    training=Training(
        epochs=80,
        batch_size=128,
        optimiser=AdamW(learning_rate=6e-3),
        schedule=OneCycle(peak=0.2),
        averaging=Averaging(decay=0.98),
    ),
)

_MNIST = RunConfig(
    data=DataConfig(dataset="mnist"),
    model=ModelConfig(name="convnet"),
    objective=Algorithm(
        name="dale",
        perturbations=Linf(epsilon=0.3),
        options={"rho": 0.5, "steps": 7, "step_size": 0.1, "noise_scale": 1e-3},
    ),
    training=Training(
        epochs=20, batch_size=128, optimiser=Adadelta(), schedule=Constant(), averaging=Averaging(decay=0.999)
    ),
)

_CIFAR = RunConfig(
    data=DataConfig(dataset="cifar10"),
    model=ModelConfig(name="resnet18"),
    objective=Algorithm(
        name="dale",
        perturbations=Linf(epsilon=8 / 255),
        options={"rho": 0.8, "steps": 10, "step_size": 2 / 255, "noise_scale": 1e-4},
    ),
    training=Training(
        epochs=70,
        batch_size=128,
        optimiser=SGD(learning_rate=0.1, weight_decay=5e-4, momentum=0.9, nesterov=True, decay_all=False),
        schedule=Cosine(warmup=5.0),
        averaging=Averaging(decay=0.999),
        augmentation=(RandomCrop(padding=4), RandomFlip()),
    ),
)


def default_config(dataset: str) -> RunConfig:
    """Return the default run on a data set, by name or path."""
    named = {
        "digits": _DIGITS,
        "mnist": _MNIST,
        "fashionmnist": _MNIST,
        "cifar10": _CIFAR,
        "cifar100": _CIFAR,
        "svhn": _CIFAR,
    }
    folded = dataset.lower().replace("-", "").replace("_", "")  # as `load_dataset` reads a name
    found = named.get(folded, _DIGITS)
    if folded not in named:
        # nothing is known of the user's images: a radius that an eye hardly sees
        assert isinstance(found.objective, Algorithm)
        found = replace(found, objective=replace(found.objective, perturbations=Linf(epsilon=8 / 255)))
    return replace(found, data=replace(found.data, dataset=dataset))


def with_algorithm(config: RunConfig, name: str) -> RunConfig:
    """Return the run with another row: the options of the old one that the new one takes as well are kept."""
    from dale.algorithms import find_row, options_of

    old = config.objective
    taken = options_of(find_row(name))
    kept = {k: v for k, v in old.options.items() if k in taken} if isinstance(old, Algorithm) else {}
    return replace(config, objective=Algorithm(name=name, perturbations=old.perturbations, options=kept))
