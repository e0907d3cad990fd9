from __future__ import annotations

import json
import os
import stat

import pytest
import safetensors.torch
import torch
from torch import nn

from dale.errors import CheckpointError, DaleError, UsageError
from dale.models import ConvNet, create_model, load_weights, save_weights


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def file(tmp_path):
    save_weights(small(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_weights_come_back_to_the_bit_with_their_metadata(tmp_path):
    source = create_model("resnet18", channels=1, size=8, num_classes=3, seed=1).to(memory_format=torch.channels_last)
    save_weights(source, tmp_path / "w.safetensors", metadata={"epoch": "7"})
    target = create_model("resnet18", channels=1, size=8, num_classes=3, seed=2)
    assert load_weights(target, tmp_path / "w.safetensors") == {"format": "pt", "epoch": "7"}
    assert same(state(source), state(target))
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_the_same_weights_and_metadata_are_the_same_bytes(tmp_path):
    """Whatever order the library writes its metadata in, which changes from call to call."""
    metadata = {name: name.upper() for name in ("one", "two", "three", "four", "five", "säx")}
    found = set()
    for metadata_order in (list(metadata), list(reversed(metadata))):
        for _ in range(4):
            save_weights(
                small(), tmp_path / "w.safetensors", metadata={name: metadata[name] for name in metadata_order}
            )
            found.add((tmp_path / "w.safetensors").read_bytes())
    assert len(found) == 1
    assert load_weights(small(), tmp_path / "w.safetensors") == {"format": "pt", **metadata}
    assert int.from_bytes(found.pop()[:8], "little") % 8 == 0


def test_the_normalisation_travels_with_the_weights(tmp_path):
    source = ConvNet(channels=1, size=(8, 8))
    source.normalise.mean.fill_(0.25)
    save_weights(source, tmp_path / "w.safetensors")
    target = ConvNet(channels=1, size=(8, 8))
    load_weights(target, tmp_path / "w.safetensors")
    assert target.normalise.mean.item() == 0.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(tmp_path, dtype):
    model = small()
    save_weights(model, tmp_path / "w.safetensors", dtype=dtype)
    stored = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert stored["0.weight"].dtype == dtype
    assert stored["1.num_batches_tracked"].dtype == torch.int64
    target = small(1)
    load_weights(target, tmp_path / "w.safetensors")
    assert target[0].weight.dtype == torch.float32
    assert torch.equal(target[0].weight, model[0].weight.to(dtype).float())


def test_loading_into_a_model_of_lower_precision(file):
    target = small(1).bfloat16()
    load_weights(target, file)
    assert torch.equal(target[0].weight, small()[0].weight.bfloat16())


def test_values_that_do_not_fit_are_refused_not_made_infinite(tmp_path):
    model = small()
    model[1].running_var.fill_(1e6)
    with pytest.raises(UsageError, match=r"'1.running_var' has values that torch.float16 cannot hold"):
        save_weights(model, tmp_path / "w.safetensors", dtype=torch.float16)
    save_weights(model, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"1.running_var has values that are not finite in torch.float16"):
        load_weights(small().half(), tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"got torch\.int8"):
        save_weights(model, tmp_path / "w.safetensors", dtype=torch.int8)


def test_shared_and_viewed_tensors(tmp_path):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model[1].bias = nn.Parameter(torch.rand(10)[2:8:2])
        return model

    source, target = tied(), tied()
    save_weights(source, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert same(state(source), state(target))
    assert target[1].weight is target[0].weight


def test_a_compiled_model_is_stored_under_its_own_names(tmp_path, file):
    model = torch.compile(small(2), backend="eager")
    load_weights(model, file)
    assert same(state(model._orig_mod), state(small()))
    save_weights(model, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def header_of(entries: dict[str, object], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated, 0 bytes"),
        (b"\x10\x00", "truncated, 2 bytes"),
        (b"hello, this is a text file", "not a safetensors file"),
        (b"PK\x03\x04 and the rest of an archive", "pickled PyTorch file"),
        (b"\x80\x02}q\x00.     ", "pickled PyTorch file"),
        ((2**62).to_bytes(8, "little") + b'{"a":1}', "not a safetensors file"),
        ((1000).to_bytes(8, "little") + b'{"a":1}', "truncated, the header alone should have 1000 bytes"),
        ((8).to_bytes(8, "little") + b"{broken}", "damaged safetensors file"),
        (header_of({"a": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 4]}}, b"0000"), "damaged"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**50]}}, b"0000"), "damaged"),
        (header_of({}), "not the weights of this model: 0.weight, 0.bias, 1.weight and 6 more missing"),
    ],
)
def test_foreign_files_leave_the_model_alone(tmp_path, content, words):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    model = small()
    with pytest.raises(CheckpointError, match=words) as caught:
        load_weights(model, path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert same(state(model), state(small()))


@pytest.mark.parametrize("kept", [0, 5, 8, 9, 60, 400, -1])
def test_truncated_anywhere(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"truncated|damaged"):
        load_weights(small(), file)


def test_something_that_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent.safetensors: no such weights file"):
        load_weights(small(), tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_weights(small(), tmp_path)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_weights(small(), tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("0.bias"), "0.bias missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra unexpected"),
        (lambda t: t.update({"0.bias": torch.zeros(5)}), "0.bias is 5, expected 4"),
        (lambda t: t.update({"0.bias": torch.zeros(())}), "0.bias is a scalar, expected 4"),
        (lambda t: t.update({"0.bias": torch.zeros(4, dtype=torch.int32)}), "0.bias is of type I32, expected float32"),
        (lambda t: t.update({"1.num_batches_tracked": torch.zeros(())}), "is of type F32, expected int64"),
        (lambda t: t.update({"2.bias": torch.tensor([1.0, torch.nan])}), "2.bias has values that are not finite"),
    ],
)
def test_weights_of_another_model_leave_this_one_alone(tmp_path, change, words):
    tensors = state(small(1))
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    model = small()
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, tmp_path / "w.safetensors")
    assert same(state(model), state(small()))


def test_writing_is_all_or_nothing(tmp_path, file, monkeypatch):
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DaleError, match=r"cannot write .*w.safetensors: No space left on device"):
        save_weights(small(1), file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]
    with pytest.raises(DaleError, match=r"cannot write .*: No such file or directory"):
        save_weights(small(1), tmp_path / "absent" / "w.safetensors")


def test_the_file_is_as_readable_as_any_other(tmp_path, file):
    (tmp_path / "plain").write_bytes(b"")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_numbers_that_no_file_holds_are_refused(tmp_path):
    model = small()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"'phase' is of torch\.complex64, which no weights file holds"):
        save_weights(model, tmp_path / "w.safetensors")
    assert os.listdir(tmp_path) == []


def test_only_tensors_are_stored(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return "text"

    with pytest.raises(UsageError, match="'_extra_state' in the model's state dict is str"):
        save_weights(Odd(2, 2), tmp_path / "w.safetensors")
    assert os.listdir(tmp_path) == []
