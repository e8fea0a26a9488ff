"""The device plan: no overlap, sharing only where it must, one message for every list that cannot work."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.inference import InferenceModelConfig
from config.schema.models import LoraConfig, RefModelConfig, TrainModelConfig
from config.schema.policy import PolicyConfig
from config.schema.ray import RayConfig
from torchgrpo.plan import machine as machine_module
from torchgrpo.plan.devices import DevicePlan, plan_devices, transport
from torchgrpo.plan.machine import gpu_memory_gib, visible_gpus


def plan(
    gpus: int,
    train: Any = 1,
    reference: Any = None,
    inference: Any = 1,
    tp: int = 1,
    colocate: bool = False,
    lora: bool = False,
    use_ray: bool = False,
    **context: bool,
) -> DevicePlan:
    """Plan the devices of components, each a number of them or a list.

    reference: None: not used. unset: where the plan likes.
    """

    def wish(value: Any) -> dict[str, Any]:
        if value in (None, "unset"):
            return {}
        return {"num_devices": value} if isinstance(value, int) else {"devices": value}

    count, listed = (inference, None) if isinstance(inference, int) else (1, inference)
    size = tp if isinstance(inference, int) else 1
    engines = InferenceModelConfig(
        num_devices=count, devices=listed, tensor_parallel_size=size, colocate=colocate
    )
    engines.tensor_parallel_size = tp
    config = Config(
        train_model=TrainModelConfig(**wish(train), lora=LoraConfig(enabled=lora)),
        ref_model=RefModelConfig(**wish(reference)),
        policy=PolicyConfig(kl_coef=0.0 if reference is None else 0.1),
        inference_model=engines,
        ray=RayConfig(enabled=use_ray),
    )
    return plan_devices(config, gpus, **context)


def way(found: DevicePlan) -> str:
    return transport(found, native=True)


def test_on_a_cpu_one_engine_is_in_process_and_two_are_actors() -> None:
    one, two = plan(0, reference="unset"), plan(0, inference=2)
    assert one.on_cpu
    assert one.in_process
    assert (way(one), one.reference_home, one.train_device) == ("in_process", "shared", "cpu")
    assert not two.in_process
    assert two.engines == ((), ())
    assert way(two) == "shared_memory"
    assert way(plan(0, use_ray=True)) == "shared_memory"
    assert plan(0, lora=True, reference="unset").reference_home == "base of the LoRA policy"
    assert plan(0).reference_home == "none"


def test_components_get_devices_of_their_own() -> None:
    found = plan(8, reference="unset", inference=4, tp=2)
    assert (found.train, found.ranks) == ((0,), 1)
    assert found.engines == ((1, 2), (3, 4))
    assert (found.reference_home, found.scorers) == ("own devices", 1)
    assert way(found) == "nccl"
    assert (found.train_device, found.reference) == ("cuda:0", (5,))
    assert found.notes == ()


def test_several_ranks_have_a_gpu_each_and_shard_the_reference_too() -> None:
    found = plan(8, train=2, reference="unset", inference=4, tp=2)
    assert (found.train, found.ranks, found.ranks_per_node) == ((0, 1), 2, 2)
    assert found.engines == ((2, 3), (4, 5))
    assert (found.reference, found.scorers, found.reference_home) == ((), 0, "learner ranks")
    assert way(found) == "nccl"
    for train in (1, 2):
        assert plan(8, train, "unset", lora=True).reference_home == "base of the LoRA policy"
    assert plan(8, train=[5, 1]).train == (5, 1)


@pytest.mark.parametrize("gpus", range(1, 9))
def test_nothing_overlaps_unless_it_takes_turns(gpus: int) -> None:
    wishes = itertools.product((1, 2, 3), (None, "unset", 1, 2), (1, 2, 4))
    for train, reference, inference in wishes:
        asked = reference if isinstance(reference, int) else 0
        if max(train, inference) > gpus or (asked and train + asked + inference > gpus):
            with pytest.raises(ConfigError, match=rf"this machine has {gpus} GPU\(s\)"):
                plan(gpus, train, reference, inference)
            continue
        found = plan(gpus, train, reference, inference)
        engines = [device for engine in found.engines for device in engine]
        used = [*found.train, *found.reference, *([] if found.colocated else engines)]
        assert len(set(used)) == len(used)
        assert max(used + engines) < gpus
        assert (len(found.train), len(engines)) == (train, inference)
        assert found.colocated == (train + inference > gpus)
        assert found.colocated == any("take turns" in note for note in found.notes)
        assert len(found.reference) == found.scorers >= asked
        if reference is not None:
            usual = "shared" if train == 1 else "learner ranks"
            assert found.reference_home == ("own devices" if found.reference else usual)


def test_one_gpu_is_shared_and_the_plan_says_so() -> None:
    full, lora = plan(1, reference="unset"), plan(1, reference="unset", lora=True)
    for found in (full, lora):
        assert found.colocated
        assert found.in_process
        assert found.train == (0,)
        assert found.engines == ((0,),)
        assert way(found) == "in_process"
        assert "take turns" in found.notes[0]
    assert full.reference_home == "shared"
    assert lora.reference_home == "base of the LoRA policy"


def test_one_gpu_cannot_do_both_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"1 GPU\(s\), but grpo_async.py works on both at once: use grpo.py"
    ):
        plan(1, overlapped=True)
    assert not plan(2, overlapped=True).colocated


def test_devices_by_hand() -> None:
    found = plan(8, train=[5], reference=[0], inference=[7, 2], tp=2)
    assert (found.train, found.reference, found.engines) == ((5,), (0,), ((7, 2),))
    mixed = plan(4, train=[0], inference=2, reference=1)
    assert (mixed.train, mixed.engines, mixed.reference) == ((0,), ((1,), (2,)), (3,))
    turns = plan(2, train=[1], inference=[1], colocate=True)
    assert (turns.train, turns.engines, turns.colocated) == ((1,), ((1,),), True)


def test_a_shared_gpu_in_two_processes_uses_ipc() -> None:
    assert way(plan(1, colocate=True, use_ray=True)) == "ipc"
    assert way(plan(2, train=2, inference=2, colocate=True)) == "shared_memory"


def test_on_a_cpu_ranks_are_processes_beside_the_engine() -> None:
    found = plan(0, train=2, reference="unset")
    assert (found.on_cpu, found.ranks, found.ranks_per_node) == (True, 2, 2)
    assert (found.in_process, way(found)) == (True, "in_process"), "the engine is in the driver"
    assert found.reference_home == "learner ranks"
    assert way(plan(0, train=2, inference=2)) == "shared_memory"


def test_ranks_on_the_nodes_of_a_cluster() -> None:
    def nodes(count: int, **where: Any) -> DevicePlan:
        asked = Config(train_model=TrainModelConfig(num_devices=8, num_nodes=count))
        return plan_devices(asked, **{"num_gpus": 4, "cluster": True} | where)

    found = nodes(2)
    assert (len(found.train), found.ranks, found.ranks_per_node) == (8, 8, 4)
    assert (found.on_cpu, found.colocated, way(found)) == (False, False, "nccl")
    assert nodes(4, num_gpus=0).ranks_per_node == 2
    with pytest.raises(ConfigError, match=r"train_model.num_nodes=2: several nodes are a Ray cluster"):
        nodes(2, cluster=False)


def test_on_a_cluster_ray_chooses_the_engines_devices() -> None:
    found = plan(1, inference=4, tp=2, cluster=True)
    assert found.train == (0,)
    assert found.engines == ((0, 1), (0, 1)), "each asks Ray for two GPUs"
    assert way(found) == "nccl"
    assert transport(found, native=False) == "object_store"
    assert not found.colocated
    assert way(plan(0, inference=2, cluster=True)) == "object_store"


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"train": [0, 0]}, r"train_model.devices=\[0, 0\]: a device is listed twice"),
        ({"train": [4]}, r"train_model.devices=\[4\]: \[4\] do not exist; this machine has GPUs 0 to 3"),
        ({"train": [-1]}, "all of them integers from 0"),
        ({"train": ["0", 1]}, "all of them integers from 0"),
        ({"train": [0, True]}, "all of them integers from 0"),
        ({"train": []}, "give at least one device index"),
        ({"train": "0,1"}, "give a list of device indices"),
        (
            {"train": [0], "inference": [0, 1]},
            r"train_model.devices=\[0\] and inference_model.devices=\[0, 1\] share \[0\]: "
            "give each its own, or set inference_model.colocate=true",
        ),
        ({"train": [0], "reference": [0]}, r"share \[0\]: give each its own$"),
        ({"train": [0], "reference": [1], "inference": [1], "colocate": True}, r"share \[1\]"),
        ({"inference": [0, 1, 2], "tp": 2}, "tensor_parallel_size=2 does not divide the 3 devices"),
        ({"train": 0}, "train_model.num_devices=0: must be at least 1"),
        ({"train": 5}, r"train_model.num_devices=5, .*this machine has 4 GPU\(s\)"),
        (
            {"train": 1, "inference": [0, 1], "gpus": 2, "colocate": True},
            r"train_model.num_devices=1: only 0 GPU\(s\) are left",
        ),
        ({"train": [0, 1], "cluster": True}, "the 2 learner ranks are on a Ray cluster, which chooses"),
    ],
)
def test_lists_that_cannot_work(wishes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(**{"gpus": 4} | wishes)


def test_lists_and_counts_that_disagree() -> None:
    with pytest.raises(
        ConfigError, match=r"has 2 entries but train_model.num_devices=3: give one of the two"
    ):
        plan_devices(Config(train_model=TrainModelConfig(num_devices=3, devices=[0, 1])), 4)


def test_gpus_asked_for_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"inference_model.devices=\[2\]: there is no GPU here"):
        plan(0, inference=[2])
    offloaded = Config(train_model=TrainModelConfig(offload="all"))
    with pytest.raises(ConfigError, match=r"train_model\.offload=all: there is no GPU here"):
        plan_devices(offloaded, 0)
    assert "does nothing on a CPU" in plan(0, colocate=True).notes[0]


@pytest.fixture
def six_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the driver and its tool tell of them."""
    for number in range(6):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(machine_module, "_DRIVER", tmp_path / "gpus")
    rows = [f"GPU {number}: H200 (UUID: GPU-{number}f2a-77)" for number in range(6)]
    rows.insert(1, "  MIG 1g.18gb Device 0: (UUID: MIG-31)")
    (tmp_path / "rows").write_text("\n".join(rows) + "\n")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path / 'rows'}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("six_gpus")
def test_gpus_are_found_without_touching_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert visible_gpus() == ("0", "1", "2", "3", "4", "5")
    for told, names in (
        ("2,5", ("2", "5")),
        ("GPU-1f2a, GPU-4f", ("GPU-1f2a", "GPU-4f")),
        ("MIG-31", ("MIG-31",)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("3,-1,1", ("3",)),
        ("3,", ("3",)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
        assert visible_gpus() == names, told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-9")
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ("GPU-9",), "nothing tells which there are"


@pytest.mark.usefixtures("six_gpus")
@pytest.mark.parametrize(
    "told",
    ["7", "0,7", "0,0", "1,01", "abc", "0,abc", "GPU-9", "GPU-", "0,GPU-1f2a", "GPU-1f,GPU-1f2a", "MIG-4"],
)
def test_gpus_that_cuda_would_not_show_are_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """CUDA shows those before the first that it does not know, and none where one is named twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    with pytest.raises(
        ConfigError, match=f"CUDA_VISIBLE_DEVICES={told}: name GPUs .* from 0 to 5 .*unset it"
    ):
        visible_gpus()


@pytest.mark.parametrize("told", ["", "-1", "0", "7", "0,0", "abc", "NoDevFiles", "GPU-9"])
def test_without_a_gpu_none_is_seen_whatever_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str
) -> None:
    monkeypatch.setattr(machine_module, "_DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert visible_gpus() == ()


def test_the_drivers_tool_is_asked_when_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine_module, "_DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ()
    assert gpu_memory_gib(()) is None
    tool = tmp_path / "nvidia-smi"
    rows = "echo 0, GPU-8f2a, 81920; echo 1, GPU-77, 40960; echo 2, GPU-31, 16384"
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in --list-gpus) echo GPU 0; echo GPU 1;; *reserved) exit 2;; *) {rows};; esac\n'
    )
    tool.chmod(0o755)
    assert visible_gpus() == ("0", "1")
    assert gpu_memory_gib(("0", "1")) == 40.0, "the GPU that is not visible is smaller"
    assert gpu_memory_gib(("GPU-8f",)) == 80.0


def test_what_the_driver_keeps_is_not_memory_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an H200 nvidia-smi tells 143771 MiB, CUDA 139.8 GiB: 616 MiB less. Without the number nothing is kept."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-8f2a, 143771, 616\necho '1, GPU-77, 163840, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert gpu_memory_gib(("0",)) == pytest.approx(139.8, abs=0.01)
    assert gpu_memory_gib(("1",)) == 160.0


def test_devices_are_named_as_the_environment_names_them() -> None:
    from torchgrpo.plan.machine import Machine

    machine = Machine(2, 80.0, 64.0, 100.0, None, gpu_ids=("4", "GPU-77"))
    assert machine.physical((1, 0)) == ("GPU-77", "4")
