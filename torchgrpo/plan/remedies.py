"""Searches for the fewest and mildest setting changes that make a plan work.

Each candidate key has values from mild to strong. The search tries sets of one key, then of two, three and four keys,
each with the strongest values. In the first set that works it chooses the mildest values that still work. Keys with the
smallest cost for the run come first, so that the mildest of the sets of one size is found. The mildest values are
sought from the last key to the first.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from operator import attrgetter
from typing import Any

from config.schema.checks import check_config
from config.schema.errors import ConfigError
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.microbatch_sizes import chunk_size, uses_packing
from torchgrpo.plan.plan import Plan, count_used_gpus
from torchgrpo.plan.problems import find_problems


@dataclass(frozen=True)
class Setting:
    """A `key=value` setting of the command line."""

    key: str
    value: Any

    def __str__(self) -> str:
        plain = self.value is None or isinstance(self.value, bool)
        value = json.dumps(self.value) if plain else self.value
        return f"{self.key}={value}"


def find_remedy(plan: Plan, machine: Machine) -> tuple[Setting, ...] | None:
    """Finds the smallest set of settings that makes the plan's configuration work on `machine`.

    plan: a plan for `machine`, or for the smallest larger machine that has the requested devices.

    Returns:
        The settings, which are empty if the configuration already works; None if no set of up to four works.
    """

    def works(settings: Sequence[Setting]) -> bool:
        changed = copy.deepcopy(plan.config)
        try:
            for setting in settings:
                section, _, name = setting.key.rpartition(".")
                setattr(attrgetter(section)(changed), name, setting.value)
                replace(attrgetter(section)(changed))  # the constructor of a section checks its fields
            check_config(changed)
            return not find_problems(make_plan(changed, plan.is_overlapped, machine, plan.folder))
        except ConfigError:
            return False

    if works(()):
        return ()
    changes = [(key, values) for key, values in _candidate_changes(plan, machine) if values]
    for key_set in chain.from_iterable(combinations(changes, size) for size in (1, 2, 3, 4)):
        settings = [Setting(key, values[-1]) for key, values in key_set]
        if not works(settings):
            continue
        for position, (key, values) in reversed(list(enumerate(key_set))):
            for value in values:
                milder = [*settings[:position], Setting(key, value), *settings[position + 1 :]]
                if works(milder):
                    settings = milder
                    break
        return tuple(settings)
    return None


def _candidate_changes(plan: Plan, machine: Machine) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields candidate keys in command-line form, with their values from mild to strong.

    Keys with the smallest cost come first. Values that are already set are left out; a key without values cannot help.
    """
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
    yield "train.gradient_checkpointing", () if plan.learner.recomputation == "full" else ("full",)
    shares = tuple(share for share in (0.9, 0.95) if share > inference.gpu_memory_utilization)
    yield "inference_model.gpu_memory_utilization", shares
    present = config.train_model.num_devices
    counts = range(gpus, 0, -1) if present > gpus else range(present + 1, gpus + 1)
    yield "train_model.num_devices", tuple(counts)
    yield "train_model.context_parallel", _fewer_together(plan)
    nodes, ranks = config.train_model.num_nodes, config.train_model.ranks
    fewer_nodes = tuple(count for count in range(nodes - 1, 0, -1) if ranks % count == 0)
    yield "train_model.num_nodes", fewer_nodes
    for section in ("train_model", "ref_model", "inference_model"):
        has_list = isinstance(attrgetter(section)(config).devices, list | tuple)
        yield f"{section}.devices", (None,) if has_list else ()
    split = inference.tensor_parallel_size  # removes one engine at a time
    fewer = () if inference.devices is not None else tuple(range(inference.num_devices - split, 0, -split))
    yield "inference_model.num_devices", fewer
    yield "ref_model.shard_size", (None,) if config.ref_model.shard_size else ()
    scorers, cluster_gpus = plan.reference.ranks, gpus * machine.nodes
    scorer_counts: tuple[int | None, ...] = ()
    if scorers and cluster_gpus and config.ref_model.devices is None:
        free = cluster_gpus - count_used_gpus(plan)
        scorer_counts = tuple(
            range(scorers + 1, scorers + free + 1)
        )  # more scorers if GPUs are free, else fewer or none
        if free < 0:
            scorer_counts = (*range(scorers - 1, 0, -1), None)
    yield "ref_model.num_devices", scorer_counts
    halves = scorers > 0 and config.reference_model.dtype == "float32"
    yield "ref_model.dtype", ("bfloat16",) if halves else ()
    half_shards = config.train.mixed_precision == "fp16" and plan.reference.shard_size > 1
    yield "train.mixed_precision", ("bf16",) if half_shards else ()
    on_gpu = plan.engine.backend == "vllm" and not plan.devices.on_cpu
    can_quantize = on_gpu and inference.quantization is None
    yield "inference_model.quantization", ("fp8",) if can_quantize else ()
    yield "policy.kl_coef", () if config.policy.kl_coef == 0 else (0.0,)
    lora = config.train_model.lora
    yield "train_model.lora.enabled", () if lora.enabled else (True,)
    yield "train_model.lora.quantization", ("none",) if lora.quantized else ("nf4",)
    yield "inference_model.lora", ("merge",) if inference.lora == "adapter" else ()  # as 4 bits require
    yield "model.dtype", () if config.model.dtype == "bfloat16" else ("bfloat16",)
    room = plan.shape.max_positions - config.env.max_prompt_tokens if plan.shape and plan.shape.max_positions else 0
    shorter = (room, *(inference.max_tokens // divisor for divisor in (2, 4, 8)))
    lengths = sorted({length for length in shorter if 128 <= length < inference.max_tokens}, reverse=True)
    yield "inference_model.max_tokens", tuple(lengths)


def _fewer_together(plan: Plan) -> tuple[int, ...]:
    """Returns the largest allowed number of ranks per microbatch.

    Empty if the present number is allowed.
    """
    together, shape = plan.config.train_model.context_parallel, plan.shape
    if shape is None:
        return ()
    allowed = math.gcd(together, shape.num_kv_heads) if uses_packing(plan.config, shape) else 1
    return (allowed,) if allowed < together else ()
