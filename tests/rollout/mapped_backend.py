"""Backend of vLLM's weight-transfer API over shared memory, for tests on a CPU.

It replaces NCCL, which needs GPUs. The control plane, vLLM's factories and the layer-wise reload are real.
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
from torchgrpo.rollout.weights import vllm_weight_transfer
from torchgrpo.rollout.weights.transports.shared_memory import MappedWeights, SharedMemory
from torchgrpo.rollout.weights.weight_update import LiveEngines, WeightUpdate

MAPPED_BACKEND = "mapped"


@dataclass
class MappedInitInfo(WeightTransferInitInfo):
    rank_offset: int


@dataclass
class MappedUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    handle: MappedWeights


class MappedWorker(WeightTransferEngine[MappedInitInfo, MappedUpdateInfo]):
    init_info_cls, update_info_cls = MappedInitInfo, MappedUpdateInfo

    def init_transfer_engine(self, init_info: MappedInitInfo) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MappedUpdateInfo) -> None:
        self.model.load_weights(update_info.handle.open())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


@dataclass
class MappedTrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = MAPPED_BACKEND


class MappedTrainer(TrainerWeightTransferEngine[MappedTrainerInit]):
    init_info_cls = MappedTrainerInit

    @classmethod
    def trainer_init(cls, init_info: MappedTrainerInit, *, client: Any, source: Any = None) -> "MappedTrainer":
        client.init_weight_transfer_engine({"rank_offset": 1})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        assert self.source is not None
        names = [meta.name for meta in self.source.metadata()]
        self.client.start_weight_update()
        memory = SharedMemory()
        handle = memory.write(WeightUpdate.from_pairs(list(self.source)))
        assert [entry.name for entry in handle.entries] == names
        self.client.update_weights({"names": names, "handle": handle})
        memory.close()
        self.client.finish_weight_update()


def register_backend() -> None:
    """Registers the backend in this process, if that was not done."""
    if MAPPED_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(MAPPED_BACKEND, MappedWorker)
        WeightTransferTrainerFactory.register_engine(MAPPED_BACKEND, MappedTrainer)
    vllm_weight_transfer.TRAINER_INIT[MAPPED_BACKEND] = lambda end: MappedTrainerInit(rank=0)


def start_engine(settings: VLLMSettings) -> VLLMEngine:
    """Starts an engine with the backend inside an actor."""
    register_backend()
    return VLLMEngine(settings)


class MappedTransfer(vllm_weight_transfer.VLLMWeightTransfer):
    """`VLLMWeightTransfer` that registers the backend first, for actors."""

    def push(self, weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        register_backend()
        super().push(weights, version, engines)
