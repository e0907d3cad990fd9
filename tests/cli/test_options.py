"""How the text of an option becomes a value, and options a configuration."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dale
from dale.algorithms import ROWS, options_of
from dale.cli.options import ROW_OPTIONS, add_options, build_config, number, parse_value
from dale.errors import UsageError
from dale.reproduction.recipes import Spec
from dale.samplers import Chain
from dale.training import Algorithm, Averaging, Constant, Cosine, Training
from dale.training.optimisers import SGD, AdamW
from dale.training.recipes import default_config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 1 / 4", 0.25),
        ("0.25", 0.25),
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("-2.5e-1", -0.25),
        ("10", 10),
        ("true", True),
        ("no", False),
        ("null", None),
        ("kl", "kl"),
        ("cross-entropy", "cross-entropy"),
        ("step", "step"),
        ("here2there", "here2there"),
        ("pkg.module:Name2e", "pkg.module:Name2e"),
        ("[0.1, 2e-1]", [0.1, 0.2]),
        ("{type: Chain, steps: 5}", {"type": "Chain", "steps": 5}),
        ("{type: 'a.b:C', x: 1e-2}", {"type": "a.b:C", "x": 0.01}),
        ("{type: a.b:C}", {"type": "a.b:C"}),
        ("a/b", "a/b"),
        ("1/0", "1/0"),
    ],
)
def test_values(text: str, value: Any) -> None:
    found = parse_value(text, "--option")
    assert found == value
    assert type(found) is type(value)


def test_numbers() -> None:
    assert number(None, "--lr") is None
    assert number("3", "--lr") == 3.0
    assert number(".inf", "--lr") == math.inf
    for wrong in ("true", "fast", "[1]", "", "{}", "nan"):
        with pytest.raises(UsageError, match="--lr: expected a number"):
            number(wrong, "--lr")


def _config(*arguments: str) -> dale.training.RunConfig:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return build_config(parser.parse_args(list(arguments)))


def test_nothing_said_is_the_recipe() -> None:
    assert _config() == default_config("digits")
    assert _config("--dataset", "cifar10") == default_config("cifar10")


def test_every_option_of_every_row_is_an_option_of_the_command() -> None:
    offered = {name for row in ROWS.values() for name in options_of(row)}
    assert offered - set(ROW_OPTIONS) == set()
    assert set(ROW_OPTIONS) - offered == set()


def test_a_promise_in_one_currency_replaces_the_other() -> None:
    options = _config("--min-accuracy", "0.9").objective.options  # type: ignore[union-attr]
    assert options == {"min_accuracy": 0.9}
    both = _config("--min-accuracy", "0.9", "--rho", "0.3").objective.options  # type: ignore[union-attr]
    assert both == {"min_accuracy": 0.9, "rho": 0.3}
    objective = _config("--dataset", "mnist", "--temperature", "0.5").build_objective()
    assert objective.sampler is not None  # the recipe's noise scale gave way


def test_a_sampler_replaces_the_settings_of_the_recipes_own() -> None:
    chain = _config("--dataset", "mnist", "--sampler", "{type: Chain, steps: 3}")
    assert chain.build_objective().sampler == Chain(steps=3)
    with pytest.raises(UsageError, match="steps would do nothing beside a sampler"):
        _config("--dataset", "mnist", "--sampler", "{type: Chain}", "--steps", "3").build_objective()


def test_sets() -> None:
    assert _config("--epsilon", "8/255").build_objective().perturbations == dale.Linf(epsilon=8 / 255)
    assert _config("--set", "l2", "--epsilon", "0.5").build_objective().perturbations == dale.L2(epsilon=0.5)
    assert _config("--set", "{type: L1, epsilon: 3}").build_objective().perturbations == dale.L1(epsilon=3.0)


def test_training_options() -> None:
    training = _config(
        *("--optimiser", "{type: SGD, momentum: 0.5}", "--lr", "1e-2", "--weight-decay", "0"),
        *("--schedule", "{type: Cosine, warmup: 2}", "--ema", "0.9", "--precision", "bfloat16", "--deterministic"),
        *("--validate-every", "4", "--augmentation", "[RandomFlip]"),
    ).training
    assert training.optimiser == SGD(learning_rate=0.01, momentum=0.5, weight_decay=0.0)
    assert training.schedule == Cosine(warmup=2.0)
    assert training.averaging == Averaging(decay=0.9)
    assert (training.precision, training.deterministic, training.validation.every) == ("bfloat16", True, 4)
    assert [type(a).__name__ for a in training.augmentation] == ["RandomFlip"]
    assert _config("--ema", "0", "--schedule", "constant").training.averaging is None
    assert _config("--schedule", "constant").training.schedule == Constant()
    assert _config("--optimiser", "adamw").training.optimiser == AdamW()
    assert _config("--lr", "0.5").training.optimiser == AdamW(learning_rate=0.5)


def test_a_configuration_may_be_that_of_a_stored_model() -> None:
    config = _config("--config", "zoo:cifar10-resnet18-dale-base", "--dataset", "mine.npz", "--epochs", "9")
    recipe = Spec("cifar10", "resnet18", "dale", {"rho": 0.6}, "augmented").config()
    assert config == replace(
        recipe, data=replace(recipe.data, dataset="mine.npz"), training=replace(recipe.training, epochs=9)
    )
    with pytest.raises(UsageError, match="unknown model of the zoo 'cifar10-resnet18'; did you mean"):
        _config("--config", "zoo:cifar10-resnet18")


def test_a_configuration_may_leave_parts_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("training: {epochs: 5, optimiser: {type: SGD, momentum: 0.5}}")
    recipe = default_config("digits")
    assert _config("--config", str(path)) == replace(
        recipe, training=replace(recipe.training, epochs=5, optimiser=SGD(momentum=0.5))
    )
    path.write_text("data: {dataset: cifar10, train_size: 500}\nobjective: {name: erm}")
    config = _config("--config", str(path))
    assert (config.model, config.training) == (default_config("cifar10").model, default_config("cifar10").training)
    assert config.objective == Algorithm(name="erm")
    assert (config.data.dataset, config.data.train_size) == ("cifar10", 500)
    full = replace(default_config("mnist"), training=Training(epochs=1))
    path.write_text(full.to_yaml())
    assert _config("--config", str(path)) == full
