"""The smallest set of changes that makes a plan work.

Every key that could help is tried with its values from mild to strong. Sets of one key are tried first, then of
two, three and four, each at its strongest values; in the first set that works every value is then made as mild as it
can be. Keys that cost the run least come first, so that among sets of one size the mildest wins.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from operator import attrgetter
from typing import Any

from config.schema.checks import check
from config.schema.errors import ConfigError
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.microbatches import chunk_size
from torchgrpo.plan.plan import Plan, gpus_used
from torchgrpo.plan.problems import problems


@dataclass(frozen=True)
class Setting:
    """One `key=value` for the command line."""

    key: str
    value: Any

    def __str__(self) -> str:
        plain = self.value is None or isinstance(self.value, bool)
        value = json.dumps(self.value) if plain else self.value
        return f"{self.key}={value}"


def remedy(plan: Plan, machine: Machine) -> tuple[Setting, ...] | None:
    """The settings that make the plan's configuration work on `machine`; None where no set of up to four does.

    plan: of that machine, or of the nearest one that has the devices it asks for. Empty: it works as it is.
    """

    def works(settings: Sequence[Setting]) -> bool:
        changed = copy.deepcopy(plan.config)
        try:
            for setting in settings:
                section, _, name = setting.key.rpartition(".")
                setattr(attrgetter(section)(changed), name, setting.value)
                replace(attrgetter(section)(changed))  # a section checks itself when it is made
            check(changed)
            return not problems(make_plan(changed, plan.overlapped, machine, plan.folder))
        except ConfigError:
            return False

    if works(()):
        return ()
    changes = [(key, values) for key, values in _changes(plan, machine) if values]
    for chosen in chain.from_iterable(combinations(changes, size) for size in (1, 2, 3, 4)):
        settings = [Setting(key, values[-1]) for key, values in chosen]
        if not works(settings):
            continue
        for place, (key, values) in enumerate(chosen):
            for value in values:
                tried = [*settings[:place], Setting(key, value), *settings[place + 1 :]]
                if works(tried):
                    settings = tried
                    break
        return tuple(settings)
    return None


def _changes(plan: Plan, machine: Machine) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Keys that could help, as the command line writes them, the cheapest first; each with its values from mild to
    strong, none of them set already. Without values a key cannot help here."""
    config = plan.config
    train, inference = config.train, config.inference_model
    gpus = machine.num_gpus if not plan.devices.on_cpu else 0
    kept = train.keep_checkpoints or 4
    yield "train.keep_checkpoints", tuple(fewer for fewer in (3, 2, 1) if fewer < kept)
    yield "train.async_checkpoint", (False,) if train.async_checkpoint else ()
    completions, steps = config.optim_batch_size, train.gradient_accumulation_steps
    more_steps = (count for count in range(steps + 1, completions + 1) if completions % count == 0)
    yield "train.gradient_accumulation_steps", tuple(more_steps)
    rows = 0 if plan.shape is None else chunk_size(config, plan.shape, plan.devices.on_cpu)
    yield "train.log_prob_chunk_size", tuple(fewer for fewer in (1024, 512, 256, 128) if fewer < rows)
    yield "train.gradient_checkpointing", () if train.gradient_checkpointing else (True,)
    shares = tuple(share for share in (0.9, 0.95) if share > inference.gpu_memory_utilization)
    yield "inference_model.gpu_memory_utilization", shares
    present = config.train_model.num_devices
    counts = range(gpus, 0, -1) if present > gpus else range(present + 1, gpus + 1)
    yield "train_model.num_devices", tuple(counts)
    nodes, ranks = config.train_model.num_nodes, config.train_model.ranks
    fewer_nodes = tuple(count for count in range(nodes - 1, 0, -1) if ranks % count == 0)
    yield "train_model.num_nodes", fewer_nodes
    for section in ("train_model", "ref_model", "inference_model"):
        by_hand = isinstance(attrgetter(section)(config).devices, list | tuple)
        yield f"{section}.devices", (None,) if by_hand else ()
    split = inference.tensor_parallel_size  # one engine less at a time
    fewer = () if inference.devices is not None else tuple(range(inference.num_devices - split, 0, -split))
    yield "inference_model.num_devices", fewer
    yield "ref_model.shard_size", (None,) if config.ref_model.shard_size else ()
    scorers, there = plan.reference.ranks, gpus * machine.nodes
    others: tuple[int | None, ...] = ()
    if scorers and there and config.ref_model.devices is None:
        left = there - gpus_used(plan)  # with some more scorers, else fewer, at last none
        others = tuple(range(scorers + 1, scorers + left + 1))
        if left < 0:
            others = (*range(scorers - 1, 0, -1), None)
    yield "ref_model.num_devices", others
    halves = scorers > 0 and config.reference_model.dtype == "float32"
    yield "ref_model.dtype", ("bfloat16",) if halves else ()
    half_shards = config.train.mixed_precision == "fp16" and plan.reference.shard_size > 1
    yield "train.mixed_precision", ("bf16",) if half_shards else ()
    on_gpu = plan.engine.backend == "vllm" and not plan.devices.on_cpu
    in_eight_bits = on_gpu and inference.quantization is None
    yield "inference_model.quantization", ("fp8",) if in_eight_bits else ()
    yield "policy.kl_coef", () if config.policy.kl_coef == 0 else (0.0,)
    yield "train_model.lora.quantization", ("none",) if config.train_model.lora.quantized else ()
    yield "train_model.lora.enabled", () if config.train_model.lora.enabled else (True,)
    yield "model.dtype", () if config.model.dtype == "bfloat16" else ("bfloat16",)
    shorter = tuple(inference.max_tokens // part for part in (2, 4, 8))
    yield "inference_model.max_tokens", tuple(length for length in shorter if length >= 128)
