"""Builds the engine or engine pool of a plan, and the weight pusher for it.

A single engine runs in this process. Several engines (or `ray.enabled=true`, or a `ray.address`) run as Ray actors in
a pool. Both implement the protocols of rollout/engines/interface.py. Engines start from the files of `model.name`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from config.schema.inference import ENGINES
from torchgrpo.plan.devices import TRANSPORTS
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.rollout.weights.weight_pusher import WeightPusher
from torchgrpo.training.adapters import linear_layer_names
from torchgrpo.training.learner import Learner
from torchgrpo.training.model_loading import make_skeleton

if TYPE_CHECKING:  # importing Ray is slow, and a single engine in this process does not need it
    from torchgrpo.cluster.runtime import DeviceSlot


def build_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
    adapter: AdapterShape | None = None,
) -> Engine:
    """Builds an engine in this process, or a pool of engines.

    Output of an engine during its start goes to `engine.log` in `run_dir`, if given.
    adapter: LoRA adapter that pushes will carry; None if pushes carry full weights or no learner exists.
    """
    factory: Callable[[], Engine] = ENGINES.load(plan.engine.backend)(config, tokenizer, plan, run_dir, adapter)
    if plan.devices.in_process:
        return factory()
    from torchgrpo.rollout.engines.engine_pool import RayEnginePool
    from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings

    inference = config.inference_model
    settings = EnginePoolSettings(
        start_timeout_s=inference.start_timeout_s,
        request_timeout_s=inference.request_timeout_s,
        # Twice the running completions: half of them wait in the engine, so that no row stays free.
        window=2 * plan.engine.max_num_seqs,
        num_cpus_per_engine=config.ray.num_cpus_per_engine,
        ray_cpus=plan.ray_cpus,
        address=config.ray.address,
    )
    return RayEnginePool(factory, engine_device_slots(plan), settings, TRANSPORTS.load(plan.transport)(plan))


def engine_device_slots(plan: Plan) -> "list[DeviceSlot]":
    """Returns the devices of each engine; on a cluster Ray chooses the GPUs."""
    from torchgrpo.cluster.runtime import DeviceSlot

    numbered = [(f"engine {index}", gpus) for index, gpus in enumerate(plan.devices.engines)]
    if plan.devices.on_cluster:
        return [DeviceSlot(name, num_gpus=len(gpus)) for name, gpus in numbered]
    return [DeviceSlot(name, plan.machine.physical_gpus(gpus)) for name, gpus in numbered]


def adapter_shape(config: Config) -> AdapterShape | None:
    """Returns the shape of the pushed adapter, or None for full weights."""
    if config.inference_model.lora == "merge":
        return None
    lora = config.train_model.lora
    return AdapterShape(lora.r, lora.alpha, linear_layer_names(make_skeleton(config.model)))


def build_weight_pusher(config: Config, learner: Learner, engine: Engine, plan: Plan) -> WeightPusher:
    train = config.train
    check = WeightCheck(plan.weight_check, engine, learner, train.weight_check_every, train.wait_timeout_s)
    return WeightPusher(learner, engine, check, plan.engine.sleeps)
