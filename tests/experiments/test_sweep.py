"""Sweep files: expansion, names, and files from strangers."""

from __future__ import annotations

import pytest

from dale.cli.sweep import train_options
from dale.errors import DaleError, UsageError
from dale.experiments import TrainOptions, expand, read_sweep

KINDS = train_options()


def options_of(plain: object, **given: object) -> list[dict[str, object]]:
    return [dict(run.options) for run in expand(plain, KINDS, **given)]


def test_the_grid_is_every_combination_in_order():
    runs = expand({"base": {"epochs": 2}, "grid": {"algorithm": ["pgd", "dale"], "seed": [0, 1]}}, KINDS)
    assert [run.name for run in runs] == [
        "algorithm=pgd,seed=0",
        "algorithm=pgd,seed=1",
        "algorithm=dale,seed=0",
        "algorithm=dale,seed=1",
    ]
    assert [dict(run.options) for run in runs][1] == {"epochs": 2, "algorithm": "pgd", "seed": 1}


def test_include_and_exclude():
    plain = {
        "base": {"epochs": 2},
        "grid": {"algorithm": ["erm", "dale"], "seed": [0, 1]},
        "include": [{"algorithm": "trades", "epochs": 9}],
        "exclude": [{"algorithm": "erm", "seed": 1}, {"epochs": 3}],
    }
    found = [(o["algorithm"], o.get("seed"), o["epochs"]) for o in options_of(plain)]
    assert found == [("erm", 0, 2), ("dale", 0, 2), ("dale", 1, 2), ("trades", None, 9)]


def test_a_base_alone_is_one_run():
    assert [run.name for run in expand({"base": {"epochs": 1}}, KINDS)] == ["run"]


def test_arguments_are_those_of_the_command_line():
    plain = {
        "base": {
            "no-evaluate": True,
            "deterministic": False,
            "attacks": ["fgsm", "pgd20"],
            "augmentation": [{"type": "RandomCrop", "padding": 4}, "RandomFlip"],
            "step_size": 2e-05,
            "option": ["a=1", "b=2"],
            "rho": -1,
            "init": None,
        }
    }
    run = expand(plain, KINDS)[0]
    assert run.arguments(KINDS) == [
        "--no-evaluate",
        *("--attacks", "fgsm", "pgd20"),
        "--augmentation=[{padding: 4, type: RandomCrop}, RandomFlip]",
        "--step-size=2e-05",
        *("--option", "a=1", "--option", "b=2"),
        "--rho=-1",
    ]
    assert run.arguments(KINDS, resuming=True) == ["--no-evaluate", "--attacks", "fgsm", "pgd20"]


def test_the_options_known_are_those_of_dale_train():
    assert {"algorithm", "rho", "epochs", "out", "attacks", "accumulate"} <= KINDS.known
    assert {"quiet", "no_evaluate", "deterministic"} <= KINDS.flags
    assert {"attacks", "compare"} <= KINDS.lists


@pytest.mark.parametrize(
    ("plain", "line"),
    [
        ([1, 2], "expected a mapping with base and grid"),
        ({"grids": {}}, "unknown part of sweep 'grids'; did you mean 'grid'?"),
        ({"grid": {"rho": 0.1}}, "grid: rho needs a list of values, got 0.1"),
        ({"grid": {"rho": []}}, "grid: rho needs a list of values"),
        ({"grid": {"rhoo": [1]}}, "did you mean 'rho'?"),
        ({"base": {"out": "elsewhere"}}, "base: out is set by the sweep"),
        ({"base": {"resume": "x"}}, "base: resume is set by the sweep"),
        ({"base": {"trust": True}}, "base: trust is set by the sweep"),
        ({"base": 3}, "base: expected options of `dale train`"),
        ({"include": {"rho": 1}}, "include: expected a list of mappings"),
        ({"grid": {"seed": [0, 0]}}, "the run seed=0 is listed twice"),
        ({"grid": {"seed": [0]}, "exclude": [{"seed": 0}]}, "every run of the grid is excluded"),
        ({"grid": {"seed": list(range(101)), "epochs": list(range(101))}}, "the grid has more than 10000 runs"),
    ],
)
def test_what_is_wrong_is_one_line(plain, line):
    with pytest.raises(UsageError) as raised:
        expand(plain, KINDS)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "plain",
    [
        {"base": {"model": "os:system"}},
        {"base": {"algorithm": "a.b:c"}},
        {"grid": {"sampler": ["{type: os.path:join}"]}},
        {"grid": {"set": [{"type": "os.path:join"}]}},
        {"base": {"option": ["loss=os:system"]}},
        {"base": {"augmentation": [{"type": "RandomFlip", "x": {"os:system": 1}}]}},
        {"include": [{"loss": "os:system"}]},
        {"base": {"optimiser": "{type: os:system}"}},
        {"base": {"set": '{type: "os\\x3asystem", epsilon: 0.1}'}},  # what YAML makes of it a second time
        {"base": {"option": ['loss="os\\x3asystem"']}},
        {"base": {"option": ["a=b=os:system"]}},
        {"base": {"algorithm": "os:é"}},  # a name as good as any to Python
    ],
)
def test_code_in_a_file_is_refused_unless_trusted(plain):
    with pytest.raises(UsageError, match=r"names code to import.*--trust"):
        expand(plain, KINDS)
    assert len(expand(plain, KINDS, trust=True)) == 1


@pytest.mark.parametrize(
    "plain",
    [
        {"base": {"attacks": ["fgsm", "--option=loss=os:system"]}},
        {"base": {"log": ["tensorboard", "--trust"]}},
        {"base": {"compare": "--sampler={type: os:system}"}},
        {"grid": {"option": [["--loss=os:system"]]}},
    ],
)
def test_no_value_is_an_option_of_its_own(plain):
    for trust in (False, True):
        with pytest.raises(UsageError, match="begins with a dash, as another option does"):
            expand(plain, KINDS, trust=trust)


def test_paths_are_not_code():
    assert options_of({"base": {"dataset": "data:set.npz", "init": "a:b"}}) == [
        {"dataset": "data:set.npz", "init": "a:b"}
    ]


def test_folders_have_harmless_names(tmp_path):
    names = ["../../etc/passwd", "a/b", ".hidden", "x" * 500, "é\n", "-rf", "~", "", "a b", "a_b"]
    runs = expand({"grid": {"dataset": names}}, KINDS)
    assert len({run.name for run in runs}) == len(names)
    for run in runs:
        folder = (tmp_path / run.name).resolve()
        assert folder.parent == tmp_path
        folder.mkdir()
        assert len(run.name) < 100


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch hacked']",
        "base: !!python/object/apply:os.system ['touch hacked']",
        "base: {model: !!python/name:os.system }",
        "a: &a [*a, *a]",
        "[" * 5000,
        "base: &b {epochs: 1, option: [*b]}",
        "\x00",
    ],
)
def test_a_strangers_file_runs_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(DaleError):
        read_sweep("sweep.yaml", KINDS)
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.yaml"]


def test_no_file():
    with pytest.raises(UsageError, match=r"there is no sweep file 'none\.yaml'"):
        read_sweep("none.yaml", TrainOptions(frozenset(), frozenset(), frozenset()))
