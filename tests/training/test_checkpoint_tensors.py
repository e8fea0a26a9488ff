"""Tensors through files: values and dtypes, damaged files, and metadata that is refused."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save

from config.schema.errors import ConfigError
from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.checkpoint_tensors import (
    UnreadableError,
    check_tensor_files,
    copy_to_cpu,
    read_tensors,
    saved_shapes,
    saved_tensors,
    write_tensors,
)
from torchgrpo.training.learner_state import check_same_tensors, learner_tensors, load_step_counts, step_counts
from torchgrpo.training.optimizer import make_optimizer

TENSORS = {
    "model.weight": torch.arange(12.0).reshape(3, 4).T,
    "model.half": torch.full((5,), 1.5, dtype=torch.bfloat16),
    "optimizer.half.remainder": torch.tensor([-32768, 7], dtype=torch.int16),
    "model.number": torch.tensor(3.0),
    "model.nothing": torch.zeros(0, 4),
}


def test_written_tensors_are_read_unchanged(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    check_tensor_files(tmp_path)
    assert saved_shapes(tmp_path)["model.weight"] == [4, 3]
    found = saved_tensors(tmp_path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    assert saved_tensors(tmp_path, "optimizer.").keys() == {"optimizer.half.remainder"}


def test_reading_fills_the_tensors_that_are_there(tmp_path: Path) -> None:
    """Parameters that require a gradient and slices of a larger tensor are filled too."""
    write_tensors(tmp_path, TENSORS)
    weight, parent = nn.Parameter(torch.zeros(4, 3)), torch.zeros(2, 5, dtype=torch.bfloat16)
    read_tensors(tmp_path, {"model.weight": weight, "model.half": parent[1]})
    assert torch.equal(weight.data, TENSORS["model.weight"]) and weight.is_leaf
    assert parent.sum(1).tolist() == [0.0, 7.5]


def test_a_copy_stays_as_it_was() -> None:
    weight = nn.Parameter(torch.ones(3))
    copy = copy_to_cpu({"weight": weight})["weight"]
    weight.data += 1
    assert copy.tolist() == [1.0, 1.0, 1.0] and not copy.requires_grad


def test_tensors_that_are_damaged_are_named(tmp_path: Path) -> None:
    """The damaged file has the right length, so only reading shows the damage."""
    write_tensors(tmp_path, TENSORS)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    check_tensor_files(tmp_path)
    with pytest.raises(UnreadableError, match=f"the tensors in {tmp_path} cannot be read"):
        saved_tensors(tmp_path)


def test_an_error_of_writing_is_raised_unchanged(tmp_path: Path) -> None:
    """The file system's own error is raised, not torch's collection of errors."""
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(tmp_path, TENSORS)


def pickle_as_3_11_2(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes pickles as Python before 3.11.4, which writes members of enumerations by `getattr`."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name))
    )
    return "getattr"


def pickle_as_3_12(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes pickles as Python 3.12."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, protocol: (type(member), (member.value,)))
    return "_MEM_FORMAT_ENCODING"


def pickle_as_3_13(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes pickles as Python 3.13, whose paths belong to a module of their own."""
    monkeypatch.setitem(sys.modules, "pathlib._local", sys.modules["pathlib"])
    monkeypatch.setattr(type(Path()), "__module__", "pathlib._local")
    return "pathlib._local"


@pytest.mark.parametrize("python", [pickle_as_3_11_2, pickle_as_3_12, pickle_as_3_13])
def test_tensors_that_any_python_wrote_are_read(tmp_path: Path, python: Callable[[pytest.MonkeyPatch], str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        module = python(patch)
        write_tensors(tmp_path, TENSORS)
    assert module.encode() in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(saved_tensors(tmp_path)["model.weight"], TENSORS["model.weight"])


class Attribute:
    """An object whose pickle is a call of `getattr`."""

    def __init__(self, owner: object, name: str) -> None:
        self.getattr_call = getattr, (owner, name)

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return self.getattr_call


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.Size, "__base__"),
        (torch.Size, "TORCH_CONTIGUOUS_FORMAT"),
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, "name"),
    ],
)
def test_no_other_attribute_is_read(tmp_path: Path, owner: object, name: str) -> None:
    write_tensors(tmp_path, TENSORS)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(owner, name)))
    with pytest.raises(UnreadableError, match=r"\.metadata is damaged \(UnpicklingError\)"):
        saved_shapes(tmp_path)


class Hostile:
    """An object whose unpickling would create a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_an_entry_that_is_no_tensor_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    """torch reads such an entry as a pickle."""
    created = tmp_path / "made"
    save({"model.weight": Hostile(created)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for read in (saved_shapes, check_tensor_files, saved_tensors):
        with pytest.raises(UnreadableError, match="is damaged"):
            read(tmp_path)
    with pytest.raises(UnreadableError):
        read_tensors(tmp_path, {"model.weight": torch.zeros(1)})
    assert not created.exists()


def test_metadata_may_name_nothing_but_descriptions(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    for foreign in (os.getcwd, torch.nn.Linear, torch.load):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(foreign))
        with pytest.raises(UnreadableError, match=r"\.metadata is damaged \(UnpicklingError\)"):
            saved_shapes(tmp_path)


@pytest.mark.parametrize("name", ["adamw", "muon_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_are_made_early_are_those_of_the_first_step(name: str, dtype: torch.dtype) -> None:
    """A learner whose tensors were read before its first step makes the same steps."""
    results = []
    for early in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 6)).to(dtype)
        optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=1e-2, muon_lr=1e-2))
        before = learner_tensors(model, optimizer) if early else {}
        for _ in range(3):
            model(torch.arange(7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = learner_tensors(model, optimizer)
        assert all(after[key] is tensor for key, tensor in before.items()), "the tensors are live"
        assert set(step_counts(model, optimizer).values()) == {3}
        results.append(after)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(tensor, results[1][key]) for key, tensor in results[0].items())


def test_a_tied_weight_is_held_once_and_a_frozen_one_not_at_all() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 7)})
    model["head"].weight = model["embed"].weight
    model["head"].bias.requires_grad_(False)
    names = set(learner_tensors(model, make_optimizer(model, OptimizerConfig())))
    assert {name for name in names if name.startswith("model.")} == {
        *("model.embed.weight", "model.norm.weight", "model.norm.bias"),
        *("model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked"),
    }
    assert "optimizer.embed.weight.exp_avg" in names and "optimizer.head.bias.exp_avg" not in names


def test_counts_are_of_the_steps_that_a_parameter_has_taken() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    optimizer = make_optimizer(model, OptimizerConfig())
    model[1].weight.grad = torch.ones(2, 2)
    optimizer.step()
    counts = step_counts(model, optimizer)
    assert counts == {"0.weight": 0, "0.bias": 0, "1.weight": 1}
    other = make_optimizer(model, OptimizerConfig())
    load_step_counts(model, other, counts)
    assert step_counts(model, other) == counts


def test_the_first_tensor_that_differs_is_named() -> None:
    tensors = {"model.a": torch.zeros(2, 3), "optimizer.a.exp_avg": torch.zeros(2, 3)}
    check_same_tensors(tensors, {name: [2, 3] for name in tensors})
    with pytest.raises(ConfigError, match=r"optimizer\.a\.exp_avg is \[2, 4\] in the checkpoint and \[2, 3\]"):
        check_same_tensors(tensors, {"model.a": [2, 3], "optimizer.a.exp_avg": [2, 4]})
    with pytest.raises(ConfigError, match=r"optimizer\.a\.momentum_buffer is \[2\] in the checkpoint and None"):
        check_same_tensors(tensors, {name: [2, 3] for name in tensors} | {"optimizer.a.momentum_buffer": [2]})
