"""From the config and the plan to engines, and to the weights' way to them: what is built, and from what.

One engine lives in this process, several (or `ray.enabled=true`, or a `ray.address`) as Ray actors in a pool;
both speak the protocols of rollout/engines/interface.py, so nothing above knows which it is. Engines are started from
the files of `model.name` alone.
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
from torchgrpo.rollout.weights.push import Weights
from torchgrpo.rollout.weights.weight_check import WeightCheck
from torchgrpo.training.adapters import linear_names
from torchgrpo.training.learner import Learner
from torchgrpo.training.model_loading import skeleton

if TYPE_CHECKING:  # Ray costs a second, which one engine in this process need not wait for
    from torchgrpo.cluster.runtime import Place


def build_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
    adapter: AdapterShape | None = None,
) -> Engine:
    """One engine or a pool. What an engine prints while it starts goes to `engine.log` in `run_dir`, if given.

    adapter: that pushes will carry; None where they carry full weights, or where nobody trains.
    """
    factory: Callable[[], Engine] = ENGINES.load(plan.engine.backend)(
        config, tokenizer, plan, run_dir, adapter
    )
    if plan.devices.in_process:
        return factory()
    from torchgrpo.rollout.engines.pool import RayPool
    from torchgrpo.rollout.engines.supervisor import PoolSettings

    inference = config.inference_model
    settings = PoolSettings(
        start_timeout_s=inference.start_timeout_s,
        request_timeout_s=inference.request_timeout_s,
        # Half of it waits in the engine, so that no place there stays empty.
        window=2 * plan.engine.max_num_seqs,
        num_cpus_per_engine=config.ray.num_cpus_per_engine,
        ray_cpus=plan.ray_cpus,
        address=config.ray.address,
    )
    return RayPool(factory, engine_places(plan), settings, TRANSPORTS.load(plan.transport)(plan))


def engine_places(plan: Plan) -> "list[Place]":
    """Where the engines of a pool live; on a cluster Ray chooses their GPUs."""
    from torchgrpo.cluster.runtime import Place

    numbered = [(f"engine {index}", gpus) for index, gpus in enumerate(plan.devices.engines)]
    if plan.devices.on_cluster:
        return [Place(name, num_gpus=len(gpus)) for name, gpus in numbered]
    return [Place(name, plan.machine.physical(gpus)) for name, gpus in numbered]


def adapter_shape(config: Config) -> AdapterShape | None:
    """The adapter that pushes will carry; None where they carry full weights."""
    if config.inference_model.lora == "merge":
        return None
    lora = config.train_model.lora
    return AdapterShape(lora.r, lora.alpha, linear_names(skeleton(config.model)))


def build_weights(config: Config, learner: Learner, engine: Engine, plan: Plan) -> Weights:
    train = config.train
    check = WeightCheck(plan.weight_check, engine, learner, train.weight_check_every, train.wait_timeout_s)
    return Weights(learner, engine, check, plan.engine.sleeps)
