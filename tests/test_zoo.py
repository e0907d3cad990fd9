"""The zoo: weights in float16 and shards, loaded back to float32, with clear words for what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dale
from dale.errors import CheckpointError, DaleError, UsageError
from dale.files import read_json, write_json
from dale.reproduction.store import Part, publish
from dale.zoo import entries, find, store, write_shards

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    data = dale.load_dataset("digits", train_size=64, validation_size=20, certification_size=1, test_size=40)
    objective = dale.algorithms.dale(dale.Linf(epsilon=0.25), rho=0.5, steps=1)
    return dale.fit(
        dale.create_model("convnet", data),
        objective,
        data,
        out=tmp_path_factory.mktemp("zoo") / "run",
        epochs=1,
        progress=False,
        device="cpu",
        loggers=(),
    )


def test_what_is_stored_is_loaded_in_float32_and_eval_mode(run, tmp_path, monkeypatch) -> None:
    entry = store(run, "digits-dale", tmp_path)
    assert [path.name for path in entry.weights] == ["digits-dale.safetensors"]
    assert (entry.dataset, entry.rho, entry.perturbations()) == ("digits", 0.5, dale.Linf(epsilon=0.25))
    monkeypatch.setenv("DALE_ZOO", str(tmp_path))
    model = dale.load_model("zoo:digits-dale")
    assert not any(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        wanted = run.model.state_dict()[name]
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted.half().float() if wanted.is_floating_point() else wanted)
    assert [one.name for one in entries()] == ["digits-dale"]


def test_training_starts_from_a_stored_model(run, tmp_path, monkeypatch) -> None:
    store(run, "digits-dale", tmp_path)
    monkeypatch.setenv("DALE_ZOO", str(tmp_path))
    data = run.config.data.load()
    model = dale.create_model("convnet", data, seed=5, init="zoo:digits-dale")
    wanted = find("digits-dale").load().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match="does not belong to this model"):
        dale.create_model("resnet18", data, init="zoo:digits-dale")
    with pytest.raises(UsageError, match="has activation 'relu'; the model that is to start from it has 'silu'"):
        dale.create_model("convnet", data, activation="silu", init="zoo:digits-dale")
    with pytest.raises(UsageError, match="did you mean 'digits-dale'"):
        dale.create_model("convnet", data, init="zoo:digit-dale")


def test_a_run_folder_loads_as_ever(run) -> None:
    model = dale.load_model(run.path)
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in model.state_dict().items())


def test_large_weights_are_several_files(run, tmp_path) -> None:
    tensors = {"a": torch.zeros(100), "b": torch.ones(100), "c": torch.zeros(500), "d": torch.ones(3)}
    assert write_shards(tensors, "x", tmp_path, limit=800) == ["x-0.safetensors", "x-1.safetensors", "x-2.safetensors"]
    entry = store(run, "m", tmp_path)
    from dale.models.weights import stored_tensors

    names = write_shards(stored_tensors(run.model, torch.float16), "m", tmp_path, limit=20_000)
    assert len(names) > 1
    write_json(entry.path, dict(entry.plain) | {"weights": names})
    found = find("zoo:m", tmp_path).load().state_dict()
    assert torch.equal(next(iter(found.values())), next(iter(entry.load().state_dict().values())))
    write_json(entry.path, dict(entry.plain) | {"weights": names[:-1]})
    with pytest.raises(CheckpointError, match="the weights lack"):
        find("m", tmp_path).load()


def test_what_is_not_there_gets_one_clear_line(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DALE_ZOO", str(tmp_path))
    with pytest.raises(UsageError, match="no zoo at"):
        dale.load_model("zoo:anything")
    store(run, "mnist-dale", tmp_path)
    with pytest.raises(UsageError, match="did you mean 'mnist-dale'"):
        dale.load_model("zoo:mnist-dael")
    for bad in ("", "a/b", ".x", "a b"):
        with pytest.raises(UsageError, match="a model's name"):
            store(run, bad, tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": 9}, "does not describe a stored model"),
        ({"weights": ["../x.safetensors"]}, "without a path"),
        ({"weights": []}, r"a list of files beside it, .* got \[\]"),
        ({"weights": "m.safetensors"}, "a list of files beside it"),
        ({"weights": ["gone.safetensors"]}, "cannot read the weights"),
        ({"image_shape": [1, 8]}, "damaged"),
        ({"image_shape": [3, 8, 8]}, "does not belong to this model"),
    ],
)
def test_a_damaged_entry_is_refused(run, tmp_path, change, line) -> None:
    entry = store(run, "m", tmp_path)
    entry.path.write_text(json.dumps(dict(entry.plain) | change))
    with pytest.raises(CheckpointError, match=line):
        find("m", tmp_path).load()


def test_code_that_an_entry_names_is_run_only_if_trusted(run, tmp_path, monkeypatch) -> None:
    entry = store(run, "m", tmp_path)
    entry.path.write_text(json.dumps(dict(entry.plain) | {"model": "collections:OrderedDict"}))
    monkeypatch.setenv("DALE_ZOO", str(tmp_path))
    with pytest.raises(
        UsageError, match=r"m\.json: model names code to import, 'collections:OrderedDict'; pass --trust"
    ):
        dale.load_model("zoo:m")
    with pytest.raises(DaleError) as caught:  # it is imported now, and is no model
        dale.load_model("zoo:m", trust=True)
    assert "--trust" not in str(caught.value)


def test_new_weights_never_lie_under_the_numbers_of_others(run, tmp_path, monkeypatch) -> None:
    """A process that is killed between the weights and what is said of them leaves weights without numbers."""
    store(run, "m", tmp_path)

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("dale.zoo.write_shards", killed)
    with pytest.raises(KeyboardInterrupt):
        store(run, "m", tmp_path)
    assert entries(tmp_path) == []


def test_published_numbers_are_those_of_the_stored_weights(run, tmp_path) -> None:
    said: list[str] = []
    parts = (Part(10, ("fgsm",), strict=True), Part(20, ("fgsm",)), Part(10, ("pgd2",)))
    work = tmp_path / "work"
    entry = publish("m", tmp_path, work, run=run.path, device="cpu", parts=parts, say=said.append)
    assert [(part["n"], set(part["accuracies"])) for part in entry.published] == [
        (20, {"clean", "fgsm"}),
        (10, {"clean", "fgsm", "pgd2"}),
    ]
    data = dale.load_dataset("digits")
    again = dale.evaluate(
        entry.load(), data, entry.perturbations(), ["fgsm"], examples=20, progress=False, checks=False
    )
    published = dict(entry.published[0]["accuracies"]["fgsm"])
    assert published.pop("on").endswith("ieee")  # the machine, torch, and the precision of the search
    assert published.pop("seconds") >= 0.0
    assert published == again["fgsm"].accuracy.to_plain()
    assert entry.published[0]["nominal_loss"]["rho"] == 0.5
    assert len(said) == 4
    certificate = entry.plain["certificate"]
    assert (certificate["split"], certificate["rho"], certificate["loss"]["n"]) == ("test", 0.5, 40)
    assert certificate["statement"] in said[-1]
    before = read_json(entry.path)
    publish("m", tmp_path, work, run=run.path, device="cpu", parts=parts, say=said.append)
    assert read_json(entry.path) == before  # what is done is not done again
    assert len(said) == 4


def test_what_is_missing_of_a_stored_model_is_published_without_its_run(run, tmp_path) -> None:
    said: list[str] = []
    store(run, "m", tmp_path)
    first, second = Part(10, ("fgsm",), strict=True), Part(10, ("pgd2",), strict=True)
    options = {"device": "cpu", "say": said.append}
    publish("m", tmp_path, tmp_path / "work", parts=[first], **options)
    entry = publish("m", tmp_path, tmp_path / "work", parts=[first, second], **options)
    assert set(entry.published[0]["accuracies"]) == {"clean", "fgsm", "pgd2"}
    assert len(said) == 3  # the certificate with the first part
    with pytest.raises(UsageError, match="did you mean 'm'"):
        publish("mm", tmp_path, tmp_path / "work", parts=[first], **options)


def test_a_run_that_was_trained_anew_is_stored_anew(run, tmp_path) -> None:
    """Under the same configuration: what was published is of other weights."""
    parts = [Part(10, ("fgsm",))]
    publish("m", tmp_path, tmp_path / "work", run=run.path, device="cpu", parts=parts, say=str)
    path = find("m", tmp_path).path
    plain = read_json(path)
    plain["summary"] |= {"seconds": 0.0}
    plain["published"][0]["accuracies"]["fgsm"]["accuracy"] = 2.0
    path.write_text(json.dumps(plain))
    found = publish("m", tmp_path, tmp_path / "work", run=run.path, device="cpu", parts=parts, say=str)
    assert found.plain["summary"] == run.summary
    assert found.published[0]["accuracies"]["fgsm"]["accuracy"] <= 1.0


@pytest.mark.verify
def test_the_stored_models_score_here_what_was_published(real_data) -> None:
    """On the first 1,000 test images, within 0.3 points: clean, and under the attacks that a CPU has time for."""
    stored = entries(ROOT / "zoo")
    if not stored:
        pytest.skip("no model is stored yet")
    for entry in stored:
        data = dale.load_dataset(entry.dataset, data_dir=real_data)
        published = next(part["accuracies"] for part in entry.published if part["n"] == 1000)
        model = entry.load()
        attacks = ["fgsm", "pgd20"] if sum(p.numel() for p in model.parameters()) < 5e6 else ["fgsm"]
        found = dale.evaluate(
            model, data, entry.perturbations(), attacks, examples=1000, batch_size=100, progress=False, checks=False
        )
        assert found.clean.value == pytest.approx(published["clean"]["accuracy"], abs=0.003)
        for name in attacks:
            assert found[name].accuracy.value == pytest.approx(published[name]["accuracy"], abs=0.003), name
        assert all(path.stat().st_size <= 16.1 * 2**20 for path in entry.weights)
