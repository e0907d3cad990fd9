"""Export: what is written computes what was trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dale
from dale.errors import DaleError, UsageError
from dale.export import FORMATS, SUFFIXES, agreement, export_run
from dale.training.runs import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    data = dale.load_dataset("digits", train_size=128)
    objective = dale.algorithms.dale(dale.Linf(epsilon=0.25), rho=0.5, steps=1)
    out = tmp_path_factory.mktemp("export") / "run"
    dale.fit(dale.create_model("convnet", data), objective, data, out=out, progress=False, epochs=1)
    return load_run(out)


def needs(format):
    if format == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(name)


@pytest.mark.parametrize("format", FORMATS)
def test_the_file_computes_the_same(run, tmp_path, format):
    needs(format)
    done = export_run(run, format, tmp_path / "out")
    assert done.path == tmp_path / "out" / SUFFIXES[format]
    assert done.difference <= 1e-4
    assert sorted(p.name for p in done.path.parent.iterdir()) == sorted([SUFFIXES[format], "README.md", "config.yaml"])
    card = done.card.read_text()
    assert "dale train --config config.yaml" in card
    assert str(tmp_path) not in card

    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    code = card.partition("```python\n")[2].partition("```")[0].replace('"model.', f'"{done.path.parent}/model.')
    values = {"images": images.numpy() if format == "onnx" else images}
    with torch.no_grad():
        exec(code, values)  # the card's own lines
        expected = run.model(images)
    assert torch.allclose(torch.as_tensor(values["logits"]), expected, atol=1e-4)


def test_the_default_place_is_in_the_run(run):
    assert export_run(run, "safetensors").path == run.path / "export" / "safetensors" / "model.safetensors"


def test_an_unknown_format(run):
    with pytest.raises(UsageError, match="did you mean 'safetensors'"):
        export_run(run, "safetensor")


def test_a_model_that_differs_is_refused():
    model, images = nn.Flatten(), torch.rand(4, 1, 2, 2)
    assert agreement(model, lambda x: x.flatten(1), images) == 0.0
    with pytest.raises(DaleError, match="logits differ by"):
        agreement(model, lambda x: x.flatten(1) + 0.01, images)
    with pytest.raises(DaleError, match="logits differ by nan"):
        agreement(model, lambda x: x.flatten(1) * float("nan"), images)
    with pytest.raises(DaleError, match=r"returns \(1, 3\) where the model returns \(1, 4\)"):
        agreement(model, lambda x: x.flatten(1)[:, :3], images)


def test_nothing_is_kept_of_a_file_that_disagrees(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "model", dale.create_model("convnet", channels=1, size=8, num_classes=10, seed=5).eval())
    with pytest.raises(DaleError, match="disagrees"):
        export_run(run, "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Branching(nn.Module):
    """What it computes depends on the values: no graph can hold it."""

    def forward(self, x):
        return x.flatten(1)[:, :10] * (2.0 if float(x.sum()) > 1 else 1.0)


def test_a_model_that_cannot_be_traced_gets_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "model", Branching())
    with pytest.raises(DaleError, match="torch cannot export this model: ") as caught:
        export_run(run, "torch-export", tmp_path)
    assert "\n" not in str(caught.value)


def test_without_onnx_one_line_says_what_to_install(run, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(DaleError, match=r"pip install 'dale\[onnx\]'"):
        export_run(run, "onnx", tmp_path)
