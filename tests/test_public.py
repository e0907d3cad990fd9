"""The names a user sees: all there, documented, loaded on first use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import dale


@pytest.mark.parametrize("name", dale.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(dale, name)
    assert value.__doc__
    if not isinstance(value, ModuleType):
        assert value.__name__ == name
    assert name in dir(dale)


def test_the_names_of_the_design() -> None:
    """What the README and the design promise; a name may be added, none may go."""
    assert {
        *("L1", "L2", "Linf", "Rotation", "Translation", "Scaling", "Composition", "PerturbationSet"),
        *("Loss", "Sampler", "Chain", "Constraint", "Objective", "Batch", "Dataset", "Split"),
        *("load_dataset", "create_model", "check_model", "fit", "evaluate", "load_model", "load_run"),
        *("Run", "Training", "Evaluation", "key", "Key", "Step", "DaleError", "UsageError"),
        *("algorithms", "attacks", "certificates", "constraints", "data", "losses", "models", "training"),
    } <= set(dale.__all__)
    assert len(dale.__all__) == len(set(dale.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Linff'"):
        dale.Linff  # noqa: B018


@pytest.mark.parametrize(
    "room",
    ["aggregators", "attacks", "certificates", "data", "losses", "models", "perturbations", "samplers", "training"],
)
def test_what_a_room_lists_is_there(room: str) -> None:
    module = getattr(dale, room)
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dale.Linf(epsilon="a"), "epsilon must be a finite number above 0, got 'a'"),
        (lambda: dale.Linf(epsilon=True), "epsilon must be a finite number above 0, got True"),
        (lambda: dale.algorithms.dale(dale.Linf(epsilon=0.1), rho="x"), "limit must be a finite number .* got 'x'"),
        (
            lambda: dale.algorithms.dale(0.1, rho=0.1),
            r"perturbations must be of kind PerturbationSet \(.*Linf.*got 0.1",
        ),
        (lambda: dale.algorithms.pgd(dale.Linf(epsilon=0.1), robust_loss=3), "robust_loss must be of kind Loss"),
        (lambda: dale.create_model("convnet", 3), "data must know its image_shape and num_classes, .* got 3"),
        (lambda: dale.fit(None, None, None), "fit: model must be a Module, got None"),
        (lambda: dale.fit(torch.nn.Flatten(), None, None), "fit: objective must be a Objective, got None"),
    ],
)
def test_arguments_of_another_kind_are_one_clear_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(dale.UsageError, match=message):
        call()


def test_the_import_is_lazy() -> None:
    code = (
        "import sys, dale\n"
        "heavy = {'torch', 'numpy', 'scipy', 'yaml', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert dale.UsageError.__name__ == 'UsageError'\n"
        "assert 'torch' not in sys.modules\n"
        "dale.Linf\n"
        "assert 'torch' in sys.modules and 'Linf' in vars(dale)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_exit_codes() -> None:
    from dale.errors import CheckpointError, DataError, NumericsError

    assert dale.UsageError("x").exit_code == 2
    for failure in (dale.DaleError, DataError, CheckpointError, NumericsError):
        assert failure("x").exit_code == 1
