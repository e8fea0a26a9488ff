"""Finds settings and sizes that keep a plan from working, and returns or raises them.

Each message has the value, the place and the remedy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from config.run_folder.checkpoints import checkpoint_model_path, checkpoints
from config.schema.checks import device_setting
from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan.compilation import disables_compilation
from torchgrpo.plan.context_parallel import context_problem
from torchgrpo.plan.devices import needed_nodes
from torchgrpo.plan.disk import checkpoint_bytes, exported_model_bytes, max_stored_checkpoints
from torchgrpo.plan.host_memory import host_bytes, host_uses
from torchgrpo.plan.machine import ASSUMED_VLLM, Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import Phase, format_gib, kv_bytes_per_sequence, usable_bytes
from torchgrpo.plan.microbatch_sizes import longest_row_tokens, uses_packing
from torchgrpo.plan.model_shape import GIB, ModelShape, rope_limit_message
from torchgrpo.plan.plan import (
    Plan,
    count_used_gpus,
    engine_bytes_without_cache,
    kv_cache_per_device,
    learner_peak_bytes,
    scorer_fits_gpu,
    scorer_phase,
)

VLLM_TEMPERATURES = (0.01, 2.0)
"""Least and largest temperature above 0 that vLLM samples at: it raises smaller ones, and refuses larger ones."""


@dataclass(frozen=True)
class Problem:
    """A problem of a plan. line: name of the affected line in the plan's table."""

    line: str
    text: str


def check_plan(plan: Plan) -> Plan:
    """Checks that a plan can work, and returns the plan.

    Raises:
        ConfigError: the plan cannot work; the message lists all problems.
    """
    found = find_problems(plan)
    if found:
        raise ConfigError("\n       ".join(problem.text for problem in found))
    return plan


def plan_with_problems(
    config: Config, is_overlapped: bool, machine: Machine, folder: Path
) -> tuple[Plan, list[Problem]]:
    """Makes the plan of a run and finds its problems.

    If the machine lacks devices or a backend, that is the first problem. The plan is then for the smallest larger
    machine that has them, so that the other problems are found too.

    Raises:
        ConfigError: no machine can meet the configuration's requests.
    """
    missing = ""
    with_vllm = replace(machine, vllm=machine.vllm or ASSUMED_VLLM, is_hypothetical=True)
    with_nodes = replace(with_vllm, nodes=max(machine.nodes, needed_nodes(config, machine.num_gpus)))
    larger = [
        replace(with_nodes, num_gpus=count, gpu_ids=tuple(map(str, range(count))))
        for count in range(machine.num_gpus + 1, 65)
    ]
    for candidate in (machine, with_vllm, with_nodes, *larger):
        try:
            plan = make_plan(config, is_overlapped, candidate, folder)
        except ConfigError as error:
            missing = missing or str(error)
            continue
        found = find_problems(plan)
        if missing:  # belongs to the first line whose devices the machine lacks, else to the learner's line
            devices = plan.devices
            engines = {f"engine {index}": engine for index, engine in enumerate(devices.engines)}
            lines = {"train_model": devices.train, **engines, "ref_model": devices.reference}
            lacking = [line for line, used in lines.items() if used and max(used) >= machine.num_gpus]
            line = "train_model" if devices.on_cluster or not lacking else lacking[0]
            found = [Problem(line, missing), *found]
        return plan, found
    raise ConfigError(missing)


def find_problems(plan: Plan) -> list[Problem]:
    """Returns all problems of a plan that can be found without a device."""
    found = [Problem("engine 0", text) for text in _setting_conflicts(plan)]
    for find in (model_problems, _memory_problems, _cache_problems, _disk_problems):
        found += [] if plan.shape is None else find(plan, plan.shape)
    return [*found, *scorer_problems(plan)]


def _setting_conflicts(plan: Plan) -> Iterator[str]:
    inference, lora = plan.config.inference_model, plan.config.train_model.lora.enabled
    if plan.engine.backend == "transformers" and inference.tensor_parallel_size > 1:
        yield (
            f"inference_model.tensor_parallel_size={inference.tensor_parallel_size} needs "
            "inference_model.backend=vllm: the transformers engine is one process on one device"
        )
    if plan.engine.backend != "vllm" and plan.devices.colocated:
        yield (
            f"inference_model.backend={plan.engine.backend} cannot release its memory, so it cannot take "
            "turns with the learner on one GPU: set inference_model.backend=vllm, or use a machine with a "
            "GPU for each"
        )
    if inference.lora == "adapter" and not lora:
        yield (
            "inference_model.lora=adapter: train_model.lora.enabled=false, so there is no adapter to send; "
            "set train_model.lora.enabled=true, or inference_model.lora=merge"
        )
    if inference.lora == "adapter" and plan.engine.backend == "transformers":
        yield (
            "inference_model.lora=adapter needs inference_model.backend=vllm; set that backend, or "
            "inference_model.lora=merge"
        )
    if plan.config.train_model.lora.quantized and plan.machine.bitsandbytes is None:
        yield (
            f"train_model.lora.quantization={plan.config.train_model.lora.quantization} needs bitsandbytes: "
            "run pip install -e '.[qlora]' in the project's folder"
        )
    users = {
        "vLLM": plan.engine.backend == "vllm",
        "train.packing=true": plan.learner.packs,
        "train.compile=true": bool(plan.config.train.compile),
    }
    kernel_users = " and ".join(name for name, needs_kernels in users.items() if needs_kernels)
    if not plan.devices.on_cpu and plan.machine.missing_for_kernels and kernel_users:
        yield (
            f"{kernel_users} on a GPU: Triton compiles the kernels and does not find "
            f"{' and '.join(plan.machine.missing_for_kernels)} on this machine; install what is missing "
            "(Debian and Ubuntu: apt install gcc python3-dev), or name another compiler in the variable CC"
        )
    compiles = plan.config.train.compile
    if compiles and plan.machine.missing_to_compile:
        yield (
            f"train.compile=true: torch.compile does not find {' and '.join(plan.machine.missing_to_compile)} "
            "on this machine; install what is missing (Debian and Ubuntu: apt install g++ python3-dev), name "
            "another compiler in the variable CXX, or set train.compile=false"
        )
    if compiles and disables_compilation(plan.is_overlapped, plan.devices, plan.engine):
        yield (
            "train.compile=true: vLLM in the learner's process, with inference_model.enforce_eager=true (the "
            "default on a CPU), switches compiled code off for both whenever it generates; set "
            "ray.enabled=true to run vLLM in its own process, or train.compile=false"
        )
    if plan.engine.backend in ("vllm", "http"):
        yield from _temperature_messages(plan.config)
    yield from _cluster_shortages(plan)


def _temperature_messages(config: Config) -> Iterator[str]:
    """Yields messages for temperatures that vLLM does not sample at."""
    inference, (least, largest) = config.inference_model, VLLM_TEMPERATURES
    temperatures = {
        "inference_model.temperature": inference.temperature,
        "inference_model.temperature_end": inference.temperature_end,
        **{f"eval.sets.{name}.temperature": one.temperature for name, one in config.eval.sets.items()},
    }
    for key, temperature in temperatures.items():
        if temperature and not least <= temperature <= largest:
            yield (
                f"{key}={temperature:g}: vLLM samples at temperatures from {least:g} to {largest:g}, or greedily; "
                "set one of these, or inference_model.backend=transformers"
            )


def _cluster_shortages(plan: Plan) -> Iterator[str]:
    """Yields requests that exceed a Ray cluster of known size.

    A cluster of unknown size is not checked: Ray reports missing devices when it starts the actors.
    """
    machine, devices = plan.machine, plan.devices
    nodes = plan.config.train_model.num_nodes
    gpus = machine.num_gpus * machine.nodes
    if machine.nodes == 1:
        return
    if nodes > machine.nodes:
        yield (
            f"train_model.num_nodes={nodes}: there are {machine.nodes} nodes; lower train_model.num_nodes, or "
            "raise machine.nodes"
        )
    if not devices.on_cpu and devices.ranks_per_node > machine.num_gpus:
        yield (
            f"train_model.num_devices={devices.ranks} over train_model.num_nodes={nodes} are {devices.ranks_per_node} "
            f"ranks on a node, which has {machine.num_gpus} GPUs: raise num_nodes, or lower num_devices"
        )
    if plan.reference.shard_size > max(machine.num_gpus, 1) and not devices.on_cpu:
        yield (
            f"ref_model.shard_size={plan.reference.shard_size}: the ranks of one copy lie on one node, which "
            f"has {machine.num_gpus} GPUs: lower ref_model.shard_size or leave it unset, set "
            "ref_model.dtype=bfloat16, or choose a smaller ref_model.name"
        )
    if count_used_gpus(plan) > gpus:
        sections = ("train_model", *(["ref_model"] if devices.reference else []), "inference_model")
        settings = ", ".join(device_setting(plan.config, section) for section in sections)
        yield (
            f"{settings}: {count_used_gpus(plan)} GPUs are needed, and {machine.nodes} nodes have {gpus}: "
            "lower one of these keys"
        )


def model_problems(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    """Yields problems of sequence lengths and tensor-parallel sizes that a model does not allow."""
    config = plan.config
    for text in _length_messages(shape, config.max_model_len, "model.name", config.model.name):
        yield Problem("a sequence", text)
    reference_shape, name = plan.reference_shape, config.ref_model.name
    if name is not None and reference_shape is not None and plan.reference.home != "none":
        for text in _length_messages(reference_shape, longest_row_tokens(config), "ref_model.name", name):
            yield Problem("ref_model", text)
    split = config.inference_model.tensor_parallel_size
    if shape.num_heads % split:
        yield Problem(
            "engine 0",
            f"inference_model.tensor_parallel_size={split} does not divide the {shape.num_heads} attention "
            f"heads of {config.model.name}: set a divisor",
        )
    models = [("learner", "model.name", config.model.name, shape)]
    if name is not None and reference_shape is not None and plan.reference.home == "learner ranks":
        models.append(("ref_model", "ref_model.name", name, reference_shape))
    size = config.train_model.context_parallel
    for line, key, model_name, one in models:
        problem = context_problem(size, uses_packing(config, one), one.num_kv_heads, key, model_name)
        if problem is not None:
            yield Problem(line, problem)


def _length_messages(shape: ModelShape, longest: int, key: str, name: str) -> Iterator[str]:
    """Yields messages if a model does not allow sequences of `longest` tokens.

    key: the setting that names the model.
    """
    if shape.max_positions and longest > shape.max_positions:
        another = "" if key == "model.name" else ", or choose another model"
        yield (
            f"{key}={name} has {shape.max_positions} positions, but prompt plus response may reach {longest} "
            f"tokens: lower env.max_prompt_tokens or inference_model.max_tokens{another}"
        )
    if shape.rope_limit and longest > shape.rope_limit:
        yield rope_limit_message(name, longest, shape.rope_limit, key)


def scorer_problems(plan: Plan) -> Iterator[Problem]:
    """Yields problems of scorers: shards in float16, or a model larger than their GPUs."""
    config, machine, shards = plan.config, plan.machine, plan.reference.shard_size
    if shards > 1 and config.train.mixed_precision == "fp16":  # shards are loaded in the compute dtype
        has_shard_size = config.ref_model.shard_size is not None
        devices = f"{device_setting(config, 'ref_model')} ({shards} GPUs share a copy, which is too large for one GPU)"
        yield Problem(
            "ref_model",
            "train.mixed_precision=fp16 with "
            f"{f'ref_model.shard_size={shards}' if has_shard_size else devices}: the shards of a frozen model "
            "are float32 or bfloat16; set train.mixed_precision=bf16, or "
            f"{'ref_model.shard_size=1' if has_shard_size else 'choose a smaller model'}",
        )
    scorer, size = scorer_phase(plan), machine.gpu_memory_gib
    if plan.devices.on_cpu or scorer is None or size is None or scorer_fits_gpu(scorer, size):
        return
    key = "model.name" if config.ref_model.name is None else "ref_model.name"
    half = ["set ref_model.dtype=bfloat16"] if config.reference_model.dtype == "float32" else []
    remedies = ", ".join([*_sharding_advice(plan), *half, "or choose a smaller model"])
    yield Problem(
        "scorer",
        f"{key}={config.reference_model.name} with {device_setting(config, 'ref_model')}: each scorer GPU "
        f"needs about {format_gib(scorer.bytes)} and has {size:.2f} GiB, of which "
        f"{format_gib(usable_bytes(size))} are usable; {remedies.removeprefix('or ')}",
    )


def _sharding_advice(plan: Plan) -> Iterator[str]:
    """Yields advice that lets more scorers share a copy, unless a whole node shares one."""
    shards, reference = plan.reference.shard_size, plan.config.ref_model
    if plan.machine.nodes > 1 and shards == plan.machine.num_gpus:
        return
    if reference.shard_size is not None:
        yield f"leave ref_model.shard_size={shards} unset, so that more ranks share a copy"
        if shards < plan.reference.ranks:
            return
    more = "give ref_model.num_devices=2 or more" if reference.num_devices is None else "raise ref_model.num_devices"
    if reference.devices is not None:
        more = "list more GPUs in ref_model.devices"
    yield f"{more}, over which a copy is sharded"


def _memory_problems(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    machine, host = plan.machine, host_bytes(plan, shape)
    if machine.host_memory_gib is not None and host > machine.host_memory_gib * GIB:
        largest = f"; {_largest(plan.phases)}" if plan.devices.on_cpu else ""
        uses = ", ".join(f"{use.name} {format_gib(use.bytes)}" for use in host_uses(plan, shape))
        memory = "this machine's memory" if not machine.is_hypothetical else "the node's memory"
        yield Problem(
            "host memory",
            f"about {format_gib(host)} are needed ({uses}) and {memory} is {machine.host_memory_gib:.2f} GiB{largest}",
        )
    if plan.devices.on_cpu or machine.gpu_memory_gib is None:
        return
    usable = usable_bytes(machine.gpu_memory_gib)
    for phase in plan.phases:
        if phase.bytes > usable:
            yield Problem(
                phase.name,
                f"phase {phase.name} needs about {format_gib(phase.bytes)} and a GPU has "
                f"{machine.gpu_memory_gib:.2f} GiB, of which {format_gib(usable)} are usable; "
                f"{_largest([phase])}",
            )


def _largest(phases: list[Phase]) -> str:
    phase = max(phases, key=lambda phase: phase.bytes)
    use = max(phase.uses, key=lambda use: use.bytes)
    return f"the largest part of phase {phase.name} is {use.name} with {format_gib(use.bytes)}: change {use.knobs}"


def _cache_problems(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    cache = kv_cache_per_device(plan, shape) if plan.engine.backend == "vllm" else None
    size = plan.machine.gpu_memory_gib
    stays_awake = plan.devices.colocated and not plan.engine.sleeps
    if stays_awake and cache is not None and size is not None:
        needed = learner_peak_bytes(plan) + engine_bytes_without_cache(plan, shape) + cache
        if needed > usable_bytes(size):
            yield Problem(
                "KV cache",
                f"inference_model.sleep=false: learner and engine need {format_gib(needed)} together and a GPU has "
                f"{size:.2f} GiB, of which {format_gib(usable_bytes(size))} are usable: leave inference_model.sleep "
                "unset, so that the engine sleeps while the learner trains, or lower inference_model.kv_cache_gib",
            )
    one = kv_bytes_per_sequence(plan.config, shape, plan.engine.dtype)
    if cache is not None and cache < one:
        yield Problem(
            "KV cache",
            f"the KV cache of {format_gib(max(0.0, cache))} does not hold one sequence of "
            f"{plan.config.max_model_len} tokens ({format_gib(one)}){_cache_advice(plan, shape)}, lower "
            "inference_model.max_tokens, or give the engine more or other devices",
        )


def _cache_advice(plan: Plan, shape: ModelShape) -> str:
    """Returns the reason of a small KV cache, and the settings that enlarge the cache."""
    inference, share = plan.config.inference_model, plan.engine.gpu_memory_utilization
    if plan.engine.kv_cache_bytes is not None:
        return ": raise inference_model.kv_cache_gib"
    engine = f"the engine needs {format_gib(engine_bytes_without_cache(plan, shape))} beside the cache"
    if share < inference.gpu_memory_utilization:
        return (
            f"; {engine}, and the learner leaves {share:.0%} of the GPU: set inference_model.quantization=fp8, train "
            "adapters (train_model.lora.enabled, train_model.lora.quantization)"
        )
    return f"; {engine} and has {share:.0%} of a GPU: raise inference_model.gpu_memory_utilization"


def _disk_problems(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    saved = checkpoints(plan.folder)
    # A resumed run replaces the checkpoints that are already in its folder.
    files = (file for path in (*saved, *map(checkpoint_model_path, saved)) for file in path.rglob("*"))
    saved_bytes = sum(file.stat().st_size for file in files if file.is_file())
    one = checkpoint_bytes(plan.config, shape) + exported_model_bytes(plan.config, shape)
    needed = one * max_stored_checkpoints(plan.config) - saved_bytes
    exports = plan.config.train.export
    models, advice = (" with the models beside them", "set train.export=false, ") if exports else ("", "")
    if plan.machine.disk_gib is not None and needed > plan.machine.disk_gib * GIB:
        yield Problem(
            "checkpoints",
            f"checkpoints would take {format_gib(needed)} more{models} and {plan.folder} has "
            f"{plan.machine.disk_gib:.2f} GiB free: lower train.keep_checkpoints, {advice}or write elsewhere "
            "with hydra.run.dir",
        )
