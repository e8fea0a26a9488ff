"""What `run=plan` prints: the whole table, the lines that do not fit marked, then what would make the plan work."""

from collections.abc import Sequence
from dataclasses import replace

from config.schema.config import Config
from torchgrpo.plan.disk import checkpoint_bytes, checkpoints_kept, model_bytes
from torchgrpo.plan.host_memory import host_bytes, host_uses
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.memory import Use, engine_weights, gib, kv_bytes_per_sequence, usable_bytes
from torchgrpo.plan.microbatches import longest_row, microbatch_tokens
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan, cache_on_device, scorer_phase
from torchgrpo.plan.problems import Problem
from torchgrpo.plan.remedies import remedy

_WIDTH = 17


def report(plan: Plan, found: Sequence[Problem]) -> str:
    """The table. found: the problems of this plan, whose lines are marked."""
    machine = plan.machine
    size = "" if machine.gpu_memory_gib is None else f" of {machine.gpu_memory_gib:g} GiB"
    gpus = f"{machine.num_gpus} GPU(s){size}" if machine.num_gpus else "no GPU"
    nodes = f"{machine.nodes} nodes, each with " if machine.nodes > 1 else ""
    host, disk = machine.host_memory_gib, machine.disk_gib
    memory = "host memory not known (plan.host_memory_gib)" if host is None else f"{host:.0f} GiB of memory"
    free = "free disk not known (plan.disk_gib)" if disk is None else f"{disk:.0f} GiB of free disk"
    kind = "planned for" if machine.imagined else "this machine"
    sections = [
        ("machine", [line(kind, f"{nodes}{gpus}, {memory}, {free}")]),
        ("devices", _device_lines(plan)),
        ("batches", _batch_lines(plan)),
        ("memory", _memory_lines(plan)),
        ("generation", _generation_lines(plan)),
        ("checkpoints", _checkpoint_lines(plan)),
        ("keys that do nothing here", idle_keys(plan)),
        ("notes", [*plan.notes]),
    ]
    wrong = {problem.line for problem in found}
    table: list[str] = []
    for name, lines in sections:
        table += [f"{name}:"] if lines else []
        for one in lines:
            mark = "  <── does not fit" if one[:_WIDTH].strip() in wrong else ""
            table.append(f"  {one}{mark}")
    return "\n".join(table)


def with_typed_names(plan: Plan, typed: Config) -> Plan:
    """The plan for its report: models of runs and checkpoints by the names that were typed, too.

    typed: the config before models took the places of such names.
    """

    def both(name: str, resolved: str) -> str:
        return name if name == resolved else f"{name} (of {resolved})"

    config = plan.config
    model = replace(config.model, name=both(typed.model.name, config.model.name))
    reference = config.ref_model
    if typed.ref_model.name is not None and reference.name is not None:
        reference = replace(reference, name=both(typed.ref_model.name, reference.name))
    return replace(plan, config=replace(config, model=model, ref_model=reference))


def advice(plan: Plan, found: Sequence[Problem], machine: Machine) -> str:
    """All problems, and the smallest set of changes that mends, on `machine`, those of devices, memory and disk."""
    lines = ["this cannot work:", *(f"  {problem.text}" for problem in found)]
    settings = remedy(plan, machine)
    if settings:
        lines += ["the smallest set of changes that fits:", f"  {' '.join(map(str, settings))}"]
    elif settings is None:
        lines.append(
            "no change of up to four keys makes it fit here: take a smaller model, or a larger machine (plan.*)"
        )
    return "\n".join(lines)


def line(name: str, text: str) -> str:
    return f"{name:{_WIDTH}}{text}"


def _device_lines(plan: Plan) -> list[str]:
    devices, shards = plan.devices, plan.learner.shard_size
    learner = _where(devices.train)
    if devices.ranks > 1:
        sharded = "over all of them" if shards == devices.ranks else f"in groups of {shards}"
        nodes, kind = devices.ranks // devices.ranks_per_node, "no GPU" if devices.on_cpu else "a GPU"
        if devices.on_cluster:
            learner = f"{devices.ranks_per_node} on each of {nodes} node(s) of the Ray cluster, {kind} each"
        learner = f"{devices.ranks} ranks, parameters sharded {sharded}: {learner}"
    lines = [line("train_model", learner), line("ref_model", _reference_at(plan))]
    kind = "in this process" if devices.in_process else "Ray actor"
    for index, engine in enumerate(devices.engines):
        where = _where(engine, devices.on_cluster)
        lines.append(line(f"engine {index}", f"{where}, {plan.engine.backend}, {plan.engine.dtype}, {kind}"))
    return [*lines, line("weights", f"travel by {plan.transport} in {plan.weight_dtype}")]


def _reference_at(plan: Plan) -> str:
    """Home, scorers, whether it teaches, and the model where it is not the policy as it begins."""
    config, reference = plan.config, plan.reference
    place: str = reference.home
    if place == "own devices":
        ranks, shards = reference.ranks, reference.shard_size
        copies = f": {ranks // shards} copies that share out the microbatches, Ray actors"
        if ranks == 1:
            copies = ", Ray actor"
        elif shards == ranks:
            copies = f": {ranks} ranks, parameters sharded over all of them, Ray actors"
        elif shards > 1:
            groups = f"in groups of {shards} that share out the microbatches"
            copies = f": {ranks} ranks, parameters sharded {groups}, Ray actors"
        place = _where(reference.devices, plan.devices.on_cluster) + copies
    if config.policy.distill_coef != 0:
        sees = "" if config.policy.teacher_prompt is None else ", which sees policy.teacher_prompt"
        place += f"; the teacher{sees}"
    given = config.ref_model.name is not None or config.ref_model.dtype is not None
    if not given or reference.home in ("none", "base of the LoRA policy"):
        return place
    return f"{place}; {config.reference_model.name}, {config.reference_model.dtype}"


def _where(devices: tuple[int, ...], on_cluster: bool = False) -> str:
    if on_cluster:
        return f"{len(devices) or 'no'} GPU(s) of the Ray cluster"
    return f"GPU {', '.join(map(str, devices))}" if devices else "CPU"


def _batch_lines(plan: Plan) -> list[str]:
    config, ranks = plan.config, plan.config.train_model.ranks
    steps, limit = plan.learner.microbatches, config.train.max_tokens_per_microbatch
    shared = f"{ranks} ranks x " if ranks > 1 else ""
    pieces = f"{shared}{steps} microbatches x {plan.learner.microbatch_rows}"
    if limit is not None:
        pieces = f"{shared}at least {steps} microbatches of at most {limit} positions"
    groups = f"{config.prompts_per_iteration} prompts x {config.env.repeats} completions"
    count = f"{config.optimizer_steps_per_iteration} steps per iteration"
    positions = f"{microbatch_tokens(config, plan.shape)} positions in a microbatch"
    tokens = config.optim_batch_size * longest_row(config)
    return [
        line("iteration", f"{groups} = {config.completions_per_iteration} completions"),
        line("minibatch", f"{config.optim_batch_size} completions = {pieces}; {count}"),
        line("tokens", f"up to {tokens} per optimizer step, {positions}"),
        line("run", f"{config.total_iterations} iterations, {config.total_optimizer_steps} optimizer steps"),
    ]


def _memory_lines(plan: Plan) -> list[str]:
    shape, machine = plan.shape, plan.machine
    if shape is None:
        return [_unknown(plan.config.model.name), *_scorer_lines(plan)]
    lines = [
        f"{shape.parameters / 1e6:.1f} million parameters; estimates without libraries and fragmentation"
    ]
    on_cpu = plan.devices.on_cpu
    where = "learner" if on_cpu else "each training GPU"
    if not on_cpu and machine.gpu_memory_gib is not None:
        lines.append(line("usable", f"{where}: {gib(usable_bytes(machine.gpu_memory_gib))}"))
    for phase in plan.phases:
        lines.append(line(phase.name, f"{where}: {gib(phase.bytes)}"))
        lines += map(_use, phase.uses)
    lines += _scorer_lines(plan)
    there = _known(machine.host_memory_gib, "", "[plan.host_memory_gib]")
    lines.append(line("host memory", f"{gib(host_bytes(plan, shape))} of {there}"))
    return [*lines, *map(_use, host_uses(plan, shape))]


def _scorer_lines(plan: Plan) -> list[str]:
    """The size of another model than the policy's, and on GPUs the memory of a scorer."""
    name, shape = plan.config.ref_model.name, plan.reference_shape
    lines = []
    if name is not None and plan.reference.home != "none":
        known = "" if shape is None else f"{shape.parameters / 1e6:.1f} million parameters of {name}"
        lines.append(known or _unknown(name))
    scorer = None if plan.devices.on_cpu else scorer_phase(plan)
    if scorer is None:
        return lines
    return [*lines, line(scorer.name, f"each scorer GPU: {gib(scorer.bytes)}"), *map(_use, scorer.uses)]


def _unknown(model: str) -> str:
    return f"unknown: config.json of {model} is not on this machine yet"


def _known(size: float | None, what: str, knob: str) -> str:
    """A size in GiB, or that nobody knows it and which setting tells it."""
    return f"an unknown size  {knob}" if size is None else f"{size:.2f} GiB{what}"


def _use(use: Use) -> str:
    return f"  {gib(use.bytes):>12}  {use.what}  [{use.knobs}]"


def _generation_lines(plan: Plan) -> list[str]:
    shape, config, engine = plan.shape, plan.config, plan.engine
    if shape is None:
        return []
    on_cpu = plan.devices.on_cpu
    one = kv_bytes_per_sequence(config, shape, engine.dtype)
    weights = engine_weights(config, shape, engine.dtype, on_cpu and engine.backend == "vllm")
    knobs = "[inference_model.dtype, tensor_parallel_size]"
    length = "[inference_model.max_tokens, env.max_prompt_tokens]"
    lines = [
        line("engine weights", f"{gib(weights)} on each device of an engine  {knobs}"),
        line("a sequence", f"{config.max_model_len} tokens, {gib(one)} of KV cache  {length}"),
    ]
    cache = cache_on_device(plan, shape)
    if engine.backend != "vllm":
        return [*lines, line("KV cache", f"grows to {gib(cache or 0.0)}  [inference_model.max_num_seqs]")]
    if cache is None:
        share = f"{engine.gpu_memory_utilization:g} of a GPU less {gib(weights)}"
        return [*lines, line("KV cache", f"{share}; 1 GiB holds {GIB / one:.1f} sequences")]
    knob = "gpu_memory_utilization" if engine.kv_cache_bytes is None else "kv_cache_gib"
    held = f"{gib(max(0.0, cache))} hold {max(0.0, cache) / one:.1f} full sequences; at most {engine.max_num_seqs} run"
    if not on_cpu:
        lines.append(line("share of a GPU", f"{engine.gpu_memory_utilization:g}"))
    return [*lines, line("KV cache", f"{held}  [inference_model.{knob}, max_num_seqs]")]


def _checkpoint_lines(plan: Plan) -> list[str]:
    if plan.shape is None:
        return []
    one, count = checkpoint_bytes(plan.config, plan.shape), checkpoints_kept(plan.config)
    model = model_bytes(plan.config, plan.shape)
    free = _known(plan.machine.disk_gib, " free", "[plan.disk_gib]")
    knobs = "[train.keep_checkpoints, train.checkpoint_frequency]"
    whole = f"{gib(one)} each, at most {count} at a time: {gib(one * count)} of {free}  {knobs}"
    models = f"{gib(model)} each, at most {count}: {gib(model * count)}  [train.export]"
    return [line("checkpoints", whole), *([line("models of them", models)] if model else [])]


def idle_keys(plan: Plan) -> list[str]:
    """Keys that differ from their defaults and that nothing in this run reads."""
    config, usual = plan.config, Config()
    vllm, gpu = plan.engine.backend == "vllm", not plan.devices.on_cpu
    scores, taught = config.policy.uses_reference, config.policy.distill_coef != 0
    copied = plan.reference.home != "base of the LoRA policy"
    no_score = "nothing scores with ref_model: policy.kl_coef=0 and policy.distill_coef=0"
    asynchronous = "max_policy_age stale_groups weight_update_frequency buffer_groups"
    idle: list[str] = []
    for active, section, keys, why in (
        (vllm, "inference_model", "kv_cache_gib enforce_eager quantization", "vLLM only"),
        (
            vllm and gpu,
            "inference_model",
            "gpu_memory_utilization max_num_batched_tokens",
            "vLLM on a GPU only",
        ),
        (gpu, "inference_model", "colocate", "there is no GPU"),
        (plan.overlapped, "inference_model", "update", "nothing is in flight when grpo.py pushes"),
        (plan.overlapped, "train", asynchronous, "grpo_async.py only"),
        (scores, "ref_model", "name dtype num_devices shard_size devices", no_score),
        (copied or not scores, "ref_model", "dtype", "the base of the LoRA policy is the reference"),
        (scores, "policy", "kl_estimator", "policy.kl_coef=0"),
        (config.policy.kl_coef != 0, "policy", "kl_placement", "policy.kl_coef=0"),
        (taught, "policy", "distill_log_prob distill_estimator distill_clamp", "policy.distill_coef=0"),
        (not plan.devices.in_process, "ray", "num_cpus_per_engine", "the engine is not a Ray actor"),
    ):
        for key in () if active else keys.split():
            value = vars(vars(config)[section])[key]
            if value != vars(vars(usual)[section])[key]:
                idle.append(f"{section}.{key}={value}: {why}")
    return idle
