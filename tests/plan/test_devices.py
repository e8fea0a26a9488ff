"""Tests the device plan: devices of components, sharing, and messages about wrong lists."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.inference import InferenceModelConfig
from config.schema.machine import MachineConfig
from config.schema.models import LoraConfig, RefModelConfig, TrainModelConfig
from config.schema.policy import PolicyConfig
from config.schema.ray import RayConfig
from torchgrpo.plan import machine as machine_module
from torchgrpo.plan.devices import DevicePlan, choose_transport, plan_devices
from torchgrpo.plan.machine import gpu_memory_gib, visible_gpus


def plan_of(
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
    """Plans the devices of components, each given as a number or as a list.

    reference: None for no reference; "unset" lets the plan choose its location.
    """

    def device_fields(value: Any) -> dict[str, Any]:
        if value in (None, "unset"):
            return {}
        return {"num_devices": value} if isinstance(value, int) else {"devices": value}

    count, listed = (inference, None) if isinstance(inference, int) else (1, inference)
    size = tp if isinstance(inference, int) else 1
    engines = InferenceModelConfig(num_devices=count, devices=listed, tensor_parallel_size=size, colocate=colocate)
    engines.tensor_parallel_size = tp
    config = Config(
        train_model=TrainModelConfig(**device_fields(train), lora=LoraConfig(enabled=lora)),
        ref_model=RefModelConfig(**device_fields(reference)),
        policy=PolicyConfig(kl_coef=0.0 if reference is None else 0.1),
        inference_model=engines,
        ray=RayConfig(enabled=use_ray),
    )
    return plan_devices(config, gpus, **context)


def native_transport(devices: DevicePlan) -> str:
    return choose_transport(devices, has_native_transfer=True)


def test_on_a_cpu_one_engine_is_in_process_and_two_are_actors() -> None:
    one, two = plan_of(0, reference="unset"), plan_of(0, inference=2)
    assert one.on_cpu
    assert one.in_process
    assert (native_transport(one), one.reference_home, one.train_device) == ("in_process", "shared", "cpu")
    assert not two.in_process
    assert two.engines == ((), ())
    assert native_transport(two) == "shared_memory"
    assert native_transport(plan_of(0, use_ray=True)) == "shared_memory"
    assert plan_of(0, lora=True, reference="unset").reference_home == "base of the LoRA policy"
    assert plan_of(0).reference_home == "none"


def test_components_get_devices_of_their_own() -> None:
    devices = plan_of(8, reference="unset", inference=4, tp=2)
    assert (devices.train, devices.ranks) == ((0,), 1)
    assert devices.engines == ((1, 2), (3, 4))
    assert (devices.reference_home, devices.scorers) == ("own devices", 1)
    assert native_transport(devices) == "nccl"
    assert (devices.train_device, devices.reference) == ("cuda:0", (5,))
    assert devices.notes == ()


def test_several_ranks_have_a_gpu_each_and_shard_the_reference_too() -> None:
    devices = plan_of(8, train=2, reference="unset", inference=4, tp=2)
    assert (devices.train, devices.ranks, devices.ranks_per_node) == ((0, 1), 2, 2)
    assert devices.engines == ((2, 3), (4, 5))
    assert (devices.reference, devices.scorers, devices.reference_home) == ((), 0, "learner ranks")
    assert native_transport(devices) == "nccl"
    for train in (1, 2):
        assert plan_of(8, train, "unset", lora=True).reference_home == "base of the LoRA policy"
    assert plan_of(8, train=[5, 1]).train == (5, 1)


@pytest.mark.parametrize("gpus", range(1, 9))
def test_nothing_overlaps_unless_it_takes_turns(gpus: int) -> None:
    requests = itertools.product((1, 2, 3), (None, "unset", 1, 2), (1, 2, 4))
    for train, reference, inference in requests:
        requested = reference if isinstance(reference, int) else 0
        if max(train, inference) > gpus or (requested and train + requested + inference > gpus):
            with pytest.raises(ConfigError, match=rf"this machine has {gpus} GPU\(s\)"):
                plan_of(gpus, train, reference, inference)
            continue
        devices = plan_of(gpus, train, reference, inference)
        engines = [device for engine in devices.engines for device in engine]
        used = [*devices.train, *devices.reference, *([] if devices.colocated else engines)]
        assert len(set(used)) == len(used)
        assert max(used + engines) < gpus
        assert (len(devices.train), len(engines)) == (train, inference)
        assert devices.colocated == (train + inference > gpus)
        assert devices.colocated == any("take turns" in note for note in devices.notes)
        assert len(devices.reference) == devices.scorers >= requested
        if reference is not None:
            usual = "shared" if train == 1 else "learner ranks"
            assert devices.reference_home == ("own devices" if devices.reference else usual)


def test_one_gpu_is_shared_and_the_plan_says_so() -> None:
    full, lora = plan_of(1, reference="unset"), plan_of(1, reference="unset", lora=True)
    for devices in (full, lora):
        assert devices.colocated
        assert devices.in_process
        assert devices.train == (0,)
        assert devices.engines == ((0,),)
        assert native_transport(devices) == "in_process"
        assert "take turns" in devices.notes[0]
    assert full.reference_home == "shared"
    assert lora.reference_home == "base of the LoRA policy"


def test_one_gpu_cannot_do_both_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"1 GPU\(s\), but grpo_async.py runs learner and engines at the same time: use grpo.py"
    ):
        plan_of(1, is_overlapped=True)
    assert not plan_of(2, is_overlapped=True).colocated


def test_devices_by_hand() -> None:
    devices = plan_of(8, train=[5], reference=[0], inference=[7, 2], tp=2)
    assert (devices.train, devices.reference, devices.engines) == ((5,), (0,), ((7, 2),))
    mixed = plan_of(4, train=[0], inference=2, reference=1)
    assert (mixed.train, mixed.engines, mixed.reference) == ((0,), ((1,), (2,)), (3,))
    turns = plan_of(2, train=[1], inference=[1], colocate=True)
    assert (turns.train, turns.engines, turns.colocated) == ((1,), ((1,),), True)


def test_a_shared_gpu_in_two_processes_uses_ipc() -> None:
    assert native_transport(plan_of(1, colocate=True, use_ray=True)) == "ipc"
    assert native_transport(plan_of(2, train=2, inference=2, colocate=True)) == "shared_memory"


def test_on_a_cpu_ranks_are_processes_beside_the_engine() -> None:
    devices = plan_of(0, train=2, reference="unset")
    assert (devices.on_cpu, devices.ranks, devices.ranks_per_node) == (True, 2, 2)
    assert (devices.in_process, native_transport(devices)) == (True, "in_process"), "the engine is in the main process"
    assert devices.reference_home == "learner ranks"
    assert native_transport(plan_of(0, train=2, inference=2)) == "shared_memory"


def test_ranks_on_the_nodes_of_a_cluster() -> None:
    def nodes(count: int, **arguments: Any) -> DevicePlan:
        requested = Config(train_model=TrainModelConfig(num_devices=8, num_nodes=count))
        return plan_devices(requested, **{"num_gpus": 4, "on_cluster": True} | arguments)

    devices = nodes(2)
    assert (len(devices.train), devices.ranks, devices.ranks_per_node) == (8, 8, 4)
    assert (devices.on_cpu, devices.colocated, native_transport(devices)) == (False, False, "nccl")
    assert nodes(4, num_gpus=0).ranks_per_node == 2
    with pytest.raises(ConfigError, match=r"train_model.num_nodes=2: several nodes need a Ray cluster"):
        nodes(2, on_cluster=False)


def test_a_plan_proposes_nodes_for_learner_and_engines() -> None:
    requested = Config(
        train_model=TrainModelConfig(num_devices=8, num_nodes=2),
        inference_model=InferenceModelConfig(num_devices=5),
        machine=MachineConfig(gpus=4),
    )
    with pytest.raises(ConfigError, match=r"a Ray cluster; set machine\.nodes=4, or set train_model\.num_nodes=1"):
        plan_devices(requested, num_gpus=4)


def test_on_a_cluster_ray_chooses_the_engines_devices() -> None:
    devices = plan_of(1, inference=4, tp=2, on_cluster=True)
    assert devices.train == (0,)
    assert devices.engines == ((0, 1), (0, 1)), "each requests two GPUs from Ray"
    assert native_transport(devices) == "nccl"
    assert choose_transport(devices, has_native_transfer=False) == "object_store"
    assert not devices.colocated
    assert native_transport(plan_of(0, inference=2, on_cluster=True)) == "object_store"


@pytest.mark.parametrize(
    ("requests", "message"),
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
        ({"train": [0, 1], "on_cluster": True}, "the 2 learner ranks are on a Ray cluster, which chooses"),
    ],
)
def test_lists_that_cannot_work(requests: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**{"gpus": 4} | requests)


def test_lists_and_counts_that_disagree() -> None:
    with pytest.raises(ConfigError, match=r"has 2 entries but train_model.num_devices=3: set only one of the two keys"):
        plan_devices(Config(train_model=TrainModelConfig(num_devices=3, devices=[0, 1])), 4)


def test_gpus_asked_for_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"inference_model.devices=\[2\]: this machine has no GPU"):
        plan_of(0, inference=[2])
    offloaded = Config(train_model=TrainModelConfig(offload="all"))
    with pytest.raises(ConfigError, match=r"train_model\.offload=all: this machine has no GPU"):
        plan_devices(offloaded, 0)
    assert "has no effect on a CPU" in plan_of(0, colocate=True).notes[0]


@pytest.fixture
def six_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulates six GPUs in the driver's folder and in nvidia-smi."""
    for number in range(6):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(machine_module, "_DRIVER", tmp_path / "gpus")
    tool_lines = [f"GPU {number}: H200 (UUID: GPU-{number}f2a-77)" for number in range(6)]
    tool_lines.insert(1, "  MIG 1g.18gb Device 0: (UUID: MIG-31)")
    (tmp_path / "rows").write_text("\n".join(tool_lines) + "\n")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path / 'rows'}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("six_gpus")
def test_gpus_are_found_without_touching_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert visible_gpus() == ("0", "1", "2", "3", "4", "5")
    for variable, names in (
        ("2,5", ("2", "5")),
        ("GPU-1f2a, GPU-4f", ("GPU-1f2a", "GPU-4f")),
        ("MIG-31", ("MIG-31",)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("3,-1,1", ("3",)),
        ("3,", ("3",)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert visible_gpus() == names, variable
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-9")
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ("GPU-9",), "without nvidia-smi the name is not checked"


@pytest.mark.usefixtures("six_gpus")
@pytest.mark.parametrize(
    "variable", ["7", "0,7", "0,0", "1,01", "abc", "0,abc", "GPU-9", "GPU-", "0,GPU-1f2a", "GPU-1f,GPU-1f2a", "MIG-4"]
)
def test_gpus_that_cuda_would_hide_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """CUDA hides all GPUs after an unknown name, or all if names repeat."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={variable}: name GPUs .* from 0 to 5 .*unset it"):
        visible_gpus()


@pytest.mark.parametrize("variable", ["", "-1", "0", "7", "0,0", "abc", "NoDevFiles", "GPU-9"])
def test_without_a_gpu_no_gpu_is_visible_for_any_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setattr(machine_module, "_DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == ()


def test_nvidia_smi_is_used_if_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine_module, "_DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ()
    assert gpu_memory_gib(()) is None
    tool = tmp_path / "nvidia-smi"
    tool_lines = "echo 0, GPU-8f2a, 81920; echo 1, GPU-77, 40960; echo 2, GPU-31, 16384"
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in --list-gpus) echo GPU 0; echo GPU 1;; *reserved) exit 2;; *) {tool_lines};; esac\n'
    )
    tool.chmod(0o755)
    assert visible_gpus() == ("0", "1")
    assert gpu_memory_gib(("0", "1")) == 40.0, "the GPU that is not visible is smaller"
    assert gpu_memory_gib(("GPU-8f",)) == 80.0


def test_memory_reserved_by_the_driver_is_subtracted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvidia-smi reports 143771 MiB for an H200, CUDA 616 MiB less.

    Without a reported number nothing is subtracted.
    """
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-8f2a, 143771, 616\necho '1, GPU-77, 163840, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert gpu_memory_gib(("0",)) == pytest.approx(139.8, abs=0.01)
    assert gpu_memory_gib(("1",)) == 160.0


def test_devices_have_the_names_of_the_environment_variable() -> None:
    from torchgrpo.plan.machine import Machine

    machine = Machine(2, 80.0, 64.0, 100.0, None, gpu_ids=("4", "GPU-77"))
    assert machine.physical_gpus((1, 0)) == ("GPU-77", "4")
