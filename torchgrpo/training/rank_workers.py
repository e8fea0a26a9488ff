"""Starts a learner's ranks, and implements `Workers` by calls to them.

Each rank holds a shard of every parameter. Each group of `train_model.context_parallel` ranks works on a share of
every batch: a worker in the sense of `Workers` is such a group, whose first rank answers.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from config.schema.config import Config
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.plan.plan import Plan
from torchgrpo.training.rank_actor import RankActor
from torchgrpo.training.ranks import LOADING_PATIENCE, Ranks, RankSettings
from torchgrpo.training.tensor_stream import RankTensor, TensorStream
from torchgrpo.training.worker import MicrobatchTask, WorkerOutput


def start_ranks(config: Config, plan: Plan) -> Ranks:
    """Starts the ranks of a plan and waits until they have joined.

    They hold no model yet.

    Raises:
        ConfigError: there is no room for the ranks.
        RankLost: a rank does not start; every started rank has been ended.
    """
    ranks = Ranks(rank_slots(plan), rank_settings(config, plan), RankActor)
    ranks.start()
    return ranks


def rank_slots(plan: Plan) -> list[DeviceSlot]:
    """Returns the device slot of each rank; on a cluster Ray chooses the GPU."""
    devices = plan.devices
    names = [f"learner rank {number}" for number in range(devices.ranks)]
    if devices.on_cpu:
        return [DeviceSlot(name) for name in names]
    if devices.on_cluster:
        return [DeviceSlot(name, num_gpus=1) for name in names]
    return [
        DeviceSlot(name, plan.machine.physical_gpus((gpu,))) for name, gpu in zip(names, devices.train, strict=True)
    ]


def rank_settings(config: Config, plan: Plan) -> RankSettings:
    """Returns the settings by which the ranks of a plan are started and watched."""
    return RankSettings(
        nodes=config.train_model.num_nodes,
        ray_cpus=plan.ray_cpus,
        on_gpu=not plan.devices.on_cpu,
        timeout_s=config.train.wait_timeout_s,
        address=config.ray.address,
        settings_text=f"train_model.num_devices={plan.devices.ranks}, "
        f"train_model.num_nodes={config.train_model.num_nodes}",
    )


class RankWorkers:
    """`Workers` whose calls run on rank processes; this process holds no model.

    Args:
        ranks: ranks that have joined; they are closed with these workers.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: Config, plan: Plan, ranks: Ranks) -> None:
        self.ranks: Ranks | None = ranks
        self._ranks = ranks
        ranks.wait_for_answers(ranks.begin_same_call("build", config, plan), "the model", patience=LOADING_PATIENCE)
        self.count = config.train_model.microbatch_groups
        self._group_size = config.train_model.context_parallel
        self.has_reference = plan.reference.home not in ("none", "own devices")
        self.packs = bool(self.call_all("packs"))
        self.vocab_size = int(self.call_all("vocab_size"))
        self._stream = TensorStream(ranks)

    def call_all(self, method: str, *arguments: Any) -> Any:
        return self._ranks.wait_for_answers(self._ranks.begin_same_call(method, *arguments), method)[0]

    def call_each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        calls = self._ranks.begin_call(method, self._arguments(shares))
        answers = self._ranks.wait_for_answers(calls, method, patience=1 + max(map(len, shares)))
        return answers[:: self._group_size]

    def _arguments(self, shares: Sequence[Sequence[Any]]) -> list[tuple[Sequence[Any]]]:
        """Returns the arguments of every rank; the ranks of a group get the same share."""
        return [(share,) for share in shares for _ in range(self._group_size)]

    def gradients(self, rounds: Iterator[list[MicrobatchTask]]) -> list[WorkerOutput]:
        step_calls = self._ranks.begin_same_call("begin_step")
        calls = [self._ranks.begin_call("gradients", self._arguments([[task] for task in tasks])) for tasks in rounds]
        output_calls = self._ranks.begin_same_call("take_output")
        self._ranks.wait_for_answers(step_calls, "begin_step")
        for each in calls:
            self._ranks.wait_for_answers(each, "gradients", patience=1 + len(calls))
        outputs = self._ranks.wait_for_answers(output_calls, "gradients", patience=1 + len(calls))
        return outputs[:: self._group_size]

    def publish(self) -> list[RankTensor]:
        """Returns the tensors of a push, each gathered from its shards when read."""
        self._stream.discard_blocks()
        return self._stream.tensors

    def save(self, folder: Path) -> Callable[[], None]:
        """Begins to write a checkpoint; every rank writes its shards."""
        self.call_all("begin_save", folder)
        calls = self._ranks.begin_same_call("end_save")

        def wait() -> None:
            self._ranks.wait_for_answers(calls, f"the checkpoint shards in {folder}")

        return wait

    def close(self) -> None:
        self._ranks.close()
