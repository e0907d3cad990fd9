"""Configurations of runs: read back equal, refused where wrong; the recipes behind `dale train`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dale
from dale.components import to_plain
from dale.data import DATASETS, RandomCrop
from dale.errors import UsageError
from dale.training import SGD, Algorithm, Cosine, DataConfig, ModelConfig, RunConfig, Training, Validation
from dale.training.recipes import default_config, with_algorithm

FULL = RunConfig(
    data=DataConfig(dataset="mine.npz", train_size=10, seed=3),
    model=ModelConfig(name="resnet18", activation="silu", init="weights.safetensors"),
    objective=dale.algorithms.dale(dale.Linf(epsilon=8 / 255), rho=(0.1, 0.2), by="class"),
    training=Training(
        epochs=3,
        optimiser=SGD(nesterov=True),
        schedule=Cosine(warmup=2.0),
        averaging=None,
        augmentation=(RandomCrop(padding=2),),
        validation=Validation(every=2),
        precision="bfloat16",
        seed=2**62,
        deterministic=True,
    ),
)


@pytest.mark.parametrize("config", [RunConfig(), FULL, *(default_config(name) for name in DATASETS)])
def test_read_back_equal(config: RunConfig) -> None:
    assert RunConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize("row", ["erm", "pgd", "trades", "dale", "dale-fixed", "mart"])
@pytest.mark.parametrize("dataset", DATASETS)
def test_every_recipe_builds_every_row(dataset: str, row: str) -> None:
    objective = with_algorithm(default_config(dataset), row).build_objective()
    assert objective.perturbations == default_config(dataset).build_objective().perturbations
    assert (len(objective.constraints) == 1) == (row == "dale")


@pytest.mark.parametrize(
    ("spelling", "model"),
    [("CIFAR-10", "resnet18"), ("cifar_10", "resnet18"), ("Fashion_MNIST", "convnet"), ("DIGITS", "convnet")],
)
def test_a_name_in_any_spelling_has_its_recipe(spelling: str, model: str) -> None:
    config = default_config(spelling)
    plain = default_config(spelling.lower().replace("_", "").replace("-", "").replace("fashion", "fashion-"))
    assert config.model.name == model
    assert (config.training, config.objective) == (plain.training, plain.objective)


def test_a_data_set_of_the_users_has_a_small_radius() -> None:
    assert default_config("mine.npz").build_objective().perturbations == dale.Linf(epsilon=8 / 255)
    assert default_config("digits").build_objective().perturbations == dale.Linf(epsilon=0.25)


def test_the_papers_settings() -> None:
    cifar, mnist = default_config("cifar10").build_objective(), default_config("mnist").build_objective()
    assert cifar.perturbations == dale.Linf(epsilon=8 / 255)
    assert mnist.perturbations == dale.Linf(epsilon=0.3)
    assert cifar.constraints[0].limit == 0.8
    assert mnist.constraints[0].limit == 0.5


def test_options_that_the_new_row_does_not_take_are_left_behind() -> None:
    config = with_algorithm(default_config("mnist"), "pgd")
    assert isinstance(config.objective, Algorithm)
    assert config.objective.options == {"steps": 7, "step_size": 0.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 2", "format 2; this version of dale reads format 1"),
        ("format: '1'", "format '1'"),
        ("- 1", "expected the configuration of a run"),
        ("objective: {name: 'a:b'}", "names code to import, 'a:b'; pass --trust"),
        ("objective: {options: {init: 'a:b'}}", "names code to import"),
        ("training: {seed: 9223372036854775808}", "seed must be a whole number"),
        ("trainin: {}", "did you mean 'training'"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig.from_yaml(text)


def test_options_made_in_python_are_those_of_a_file() -> None:
    """Components, tuples and numpy's numbers are written as plain values, and read back equal to what was given."""
    options = {"rho": np.float64(0.25), "step_size": (1, 2), "robust_loss": dale.losses.KL()}
    made = RunConfig(objective=Algorithm(options=options))
    assert isinstance(made.objective, Algorithm)
    assert made.objective.options == {"rho": 0.25, "step_size": [1, 2], "robust_loss": to_plain(dale.losses.KL())}
    assert RunConfig.from_yaml(made.to_yaml()) == made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
        ({"batch_size": 16.0}, "batch_size must be a whole number, got 16.0"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"accumulate": 2.0}, "accumulate must be a whole number"),
        ({"seed": "3"}, "seed must be a whole number, got '3'"),
        ({"averaging": 0.9}, r"averaging must be of kind Averaging \(Averaging\), got 0.9"),
        ({"schedule": "cosine"}, r"schedule must be of kind Schedule \(Constant, Cosine, .*\), got 'cosine'"),
        ({"optimiser": None}, "optimiser must be of kind Optimiser, got None"),
        ({"augmentation": RandomCrop()}, r"augmentation must be several of kind Augmentation, got RandomCrop"),
        ({"augmentation": ["RandomFlip"]}, r"augmentation\[0\] must be of kind Augmentation \(.*RandomFlip.*\)"),
    ],
)
def test_what_training_is_given_must_be_what_a_file_could_hold(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Training(**options)


def test_augmentations_may_come_as_a_list() -> None:
    assert Training(augmentation=[RandomCrop()]) == Training(augmentation=(RandomCrop(),))  # type: ignore[arg-type]


def test_paths_may_look_like_code() -> None:
    config = RunConfig.from_yaml("data: {dataset: 'a:b'}\nmodel: {init: 'c:d'}")
    assert (config.data.dataset, config.model.init) == ("a:b", "c:d")


def test_an_option_of_no_row_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'rho'"):
        Algorithm(name="dale", perturbations=dale.Linf(epsilon=0.1), options={"rhoo": 0.1}).build()
