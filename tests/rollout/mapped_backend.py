"""A backend of vLLM's native API whose data plane is our shared memory, so that it runs on a CPU.

In the place of NCCL, which needs GPUs; the control plane, vLLM's factories and the layer-wise reload are the real ones.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights import vllm_transfer
from torchgrpo.rollout.weights.outgoing import Engines, Outgoing
from torchgrpo.rollout.weights.transports.shared_memory import MappedWeights, SharedMemory

MAPPED = "mapped"


@dataclass
class Init(WeightTransferInitInfo):
    rank_offset: int


@dataclass
class Update(WeightTransferUpdateInfo):
    names: list[str]
    handle: MappedWeights


class Worker(WeightTransferEngine[Init, Update]):
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        self.model.load_weights(update_info.handle.open())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


@dataclass
class TrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = MAPPED


class Trainer(TrainerWeightTransferEngine[TrainerInit]):
    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> "Trainer":
        client.init_weight_transfer_engine({"rank_offset": 1})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        assert self.source is not None
        named = [meta.name for meta in self.source.metadata()]
        self.client.start_weight_update()
        memory = SharedMemory()
        handle = memory.write(Outgoing.of(list(self.source)))
        assert [entry.name for entry in handle.entries] == named
        self.client.update_weights({"names": named, "handle": handle})
        memory.close()
        self.client.finish_weight_update()


def register() -> None:
    """In this process, once."""
    if MAPPED not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(MAPPED, Worker)
        WeightTransferTrainerFactory.register_engine(MAPPED, Trainer)
    vllm_transfer.INIT[MAPPED] = lambda end: TrainerInit(rank=0)


def start_engine(settings: VLLMSettings) -> VLLMEngine:
    """Inside an actor."""
    register()
    return VLLMEngine(settings)


class MappedTransfer(vllm_transfer.NativeTransfer):
    """`NativeTransfer` for a process that has not registered the backend, as an actor has not."""

    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        register()
        super().push(weights, version, engines)
