"""Why a plan cannot work: every reason at once, each with the value, the place and the remedy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from config.run_folder.checkpoints import checkpoints, model_of
from config.schema.checks import devices_asked
from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan.disk import checkpoint_bytes, checkpoints_kept, model_bytes
from torchgrpo.plan.host_memory import host_bytes, host_uses
from torchgrpo.plan.machine import ASSUMED_VLLM, Machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import Phase, gib, kv_bytes_per_sequence, usable_bytes
from torchgrpo.plan.microbatches import longest_row
from torchgrpo.plan.model_shape import GIB, ModelShape, beyond_rope_limit
from torchgrpo.plan.plan import Plan, cache_on_device, fits_gpu, gpus_used, scorer_phase


@dataclass(frozen=True)
class Problem:
    """line: the line of the report that it is about, as the report names it."""

    line: str
    text: str


def check(plan: Plan) -> Plan:
    """The plan itself.

    Raises:
        ConfigError: it cannot work; the message is all its problems.
    """
    found = problems(plan)
    if found:
        raise ConfigError("\n       ".join(problem.text for problem in found))
    return plan


def planned(config: Config, overlapped: bool, machine: Machine, folder: Path) -> tuple[Plan, list[Problem]]:
    """The plan and its problems. Where devices or a backend are missing, that is the first problem, and the plan is the
    one of the nearest machine that has them, so that everything else is told too.

    Raises:
        ConfigError: no machine has what the configuration asks for.
    """
    missing = ""
    imagined = replace(machine, vllm=machine.vllm or ASSUMED_VLLM, imagined=True)
    joined = replace(imagined, nodes=max(machine.nodes, config.train_model.num_nodes))
    larger = [
        replace(joined, num_gpus=count, gpu_ids=tuple(map(str, range(count))))
        for count in range(machine.num_gpus + 1, 65)
    ]
    for nearest in (machine, imagined, joined, *larger):
        try:
            plan = make_plan(config, overlapped, nearest, folder)
        except ConfigError as error:
            missing = missing or str(error)
            continue
        found = problems(plan)
        if missing:  # about the line whose devices the machine lacks, else the learner's
            devices = plan.devices
            engines = {f"engine {index}": engine for index, engine in enumerate(devices.engines)}
            lines = {"train_model": devices.train, **engines, "ref_model": devices.reference}
            lacking = [line for line, used in lines.items() if used and max(used) >= machine.num_gpus]
            line = "train_model" if devices.on_cluster or not lacking else lacking[0]
            found = [Problem(line, missing), *found]
        return plan, found
    raise ConfigError(missing)


def problems(plan: Plan) -> list[Problem]:
    """Everything that keeps the run from working, as far as it can be told without a device."""
    found = [Problem("engine 0", text) for text in _contradictions(plan)]
    for look in (model_limits, _memory, _cache, _disk):
        found += [] if plan.shape is None else look(plan, plan.shape)
    return [*found, *scorer_limits(plan)]


def _contradictions(plan: Plan) -> Iterator[str]:
    inference, lora = plan.config.inference_model, plan.config.train_model.lora.enabled
    if plan.engine.backend == "transformers" and inference.tensor_parallel_size > 1:
        yield (
            f"inference_model.tensor_parallel_size={inference.tensor_parallel_size} needs "
            "inference_model.backend=vllm: the transformers engine is one process on one device"
        )
    if plan.engine.backend != "vllm" and plan.devices.colocated:
        yield (
            f"inference_model.backend={plan.engine.backend} cannot give its memory back, so it cannot take turns with "
            "the learner on one GPU: take inference_model.backend=vllm, or a machine with a GPU for each"
        )
    if inference.lora == "adapter" and not lora:
        yield (
            "inference_model.lora=adapter sends a LoRA adapter, but train_model.lora.enabled=false: there is "
            "none; set it to true, or inference_model.lora=merge"
        )
    if inference.lora == "adapter" and plan.engine.backend == "transformers":
        yield "inference_model.lora=adapter needs inference_model.backend=vllm; merge works with both"
    if plan.config.train_model.lora.quantized and plan.machine.bitsandbytes is None:
        yield (
            f"train_model.lora.quantization={plan.config.train_model.lora.quantization} needs bitsandbytes: "
            "pip install -e '.[qlora]' in the project's folder"
        )
    users = {"vLLM": plan.engine.backend == "vllm", "train.packing=true": plan.learner.packs}
    named = " and ".join(name for name, needed in users.items() if needed)
    if not plan.devices.on_cpu and plan.machine.missing_for_kernels and named:
        yield (
            f"{named} on a GPU: Triton, which compiles the kernels, does not find "
            f"{' and '.join(plan.machine.missing_for_kernels)} on this machine: install it (Debian and Ubuntu: apt "
            "install gcc python3-dev; another compiler is named by the variable CC)"
        )
    compiles = plan.config.train.compile
    if compiles and plan.machine.missing_to_compile:
        yield (
            f"train.compile=true: torch.compile does not find {' and '.join(plan.machine.missing_to_compile)} on this "
            "machine: install it (Debian and Ubuntu: apt install g++ python3-dev; another compiler is named by the "
            "variable CXX), or set train.compile=false"
        )
    switches_off = plan.overlapped and plan.engine.backend == "vllm" and plan.engine.enforce_eager
    if compiles and switches_off and plan.devices.in_process and plan.devices.ranks == 1:
        yield (
            "train.compile=true: vLLM in the learner's process, with inference_model.enforce_eager=true (the default "
            "on a CPU), switches compiled code off for both whenever it generates; take ray.enabled=true, which gives "
            "it a process of its own, or train.compile=false"
        )
    yield from _cluster(plan)


def _cluster(plan: Plan) -> Iterator[str]:
    """What a cluster of known size does not have. Of another one only Ray can tell, when it places the actors."""
    machine, devices = plan.machine, plan.devices
    nodes = plan.config.train_model.num_nodes
    there = machine.num_gpus * machine.nodes
    if machine.nodes == 1:
        return
    if nodes > machine.nodes:
        yield f"train_model.num_nodes={nodes}: there are {machine.nodes} nodes; lower it, or raise plan.nodes"
    if not devices.on_cpu and devices.ranks_per_node > machine.num_gpus:
        yield (
            f"train_model.num_devices={devices.ranks} over train_model.num_nodes={nodes} are {devices.ranks_per_node} "
            f"ranks on a node, which has {machine.num_gpus} GPUs: raise num_nodes, or lower num_devices"
        )
    if plan.reference.shard_size > max(machine.num_gpus, 1) and not devices.on_cpu:
        yield (
            f"ref_model.shard_size={plan.reference.shard_size}: the ranks of one copy lie on one node, which has "
            f"{machine.num_gpus} GPUs: lower it or leave it unset, take ref_model.dtype=bfloat16, or a smaller "
            "ref_model.name"
        )
    if gpus_used(plan) > there:
        sections = ("train_model", *(["ref_model"] if devices.reference else []), "inference_model")
        asked = ", ".join(devices_asked(plan.config, section) for section in sections)
        yield (
            f"{asked}: {gpus_used(plan)} GPUs are needed, and {machine.nodes} nodes have {there}: lower one of them"
        )


def model_limits(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    """Lengths and splits that the model does not allow."""
    config = plan.config
    for text in _too_long(shape, config.max_model_len, "model.name", config.model.name):
        yield Problem("a sequence", text)
    frozen, name = plan.reference_shape, config.ref_model.name
    if name is not None and frozen is not None and plan.reference.home != "none":
        for text in _too_long(frozen, longest_row(config), "ref_model.name", name):
            yield Problem("ref_model", text)
    split = config.inference_model.tensor_parallel_size
    if shape.num_heads % split:
        yield Problem(
            "engine 0",
            f"inference_model.tensor_parallel_size={split} does not divide the {shape.num_heads} attention heads "
            f"of {config.model.name}: take a divisor",
        )


def _too_long(shape: ModelShape, longest: int, key: str, name: str) -> Iterator[str]:
    """Messages on sequences of `longest` tokens that the model of the setting `key` does not allow."""
    if shape.max_positions and longest > shape.max_positions:
        another = "" if key == "model.name" else ", or take another model"
        yield (
            f"prompt plus response may reach {longest} tokens, but {key}={name} has {shape.max_positions} positions: "
            f"lower env.max_prompt_tokens or inference_model.max_tokens{another}"
        )
    if shape.rope_limit and longest > shape.rope_limit:
        yield beyond_rope_limit(name, longest, shape.rope_limit, key)


def scorer_limits(plan: Plan) -> Iterator[Problem]:
    """Problems of scorers: shards in float16, or a model larger than its GPUs."""
    config, machine, shards = plan.config, plan.machine, plan.reference.shard_size
    if shards > 1 and config.train.mixed_precision == "fp16":  # they are loaded in the dtype of arithmetic
        typed = config.ref_model.shard_size is not None
        asked = (
            f"{devices_asked(config, 'ref_model')}, of which {shards} share a copy, for one does not hold it"
        )
        yield Problem(
            "ref_model",
            f"train.mixed_precision=fp16 with {f'ref_model.shard_size={shards}' if typed else asked}: the shards of a "
            "frozen model are float32 or bfloat16; take train.mixed_precision=bf16, or "
            f"{'ref_model.shard_size=1' if typed else 'a smaller model'}",
        )
    scorer, size = scorer_phase(plan), machine.gpu_memory_gib
    if plan.devices.on_cpu or scorer is None or size is None or fits_gpu(scorer, size):
        return
    key = "model.name" if config.ref_model.name is None else "ref_model.name"
    half = ["take ref_model.dtype=bfloat16"] if config.reference_model.dtype == "float32" else []
    remedies = ", ".join([*_more_to_a_copy(plan), *half, "or choose a smaller model"])
    yield Problem(
        "scorer",
        f"{key}={config.reference_model.name} with {devices_asked(config, 'ref_model')}: each scorer GPU needs about "
        f"{gib(scorer.bytes)} and has {size:.2f} GiB, of which {gib(usable_bytes(size))} can be planned with; "
        f"{remedies.removeprefix('or ')}",
    )


def _more_to_a_copy(plan: Plan) -> Iterator[str]:
    """Advice that lets more scorers share a copy; empty where all of a node do."""
    shards, asked = plan.reference.shard_size, plan.config.ref_model
    if plan.machine.nodes > 1 and shards == plan.machine.num_gpus:
        return
    if asked.shard_size is not None:
        yield f"leave ref_model.shard_size={shards} unset, so that more ranks share a copy"
        if shards < plan.reference.ranks:
            return
    more = (
        "give ref_model.num_devices=2 or more" if asked.num_devices is None else "raise ref_model.num_devices"
    )
    if asked.devices is not None:
        more = "list more GPUs in ref_model.devices"
    yield f"{more}, over which a copy is sharded"


def _memory(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    machine, host = plan.machine, host_bytes(plan, shape)
    if machine.host_memory_gib is not None and host > machine.host_memory_gib * GIB:
        largest = f"; {_largest(plan.phases)}" if plan.devices.on_cpu else ""
        uses = ", ".join(f"{use.what} {gib(use.bytes)}" for use in host_uses(plan, shape))
        where = "this machine's memory" if not machine.imagined else "the node's memory"
        yield Problem(
            "host memory",
            f"about {gib(host)} are needed ({uses}) and {where} is {machine.host_memory_gib:.2f} GiB{largest}",
        )
    if plan.devices.on_cpu or machine.gpu_memory_gib is None:
        return
    there = usable_bytes(machine.gpu_memory_gib)
    for phase in plan.phases:
        if phase.bytes > there:
            yield Problem(
                phase.name,
                f"phase {phase.name} needs about {gib(phase.bytes)} and a GPU has {machine.gpu_memory_gib:.2f} "
                f"GiB, of which {gib(there)} can be planned with; {_largest([phase])}",
            )


def _largest(phases: list[Phase]) -> str:
    phase = max(phases, key=lambda phase: phase.bytes)
    use = max(phase.uses, key=lambda use: use.bytes)
    return f"the largest part of phase {phase.name} is {use.what} with {gib(use.bytes)}: change {use.knobs}"


def _cache(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    cache = cache_on_device(plan, shape) if plan.engine.backend == "vllm" else None
    one = kv_bytes_per_sequence(plan.config, shape, plan.engine.dtype)
    if cache is not None and cache < one:
        share = plan.engine.gpu_memory_utilization
        beside = ""
        if plan.devices.colocated:
            beside = f" in {share:g} of the GPU, which is what the learner leaves"
        yield Problem(
            "KV cache",
            f"the KV cache of {gib(max(0.0, cache))}{beside} does not hold one sequence of {plan.config.max_model_len} "
            f"tokens ({gib(one)}): raise inference_model.kv_cache_gib or gpu_memory_utilization, lower max_tokens, or "
            "give the engine more or other devices",
        )


def _disk(plan: Plan, shape: ModelShape) -> Iterator[Problem]:
    found = checkpoints(plan.folder)
    of_a_run_that_goes_on = (file for path in (*found, *map(model_of, found)) for file in path.rglob("*"))
    there = sum(file.stat().st_size for file in of_a_run_that_goes_on if file.is_file())
    one = checkpoint_bytes(plan.config, shape) + model_bytes(plan.config, shape)
    needed = one * checkpoints_kept(plan.config) - there
    exports = plan.config.train.export
    beside, off = (" with the models beside them", "set train.export=false, ") if exports else ("", "")
    if plan.machine.disk_gib is not None and needed > plan.machine.disk_gib * GIB:
        yield Problem(
            "checkpoints",
            f"checkpoints would take {gib(needed)} more{beside} and {plan.folder} has {plan.machine.disk_gib:.2f} GiB "
            f"free: lower train.keep_checkpoints, {off}or write elsewhere with hydra.run.dir",
        )
