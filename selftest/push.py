"""A native push whose receiver only keeps the bytes: what leaves the learner, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rollout.weights.outgoing import Outgoing
from selftest.check import Bench

CYCLES = 2_000_000_000  # of the GPU's clock: about a second


class Kept:
    """In the place of vLLM's NCCL communicator: what is broadcast is copied on the stream that sends it."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        pass


class NoEngines:
    """Engines of a push that are never asked for anything."""

    members = (0,)

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        return []

    def stacks(self) -> str:
        return ""


def race(bench: Bench) -> str:
    """A push that begins while an update of the weights is still under way on the GPU sends what the update leaves."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import TrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from rollout.weights.transfer import INIT, NativeTransfer

    kept: Any = Kept()

    @dataclass
    class Init(TrainerInitInfo):
        backend: ClassVar[str] = "kept"

    class Trainer(NCCLTrainerWeightTransferEngine):
        init_info_cls: Any = Init

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> "Trainer":
            trainer = cls(client=client, source=source)
            trainer.model_update_group = kept
            return trainer

    WeightTransferTrainerFactory.register_engine("kept", Trainer)
    INIT["kept"] = lambda end: Init(rank=0)
    weight = torch.zeros(1024, 1024, device=bench.device)
    transfer = NativeTransfer("kept", timeout=30)
    transfer.push(Outgoing.of([("weight", weight)]), 0, NoEngines())
    for value in (1.0, 2.0):
        torch.cuda._sleep(CYCLES)
        weight.fill_(value)
        transfer.push(Outgoing.of([("weight", weight)]), int(value), NoEngines())
        arrived = kept.sent[-1].cpu().view(torch.float32)
        assert (arrived == value).all(), f"the push sent {arrived.unique().tolist()} and not {value}"
    transfer.close()
    return "the update's result"
