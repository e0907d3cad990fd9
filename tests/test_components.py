"""Components are their own configuration: round trips, checks, and files that run nothing."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from dale import algorithms, components
from dale.components import (
    Component,
    dump_yaml,
    find,
    from_plain,
    import_object,
    import_path,
    known,
    load_yaml,
    to_plain,
)
from dale.errors import UsageError
from dale.losses import KL, Clipped, CrossEntropy, FunctionLoss, Loss, WeightedSum
from dale.objectives import Objective
from dale.perturbations import Composition, Linf, PerturbationSet, Rotation, Translation
from dale.samplers import Chain, GaussianNoise, Sampler
from dale.training.config import Algorithm, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Component):
    """One field of every kind that a component may have."""

    whole: int = 3
    number: float = 0.5
    switch: bool = False
    word: str = "text"
    choice: Literal["a", "b"] = "a"
    maybe: float | None = None
    several: tuple[float, ...] = (1.0, 2.0)
    pair: tuple[int, str] = (1, "one")
    either: float | tuple[float, ...] = 1.0
    folder: Path = Path("runs")
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    loss: Loss | None = None


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's that says when it is imported."""
    (tmp_path / "my_components.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from dale.losses import CrossEntropy, Loss

            @dataclass(frozen=True, kw_only=True)
            class Halved(Loss):
                share: float = 0.5

                def value(self, logits, clean, labels):
                    return self.share * CrossEntropy().value(logits, clean, labels)

            class NotAComponent:
                pass

            def squared(logits, clean, labels):
                return logits.square().sum(dim=1)

            squared.non_negative = True
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_components"
    sys.modules.pop("my_components", None)


def read(text: str, expected: type = Sample, **options: bool):
    return load_yaml(textwrap.dedent(text), expected, **options)


def test_every_kind_of_field_is_read_back_equal():
    value = Sample(
        whole=-4,
        number=1e-7,
        switch=True,
        word="0.5",  # a word that looks like a number stays a word
        choice="b",
        maybe=1e22,
        several=(),
        pair=(2, "null"),
        either=(3.0, 4.5),
        folder=Path("some/where"),
        table={"x": 1},
        loss=Clipped(loss=WeightedSum(losses=(KL(), CrossEntropy(label_smoothing=0.1)), weights=(1.0, 2.0)), bound=3.0),
    )
    plain = to_plain(value)
    plain.pop("type")
    assert from_plain(plain, Sample) == value
    assert from_plain(components.parse_yaml(dump_yaml(plain)), Sample) == value
    assert from_plain({}, Sample) == Sample()


@pytest.mark.parametrize("name", sorted(algorithms.ROWS))
def test_every_row_is_read_back_equal(name):
    options = {"rho": 0.1} if name in ("dale", "dale-optimal") else {}
    objective = algorithms.build(name, Linf(epsilon=0.25), **options)
    text = dump_yaml(objective)
    assert load_yaml(text, Objective) == objective
    assert dump_yaml(load_yaml(text, Objective)) == text


def test_names_in_any_spelling():
    assert find(Loss, "cross-entropy") is find(Loss, "CROSS_ENTROPY") is CrossEntropy
    assert read("CrossEntropy", Loss) == CrossEntropy()
    assert read("{type: linf, epsilon: 1}", PerturbationSet) == Linf(epsilon=1.0)


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "+1.0e-3", "1.e-3", ".1e-2", "0.001"])
def test_numbers_as_everybody_writes_them(number):
    assert read(f"number: {number}").number == 1e-3


@pytest.mark.parametrize("word", ["1e5f", "2e", "e5", "1e-3 x"])
def test_words_that_begin_like_numbers_stay_words(word):
    assert read(f"word: {word}").word == word


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(3), np.int32(3)])
def test_numbers_of_any_width_are_written(number):
    plain = to_plain({"x": number})["x"]
    assert plain == number
    assert type(plain) in (int, float)


def test_numpy_numbers_are_written_as_numbers():
    assert read(dump_yaml(Linf(epsilon=np.float64(0.1))), PerturbationSet) == Linf(epsilon=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("whole: 1.5", "config.whole: expected int, got 1.5"),
        ("whole: true", "config.whole: expected int, got True"),
        ("number: yes", "config.number: expected float, got True"),
        ("number: many", "config.number: expected float, got 'many'"),
        ("number: .nan", "config.number: expected a number, got nan"),
        ("maybe: .nan", "got nan"),
        ("several: [1, .nan]", r"config.several\[1\]: expected a number, got nan"),
        ("number: 1" + "0" * 400, "too large"),
        ("number: 1" + "0" * 5000, "not valid YAML"),
        ("switch: 1", "config.switch: expected bool, got 1"),
        ("choice: c", "unknown config.choice 'c'"),
        ("several: 3", "config.several: expected a list, got 3"),
        ("pair: [1]", "expected 2 values, got 1"),
        ("table: 3", "expected a mapping"),
        ("loss: 3", "expected a Loss"),
        ("loss: {type: 3}", "config.loss.type: expected a name"),
        ("loss: {type: Linf, epsilon: 1}", "unknown Loss 'Linf'"),
        ("loss: {type: Clipped, bound: 1}", "missing 1 required keyword-only argument: 'loss'"),
        ("loss: {type: Clipped, loss: KL, bound: -1}", "Clipped: bound must be a finite number above 0, got -1.0"),
        ("loss: {type: Clipped, loss: KL, bound: .inf}", "bound must be a finite number above 0, got inf"),
        ("wohle: 3", "unknown option of Sample at config 'wohle'; did you mean 'whole'"),
        ("3: 3", "unknown option of Sample at config 3"),
        ("loss: CrossEntrpy", "did you mean 'CrossEntropy'"),
        ("[1, 2]", r"expected a Sample .* got \[1, 2\]"),
        ("a: b: c", "not valid YAML"),
        ("whole: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        from_plain(components.parse_yaml(text), Sample)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_self_reference_and_alias_bombs_are_refused_quickly():
    start = time.process_time()
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    nested = "losses: &l [{type: WeightedSum, losses: *l, weights: [1]}]"
    for text in (bomb, f"type: WeightedSum\nweights: [1]\n{nested}", "&a [*a]", "[" * 150 + "]" * 150, "[" * 2000):
        with pytest.raises(UsageError) as caught:
            read(text, Loss)
        assert len(str(caught.value)) < 500
    assert time.process_time() - start < 5.0


def test_plain_aliases_are_fine():
    loss = read("{type: WeightedSum, losses: [&a {type: KL}, *a], weights: [1, 2]}", Loss)
    assert loss == WeightedSum(losses=(KL(), KL()), weights=(1.0, 2.0))


def test_a_strangers_file_imports_nothing(user_module):
    for text, expected in (
        (f"type: '{user_module}:Halved'", Loss),
        (f"{{type: FunctionLoss, path: '{user_module}:squared'}}", Loss),
        (f"{{type: Clipped, bound: 1, loss: {{type: FunctionLoss, path: '{user_module}:squared'}}}}", Loss),
        (f"{{type: GeneratorNoise, latent: 2, generator: '{user_module}:squared'}}", Sampler),
    ):
        with pytest.raises(UsageError, match="--trust"):
            read(text, expected)
    assert user_module not in sys.modules
    assert read(f"{{type: FunctionLoss, path: '{user_module}:squared'}}", Loss, trust=True).non_negative
    assert user_module in sys.modules


def test_code_is_refused_wherever_a_configuration_may_name_it(user_module):
    """A model, a row and a row's options, however deep inside, in any component that has them."""
    path = f"{user_module}:squared"
    for text, expected, where in (
        (f"name: '{path}'", ModelConfig, "name"),
        (f"name: '{path}'", Algorithm, "name"),
        (f"options: {{losses: [{{loss: '{path}'}}]}}", Algorithm, r"options\.losses\[0\]\.loss"),
    ):
        with pytest.raises(UsageError, match=rf"{where} names code to import, '{path}'; pass --trust"):
            read(text, expected)
        read(text, expected, trust=True)
    assert user_module not in sys.modules
    assert read("{name: convnet, init: 'c:d'}", ModelConfig).init == "c:d"  # a path


def test_a_component_of_the_users_by_its_import_path(user_module):
    text = f"{{type: '{user_module}:Halved', share: 0.25}}"
    loss = read(text, Loss, trust=True)
    assert loss.share == 0.25
    assert dump_yaml(loss).startswith(f"type: {user_module}:Halved")
    assert read(dump_yaml(loss), Loss, trust=True) == loss
    with pytest.raises(UsageError, match="is not a component class"):
        read(f"type: '{user_module}:NotAComponent'", Loss, trust=True)
    with pytest.raises(UsageError, match="expected a Sampler"):
        read(text, Sampler, trust=True)
    with pytest.raises(UsageError, match="cannot import"):
        read(f"type: '{user_module}:Nothing'", Loss, trust=True)
    with pytest.raises(UsageError, match="cannot import"):
        read("type: 'no_such_module_at_all:Nothing'", Loss, trust=True)


def test_functions_are_named_by_their_path(user_module):
    function = import_object(f"{user_module}:squared")
    assert import_path(function) == f"{user_module}:squared"
    assert FunctionLoss(path=import_path(function)).non_negative
    with pytest.raises(UsageError, match="no import path"):
        import_path(lambda: None)


def test_what_cannot_be_written_is_refused():
    with pytest.raises(UsageError, match="cannot be written"):
        to_plain({"x": object()})


def test_known_lists_concrete_components_only():
    names = known(PerturbationSet)
    assert {"Linf", "L2", "L1", "Rotation", "Translation", "Scaling", "Composition"} <= set(names)
    assert not {"PerturbationSet", "ParameterBox", "Sample"} & set(known(Component))
    assert all(name == cls.__name__ and issubclass(cls, PerturbationSet) for name, cls in names.items())
    assert "Brightness" not in names


def test_components_are_frozen_comparable_and_hashable():
    ball = Linf(epsilon=0.25)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ball.epsilon = 0.5
    assert ball == Linf(epsilon=0.25) != Linf(epsilon=0.5)
    both = Composition(parts=(Rotation(degrees=10.0), Translation()))
    assert len({both, Composition(parts=(Rotation(degrees=10.0), Translation()))}) == 1
    assert eval(repr(ball), {"Linf": Linf}) == ball


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_numbers_that_cannot_be_are_refused_on_construction(value):
    for build in (
        lambda v: Linf(epsilon=v),
        lambda v: Rotation(degrees=v),
        lambda v: GaussianNoise(std=(0.1, v)),
        lambda v: Clipped(loss=KL(), bound=v),
    ):
        with pytest.raises(UsageError, match="must be a finite number above 0"):
            build(value)


def test_chain_options_are_checked():
    for options, message in (
        ({"steps": 0}, "steps must be a whole number"),
        ({"num_chains": 0}, "num_chains"),
        ({"burn_in": 1}, "burn_in goes with keep='all'"),
        ({"start": "zeros"}, "did you mean 'zero'"),
        ({"mode": "training"}, "did you mean 'train'"),
    ):
        with pytest.raises(UsageError, match=message):
            Chain(**options)
