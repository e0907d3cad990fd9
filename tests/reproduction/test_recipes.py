"""Recipes: every row of every table has one, at every budget, and `full` is what the paper says."""

from __future__ import annotations

import pytest

from dale.algorithms.options import SAMPLING
from dale.attacks import parse
from dale.components import load_yaml
from dale.errors import UsageError
from dale.perturbations import Linf
from dale.reproduction import BUDGETS, TABLES, Spec, recipes, rows_of
from dale.reproduction.catalogue import TIMED
from dale.reproduction.recipes import default_model, paper_attack
from dale.samplers import Chain, Mixture
from dale.training import SGD, Adadelta, Algorithm, Piecewise, RunConfig
from dale.zoo import find

CASES = [(table, dataset) for table, (datasets, _) in TABLES.items() for dataset in datasets]


@pytest.mark.parametrize("budget", ["full", "short", "smoke"])
@pytest.mark.parametrize(("table", "dataset"), CASES)
def test_every_row_has_a_recipe_that_builds(table: str, dataset: str, budget: str) -> None:
    for row in rows_of(table, dataset):
        spec = row.spec(dataset, default_model(dataset), budget, 3)
        config = spec.config()
        assert config.training.seed == 3
        objective = config.build_objective()
        assert objective.perturbations == Linf(epsilon=0.3 if dataset == "mnist" else 8 / 255)
        assert load_yaml(config.to_yaml(), RunConfig) == config
        for name, value in row.options.items():
            assert isinstance(config.objective, Algorithm)
            assert config.objective.options[name] == value
        assert [parse(name).name for stage in spec.stages() for name in stage.attacks]


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_every_evaluation_has_the_papers_attacks_and_a_strong_one(dataset: str) -> None:
    for budget in ("full", "short", "smoke"):
        attacks = [name for stage in Spec(dataset, "convnet", "pgd", budget=budget).stages() for name in stage.attacks]
        assert {paper_attack(dataset, "fgsm"), paper_attack(dataset, "pgd"), "autoattack-fast"} <= set(attacks)
        assert attacks == [parse(name).name for name in attacks]  # results are found by these names
    assert set(recipes()[dataset]["budgets"]) <= set(BUDGETS)


def test_rows_that_share_a_compile_cache_are_compiled_and_tests_are_not() -> None:
    assert Spec("cifar10", "resnet18", "pgd", budget="short").fast == "on"
    assert Spec("cifar10", "resnet18", "pgd", budget="smoke").fast == "auto"
    assert Spec("mnist", "convnet", "pgd", budget="short").fast == "auto"


def test_full_is_the_papers_setting() -> None:
    mnist = Spec("mnist", "convnet", "dale", {"rho": 1.0}, "full").config()
    assert (mnist.training.epochs, mnist.training.batch_size) == (50, 128)
    assert mnist.training.optimiser == Adadelta(learning_rate=1.0)
    assert isinstance(mnist.objective, Algorithm)
    assert {"steps": 7, "step_size": 0.1, "noise_scale": 1e-3}.items() <= mnist.objective.options.items()
    cifar = Spec("cifar10", "resnet18", "dale", {"rho": 1.0}, "full").config()
    assert (cifar.training.epochs, cifar.training.batch_size) == (200, 128)
    assert cifar.training.optimiser == SGD(learning_rate=0.01, weight_decay=3.5e-3)
    assert cifar.training.schedule == Piecewise(milestones=(150, 175, 190))
    assert isinstance(cifar.objective, Algorithm)
    wanted = {"steps": 10, "step_size": 2 / 255, "noise_scale": 1e-4, "dual_step_size": 1e-3, "dual_initial": 0.0}
    assert wanted.items() <= cifar.objective.options.items()


def test_short_differs_between_rows_in_nothing_but_the_row() -> None:
    settings = {
        Spec("cifar10", "resnet18", row.algorithm, row.options).config().training
        for row in rows_of("table1", "cifar10")
    }
    assert len(settings) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rho": 0.8}, "dale-rho0.8"),
        ({"rho": 1.0, "steps": 10}, "dale-rho1.0"),  # ten steps are the recipe's own
        ({"rho": 1.0, "steps": 5}, "dale-rho1.0-steps5"),
        ({"rho": 0.8, "noise_scale": 0.0}, "dale-rho0.8-noise0.0"),
        ({"rho": 0.8, "dual_frequency": "epoch"}, "dale-rho0.8-dual-epoch"),
    ],
)
def test_a_row_is_named_after_what_sets_it_apart(options: dict[str, object], name: str) -> None:
    spec = Spec("cifar10", "resnet18", "dale", options, "short", 2)
    assert spec.path == f"cifar10/resnet18/{name}-short-seed2.json"


@pytest.mark.parametrize("budget", ["full", "short"])
def test_two_rows_have_one_name_exactly_when_they_are_one_run(budget: str) -> None:
    seen: dict[str, RunConfig] = {}
    for table, dataset in CASES:
        for row in [] if table in TIMED else rows_of(table, dataset):
            spec = row.spec(dataset, default_model(dataset), budget, 0)
            config = spec.config()
            assert seen.setdefault(spec.path, config) == config
    assert len({config.to_yaml() for config in seen.values()}) == len(seen)


def test_what_a_budget_gives_to_one_row_goes_to_no_other() -> None:
    short = recipes()["mnist"]["budgets"]["short"]["rows"]
    for name in ("clp", "alp", "mart", "pgd"):
        objective = Spec("mnist", "convnet", name).config().objective
        assert isinstance(objective, Algorithm)
        assert objective.options.get("weight") == short.get(name, {}).get("weight")
        assert Spec("mnist", "convnet", name).row == name


def test_a_budget_may_start_from_a_stored_model() -> None:
    retuned, best = (Spec("cifar10", "resnet18", "dale", {"rho": 0.8}, budget) for budget in ("retuned", "best"))
    assert retuned.config().model.init == "zoo:cifar10-resnet18-dale-base"
    assert best.config().model.init is None
    assert find(retuned.config().model.init).dataset == "cifar10"


def test_a_budget_may_bring_its_own_sampler() -> None:
    mixed = Spec("mnist", "convnet-nodropout", "dale", {"rho": 0.05}, "mixed").config()
    sampler = mixed.build_objective().sampler
    assert isinstance(sampler, Mixture)
    assert [part.steps for part in sampler.samplers if isinstance(part, Chain)] == [8, 1]
    assert isinstance(mixed.objective, Algorithm)
    assert not set(SAMPLING) & set(mixed.objective.options)  # the data set's own chain gave way
    assert mixed.model.init == "zoo:mnist-convnet-dale"


def test_an_unknown_data_set_or_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'mnist'"):
        Spec("mnits", "convnet", "pgd")
    with pytest.raises(UsageError, match="did you mean 'short'"):
        Spec("mnist", "convnet", "pgd", budget="shrot")
