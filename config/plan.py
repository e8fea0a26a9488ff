"""`run=plan`: what a run would do and need, without touching a device, loading a weight or importing torch.

`make_plan` allots the devices and raises ConfigError where the run cannot work; `report` is the text.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

from config.devices import DevicePlan, Situation, Wish, count_gpus, gpu_memory_gib, plan_devices
from config.errors import ConfigError
from config.inference import InferenceModelConfig
from config.memory import (
    Phase,
    checkpoint_bytes,
    checkpoints_kept,
    engine_weights,
    gib,
    inference_dtype,
    kv_bytes_per_sequence,
    microbatch_rows,
    microbatch_tokens,
    train_phases,
)
from config.model_shape import DTYPE_BYTES, GIB, ModelShape, find_config, kv_cache_bytes, read_shape
from config.schema import Config


@dataclass(frozen=True)
class Plan:
    """shape: None for a hub model whose config.json is not in the local cache yet. folder: of the checkpoints."""

    config: Config
    devices: DevicePlan
    shape: ModelShape | None
    backend: str
    overlapped: bool
    folder: Path


def make_plan(
    config: Config,
    overlapped: bool,
    vllm_version: str | None,
    num_gpus: int | None = None,
    folder: Path = Path(),
) -> Plan:
    """The plan of a run.

    Args:
        overlapped: the script is grpo_async.py.
        vllm_version: of the installed vLLM, None without one.
        num_gpus: instead of what this machine has, for a plan of another machine.
        folder: where checkpoints will lie.
    Raises:
        ConfigError: the run cannot work.
    """
    gpus = 0 if config.device == "cpu" else count_gpus() if num_gpus is None else num_gpus
    if config.device == "cuda" and gpus == 0:
        raise ConfigError(
            "device=cuda: this machine has no NVIDIA GPU; `--config-name grpo_quickstart` trains on a CPU, "
            "device=cpu tries this config there"
        )
    uses_reference = config.policy.uses_reference
    reference = Wish("ref_model", config.ref_model.num_devices, config.ref_model.devices)
    devices = plan_devices(
        Wish("train_model", config.train_model.num_devices, config.train_model.devices),
        reference if uses_reference else None,
        config.inference_model,
        Situation(
            num_gpus=gpus,
            lora=config.train_model.lora.enabled,
            overlapped=overlapped,
            use_ray=config.ray.enabled,
            cluster=config.ray.address is not None,
        ),
    )
    path = find_config(config.model.name)
    shape = read_shape(path) if path else None
    plan = Plan(config, devices, shape, _backend(config, gpus, vllm_version), overlapped, folder)
    _check(plan)
    return plan


def _backend(config: Config, gpus: int, vllm_version: str | None) -> str:
    asked = config.inference_model.backend
    if asked == "auto":
        return "vllm" if gpus and vllm_version is not None else "transformers"
    if asked == "vllm" and vllm_version is None:
        raise ConfigError(
            "inference_model.backend=vllm: vLLM is not installed; `make vllm` installs it, or take "
            "inference_model.backend=transformers"
        )
    return asked


def _check(plan: Plan) -> None:
    config, inference = plan.config, plan.config.inference_model
    if plan.backend == "transformers" and inference.tensor_parallel_size > 1:
        raise ConfigError(
            f"inference_model.tensor_parallel_size={inference.tensor_parallel_size} needs "
            "inference_model.backend=vllm: the transformers engine is one process on one device"
        )
    if inference.lora == "adapter" and not config.train_model.lora.enabled:
        raise ConfigError(
            "inference_model.lora=adapter sends a LoRA adapter, but train_model.lora.enabled=false: there is "
            "none; set it to true, or inference_model.lora=merge"
        )
    if inference.lora == "adapter" and plan.backend == "transformers":
        raise ConfigError(
            "inference_model.lora=adapter needs inference_model.backend=vllm; merge works with both"
        )
    shape = plan.shape
    if shape is None:
        return
    if shape.max_positions and config.max_model_len > shape.max_positions:
        raise ConfigError(
            f"prompt plus response may reach {config.max_model_len} tokens, but model.name={config.model.name} "
            f"has {shape.max_positions} positions: lower env.max_prompt_tokens or inference_model.max_tokens"
        )
    split = inference.tensor_parallel_size
    if shape.num_heads % split:
        raise ConfigError(
            f"inference_model.tensor_parallel_size={split} does not divide the {shape.num_heads} attention heads "
            f"of {config.model.name}: take a divisor"
        )
    _check_memory(plan, shape)
    _check_cache(plan, shape)
    _check_disk(plan, shape)


def _check_cache(plan: Plan, shape: ModelShape) -> None:
    cache = _cache_on_device(plan, shape) if plan.backend == "vllm" else None
    one = kv_bytes_per_sequence(plan.config, shape, plan.devices.on_cpu)
    if cache is not None and cache < one:
        raise ConfigError(
            f"the KV cache of {gib(max(0.0, cache))} does not hold one sequence of {plan.config.max_model_len} tokens "
            f"({gib(one)}): raise inference_model.kv_cache_gib or gpu_memory_utilization, or lower max_tokens"
        )


def _check_disk(plan: Plan, shape: ModelShape) -> None:
    there = sum(
        path.stat().st_size for path in (plan.folder / "checkpoints").glob("*.pt")
    )  # of a run that goes on
    needed = checkpoint_bytes(plan.config, shape) * checkpoints_kept(plan.config) - there
    free = psutil.disk_usage(str(plan.folder)).free
    if needed > free:
        raise ConfigError(
            f"checkpoints would take {gib(needed)} more and {plan.folder} has {gib(free)} free: lower "
            "train.keep_checkpoints, or write elsewhere with hydra.run.dir"
        )


def _check_memory(plan: Plan, shape: ModelShape) -> None:
    """Raises ConfigError where an estimate exceeds what is there."""
    if plan.devices.on_cpu:
        there, where = float(psutil.virtual_memory().total), "this machine's memory"
        needed = _host_bytes(plan, shape)
    else:
        size = gpu_memory_gib()
        if size is None:
            return
        there, where = size * GIB, "a GPU's memory"
        needed = max(phase.bytes for phase in _train_phases(plan, shape))
    if needed > there:
        phase = max(_train_phases(plan, shape), key=lambda phase: phase.bytes)
        raise ConfigError(
            f"about {gib(needed)} are needed and {where} is {gib(there)}; the largest part of phase "
            f"{phase.name} is {phase.largest.what} with {gib(phase.largest.bytes)}: change {phase.largest.knobs}"
        )


def _train_phases(plan: Plan, shape: ModelShape) -> list[Phase]:
    devices = max(1, len(plan.devices.train))
    beside = plan.devices.reference_home == "host memory" and plan.devices.on_cpu
    return train_phases(plan.config, shape, devices, plan.devices.on_cpu, beside)


def _host_bytes(plan: Plan, shape: ModelShape) -> float:
    """Learner and engines share the memory of a CPU machine."""
    learner = max(phase.bytes for phase in _train_phases(plan, shape))
    return learner + _engine_bytes(plan, shape) * len(plan.devices.engines)


def _engine_bytes(plan: Plan, shape: ModelShape) -> float:
    """Weights and KV cache of one engine on a CPU, all of its workers together."""
    workers = plan.devices.workers_per_engine
    weights = engine_weights(plan.config, shape, on_cpu=plan.backend == "vllm") * workers
    return weights + cache_bytes(plan, shape)


def cache_bytes(plan: Plan, shape: ModelShape) -> float:
    """KV cache of one engine on a CPU: what all of its sequences need; vLLM's is bounded (`kv_cache_gib`)."""
    config, inference = plan.config, plan.config.inference_model
    width = DTYPE_BYTES[inference_dtype(config, on_cpu=True)]
    if plan.backend != "vllm":
        rows = min(inference.max_num_seqs, config.completions_per_iteration)
        return rows * config.max_model_len * shape.kv_bytes_per_token(width)
    if inference.kv_cache_gib is not None:
        return inference.kv_cache_gib * GIB
    return kv_cache_bytes(shape, config.max_model_len, inference.max_num_seqs, width)


def report(plan: Plan) -> str:
    """What `run=plan` prints."""
    sections = [
        ("devices", _device_lines(plan)),
        ("batches", _batch_lines(plan.config)),
        ("memory", _memory_lines(plan)),
        ("generation", _generation_lines(plan)),
        ("checkpoints", _checkpoint_lines(plan)),
        ("keys that do nothing here", idle_keys(plan)),
    ]
    return "\n".join(
        "\n".join([f"{name}:", *(f"  {line}" for line in lines)]) for name, lines in sections if lines
    )


def _device_lines(plan: Plan) -> list[str]:
    devices = plan.devices
    kind = "in this process" if devices.in_process else "Ray actor"
    lines = [f"train_model      {_where(devices.train)}"]
    home = devices.reference_home
    lines.append(f"ref_model        {_where(devices.reference) if home == 'own devices' else home}")
    for index, engine in enumerate(devices.engines):
        where = "the Ray cluster's choice" if devices.on_cluster and not engine else _where(engine)
        lines.append(f"engine {index}         {where}, {plan.backend}, {kind}")
    lines.append(f"weights travel by {devices.transport}")
    return lines + [f"note: {note}" for note in devices.notes]


def _where(devices: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, devices))}" if devices else "CPU"


def _batch_lines(config: Config) -> list[str]:
    rows = microbatch_rows(config)
    longest = config.env.max_prompt_tokens + config.inference_model.max_tokens
    return [
        f"iteration        {config.prompts_per_iteration} prompts x {config.env.repeats} completions = "
        f"{config.completions_per_iteration} completions",
        f"optimizer step   {config.optim_batch_size} completions = {config.train.gradient_accumulation_steps} "
        f"microbatches x {rows}; {config.optimizer_steps_per_iteration} steps per iteration",
        f"tokens           up to {config.optim_batch_size * longest} per optimizer step, "
        f"{microbatch_tokens(config)} positions in a microbatch",
        f"run              {config.total_iterations} iterations, {config.total_optimizer_steps} optimizer steps",
    ]


def _memory_lines(plan: Plan) -> list[str]:
    shape = plan.shape
    if shape is None:
        return [f"unknown: config.json of {plan.config.model.name} is not on this machine yet"]
    lines = [
        f"{shape.parameters / 1e6:.1f} million parameters; estimates without libraries and fragmentation"
    ]
    for phase in _train_phases(plan, shape):
        where = "learner" if plan.devices.on_cpu else "each training GPU"
        lines.append(f"{phase.name:16} {where}: {gib(phase.bytes)}")
        lines += [f"  {gib(part.bytes):>12}  {part.what}  [{part.knobs}]" for part in phase.parts]
    if plan.devices.on_cpu:
        lines.append(f"all together     {gib(_host_bytes(plan, shape))}")
    return lines


def _generation_lines(plan: Plan) -> list[str]:
    shape, config = plan.shape, plan.config
    if shape is None:
        return []
    on_cpu, inference = plan.devices.on_cpu, config.inference_model
    one, weights = kv_bytes_per_sequence(config, shape, on_cpu), engine_weights(config, shape, on_cpu)
    lines = [
        f"weights          {gib(weights)} on each device of an engine  [inference_model.dtype, tensor_parallel_size]",
        f"a sequence       {config.max_model_len} tokens, {gib(one)} of KV cache  [inference_model.max_tokens, "
        "env.max_prompt_tokens]",
    ]
    if plan.backend != "vllm":
        return [
            *lines,
            f"KV cache         grows to {gib(cache_bytes(plan, shape))}  [inference_model.max_num_seqs]",
        ]
    cache = _cache_on_device(plan, shape)
    if cache is None:
        share = f"{inference.gpu_memory_utilization:g} of a GPU less {gib(weights)}"
        return [*lines, f"KV cache         {share}; 1 GiB holds {GIB / one:.1f} sequences"]
    return [
        *lines,
        f"KV cache         {gib(cache)} hold {cache / one:.1f} full sequences; at most {inference.max_num_seqs} run  "
        f"[inference_model.{'kv_cache_gib' if on_cpu else 'gpu_memory_utilization'}, max_num_seqs]",
    ]


def _cache_on_device(plan: Plan, shape: ModelShape) -> float | None:
    """KV cache on one device of a vLLM engine, None where a GPU's memory is not known."""
    inference: InferenceModelConfig = plan.config.inference_model
    if plan.devices.on_cpu:
        return cache_bytes(plan, shape) / inference.tensor_parallel_size
    if inference.kv_cache_gib is not None:
        return inference.kv_cache_gib * GIB / inference.tensor_parallel_size
    size = gpu_memory_gib()
    weights = engine_weights(plan.config, shape, on_cpu=False)
    return None if size is None else inference.gpu_memory_utilization * size * GIB - weights


def _checkpoint_lines(plan: Plan) -> list[str]:
    if plan.shape is None:
        return []
    one, count = checkpoint_bytes(plan.config, plan.shape), checkpoints_kept(plan.config)
    return [
        f"{gib(one)} each, at most {count} at a time: {gib(one * count)} of "
        f"{gib(psutil.disk_usage(str(plan.folder)).free)} free  [train.keep_checkpoints, train.checkpoint_frequency]"
    ]


def idle_keys(plan: Plan) -> list[str]:
    """Keys that differ from their defaults and that nothing in this run reads."""
    config, usual = plan.config, Config()
    idle: list[str] = []

    def unless(active: bool, section: str, *keys: str, why: str) -> None:
        if active:
            return
        for key in keys:
            value = vars(vars(config)[section])[key]
            if value != vars(vars(usual)[section])[key]:
                idle.append(f"{section}.{key}={value}: {why}")

    vllm, gpu = plan.backend == "vllm", not plan.devices.on_cpu
    unless(vllm, "inference_model", "kv_cache_gib", "enforce_eager", "quantization", why="vLLM only")
    unless(vllm and gpu, "inference_model", "gpu_memory_utilization", why="vLLM on a GPU only")
    unless(gpu, "inference_model", "colocate", why="there is no GPU")
    unless(plan.overlapped, "inference_model", "update", why="nothing is in flight when grpo.py pushes")
    asynchronous = ("max_policy_age", "stale_groups", "weight_update_frequency", "buffer_groups")
    unless(plan.overlapped, "train", *asynchronous, why="grpo_async.py only")
    reference = config.policy.uses_reference
    unless(reference, "ref_model", "num_devices", "devices", why="policy.kl_coef=0 uses no reference")
    unless(reference, "policy", "kl_estimator", "kl_placement", why="policy.kl_coef=0")
    unless(not plan.devices.in_process, "ray", "num_cpus_per_engine", why="the engine is not a Ray actor")
    return idle
