"""Pictures under attack and projected perturbations."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import dale
from dale import random
from dale.data import Split
from dale.perturbations import L2, Linf, Rotation
from dale.training import artefacts
from dale.training.artefacts import gallery, principal_components, scaled, write_artefacts


@pytest.fixture(scope="module")
def run_and_data(tmp_path_factory):
    data = dale.load_dataset("digits", train_size=128)
    objective = dale.algorithms.dale(Linf(epsilon=0.25), rho=0.5, steps=2)
    out = tmp_path_factory.mktemp("run") / "a"
    return dale.fit(dale.create_model("convnet", data), objective, data, out=out, progress=False, epochs=1), data


def pixels(text: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)


def test_the_file_holds_what_the_page_needs(run_and_data, tmp_path):
    run, data = run_and_data
    path = write_artefacts(run, data, tmp_path)
    assert path == tmp_path / "artefacts.json"
    assert path.stat().st_size < 3_000_000
    plain = json.loads(path.read_text())
    assert plain["gallery"]["radii"] == [0.25 * factor for factor in artefacts.FACTORS]
    assert [example["label"] for example in plain["gallery"]["examples"]] == list(range(10))
    assert set(plain["projection"]["series"]) == {"FGSM", "PGD", "Langevin"}
    assert all(len(points) == artefacts.POINTS for points in plain["projection"]["series"].values())


def test_the_same_run_gives_the_same_file(run_and_data, tmp_path):
    run, data = run_and_data
    first, second = (write_artefacts(run, data, tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_the_model_is_left_as_it_was(run_and_data, tmp_path):
    run, data = run_and_data
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.train()
    try:
        write_artefacts(run, data, tmp_path)
        assert run.model.training
        assert all(parameter.requires_grad for parameter in run.model.parameters())
    finally:
        run.model.eval()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_pictures_are_the_images_and_stay_in_the_ball(run_and_data):
    run, data = run_and_data
    found = gallery(run.model, data.test, Linf(epsilon=0.2), random.key(0))
    for example in found["examples"]:
        place = (data.test.index == example["index"]).nonzero().item()
        clean = pixels(example["clean"]).astype(int)
        assert np.array_equal(clean, (data.test.convert(data.test.images[place])[0] * 255).round().numpy())
        assert example["levels"][0]["perturbed"] == example["clean"]
        for radius, level in zip(found["radii"], example["levels"], strict=True):
            assert abs(pixels(level["perturbed"]).astype(int) - clean).max() <= round(255 * radius) + 1
        assert abs(example["reach"] - 0.4) < 1e-6


def test_predictions_are_those_of_the_model(run_and_data):
    run, data = run_and_data
    found = gallery(run.model, data.test, L2(epsilon=1.0), random.key(0))
    for example in found["examples"]:
        place = (data.test.index == example["index"]).nonzero().item()
        with torch.no_grad():
            p = run.model(data.test.convert(data.test.images[place : place + 1])).softmax(dim=1)[0]
        top = example["levels"][0]["top"]
        assert top[0][0] == int(p.argmax())
        assert abs(top[0][1] - float(p.max())) < 1e-4
        assert top[0][1] >= top[1][1] >= top[2][1]


def test_a_set_without_a_radius_is_scaled_down(run_and_data):
    run, data = run_and_data
    assert scaled(Rotation(degrees=20.0), 0.5) is None
    assert scaled(Linf(epsilon=0.2), 0.5) == Linf(epsilon=0.1)
    found = gallery(run.model, data.test, Rotation(degrees=20.0), random.key(0))
    assert found["radii"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert found["unit"] == "share of the set"
    example = found["examples"][0]
    assert example["levels"][0]["perturbed"] == example["clean"] != example["levels"][-1]["perturbed"]


def test_the_budget_of_bytes_is_kept(run_and_data, monkeypatch):
    run, data = run_and_data
    monkeypatch.setattr(artefacts, "BUDGET", 12_000)
    found = gallery(run.model, data.test, Linf(epsilon=0.2), random.key(0))
    assert 1 <= len(found["examples"]) < 10
    assert len(json.dumps(found["examples"])) <= 12_000 + 20 * len(found["examples"])


@pytest.mark.parametrize(("channels", "side", "shown"), [(1, 28, 28), (3, 32, 32), (5, 20, 20), (3, 224, 75)])
def test_images_of_any_shape_become_pictures(channels, side, shown):
    image = torch.rand(channels, side, side)
    assert pixels(artefacts._png(image)).shape[:2] == (shown, shown)
    assert pixels(artefacts._png(artefacts._signed(image))).shape == (shown, shown, 3)


def test_principal_components_against_the_svd():
    scales = torch.linspace(0.1, 1, 30).view(1, 5, 6)
    images = torch.rand(40, 1, 5, 6, generator=torch.Generator().manual_seed(0)) * scales
    split = Split.of(images, torch.arange(40) % 3)
    components, shares = principal_components(split)
    doubled = images.double().flatten(1)
    centred = doubled - doubled.mean(dim=0)
    _, s, v = torch.linalg.svd(centred, full_matrices=False)
    for k in range(2):
        assert abs(float(components[k].double() @ v[k])) == pytest.approx(1.0, abs=1e-6)
        assert shares[k] == pytest.approx(float(s[k] ** 2 / (s**2).sum()), rel=1e-9)
        assert components[k][components[k].abs().argmax()] > 0


def test_images_without_variance_have_no_components():
    components, shares = principal_components(Split.of(torch.full((3, 1, 2, 2), 0.5), torch.tensor([0, 1, 0])))
    assert shares == [0.0, 0.0]
    assert components.count_nonzero() == 0


def test_a_row_without_a_set_writes_nothing(tmp_path):
    data = dale.load_dataset("digits", train_size=64)
    objective = dale.algorithms.erm()
    run = dale.fit(dale.create_model("convnet", data), objective, data, out=tmp_path / "run", progress=False, epochs=1)
    assert objective.perturbations is None
    assert write_artefacts(run, data, tmp_path) is None
    assert not (tmp_path / "artefacts.json").exists()
