"""Formats the plan's table, problems and remedy for `run=plan`, and lists keys without effect.

Lines of the table that do not fit the machine are marked.
"""

from collections.abc import Sequence
from dataclasses import replace

from config.schema.agent import max_agents
from config.schema.config import Config
from torchgrpo.plan.disk import checkpoint_bytes, exported_model_bytes, max_stored_checkpoints
from torchgrpo.plan.host_memory import host_bytes, host_uses
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.memory import MemoryUse, engine_weight_bytes, format_gib, kv_bytes_per_sequence, usable_bytes
from torchgrpo.plan.microbatch_sizes import longest_row_tokens, microbatch_tokens
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan, kv_cache_per_device, scorer_phase
from torchgrpo.plan.problems import Problem
from torchgrpo.plan.remedies import find_remedy
from torchgrpo.plan.server_command import server_command

NAME_WIDTH = 17


def format_plan(plan: Plan, problems: Sequence[Problem]) -> str:
    """Formats the table of a plan. problems: problems of this plan, whose lines are marked."""
    machine = plan.machine
    size = "" if machine.gpu_memory_gib is None else f" of {machine.gpu_memory_gib:g} GiB"
    gpus = f"{machine.num_gpus} GPU(s){size}" if machine.num_gpus else "no GPU"
    nodes = f"{machine.nodes} nodes, each with " if machine.nodes > 1 else ""
    host, disk = machine.host_memory_gib, machine.disk_gib
    memory = "host memory not known (machine.host_memory_gib)" if host is None else f"{host:.0f} GiB of memory"
    free = "free disk not known (machine.disk_gib)" if disk is None else f"{disk:.0f} GiB of free disk"
    kind = "planned for" if machine.is_hypothetical else "this machine"
    sections = [
        ("machine", [format_line(kind, f"{nodes}{gpus}, {memory}, {free}")]),
        ("devices", _device_lines(plan)),
        ("batches", _batch_lines(plan)),
        ("memory", _memory_lines(plan)),
        ("generation", _generation_lines(plan)),
        ("checkpoints", _checkpoint_lines(plan)),
        ("keys that do nothing here", unused_keys(plan)),
        ("notes", [*plan.notes]),
    ]
    wrong = {problem.line for problem in problems}
    table: list[str] = []
    for name, lines in sections:
        table += [f"{name}:"] if lines else []
        for one in lines:
            mark = "  <── does not fit" if one[:NAME_WIDTH].strip() in wrong else ""
            table.append(f"  {one}{mark}")
    return "\n".join(table)


def with_original_names(plan: Plan, original_config: Config) -> Plan:
    """Adds the original names of runs and checkpoints to the plan's model names.

    original_config: the config before names of runs and checkpoints were resolved to models.
    """

    def full_name(name: str, model_name: str) -> str:
        return name if name == model_name else f"{name} (of {model_name})"

    config = plan.config
    model = replace(config.model, name=full_name(original_config.model.name, config.model.name))
    reference = config.ref_model
    if original_config.ref_model.name is not None and reference.name is not None:
        reference = replace(reference, name=full_name(original_config.ref_model.name, reference.name))
    return replace(plan, config=replace(config, model=model, ref_model=reference))


def format_advice(plan: Plan, problems: Sequence[Problem], machine: Machine) -> str:
    """Formats all problems, and the smallest set of changes that fits the plan to `machine`.

    The changes address problems of devices, memory and disk.
    """
    lines = ["this plan cannot work:", *(f"  {problem.text}" for problem in problems)]
    settings = find_remedy(plan, machine)
    if settings:
        lines += ["the smallest set of changes that fits:", f"  {' '.join(map(str, settings))}"]
    elif settings is None:
        lines.append(
            "no change of up to four keys makes the run fit here: choose a smaller model, or a larger "
            "machine (machine.*)"
        )
    return "\n".join(lines)


def format_line(name: str, text: str) -> str:
    """Formats one line of a table: a name of fixed width, then text."""
    return f"{name:{NAME_WIDTH}}{text}"


def _device_lines(plan: Plan) -> list[str]:
    devices, shards = plan.devices, plan.learner.shard_size
    learner = _devices_text(devices.train)
    if devices.ranks > 1:
        sharded = "over all of them" if shards == devices.ranks else f"in groups of {shards}"
        nodes, kind = devices.ranks // devices.ranks_per_node, "no GPU" if devices.on_cpu else "a GPU"
        if devices.on_cluster:
            learner = f"{devices.ranks_per_node} on each of {nodes} node(s) of the Ray cluster, {kind} each"
        size = plan.config.train_model.context_parallel
        shared = f"each microbatch on {size} of them, " if size > 1 else ""
        learner = f"{devices.ranks} ranks, {shared}parameters sharded {sharded}: {learner}"
    lines = [format_line("train_model", learner), format_line("ref_model", _reference_text(plan))]
    kind = "in this process" if devices.in_process else "Ray actor"
    urls = plan.config.inference_model.urls
    for index, url in enumerate(urls):
        lines.append(format_line(f"engine {index}", f"{url}, {plan.engine.dtype}, started by you:"))
        lines.append(format_line("", server_command(plan, url)))
    for index, engine in enumerate(() if urls else devices.engines):
        where = _devices_text(engine, devices.on_cluster)
        lines.append(format_line(f"engine {index}", f"{where}, {plan.engine.backend}, {plan.engine.dtype}, {kind}"))
    return [*lines, format_line("weights", f"travel by {plan.transport} in {plan.weight_dtype}")]


def _reference_text(plan: Plan) -> str:
    """Describes the reference: its location, scorers, role as a teacher, and model.

    The model is omitted if it is the initial policy.
    """
    config, reference = plan.config, plan.reference
    place: str = reference.home
    if place == "own devices":
        ranks, shards = reference.ranks, reference.shard_size
        copies = f": {ranks // shards} copies that split the microbatches, Ray actors"
        if ranks == 1:
            copies = ", Ray actor"
        elif shards == ranks:
            copies = f": {ranks} ranks, parameters sharded over all of them, Ray actors"
        elif shards > 1:
            groups = f"in groups of {shards} that split the microbatches"
            copies = f": {ranks} ranks, parameters sharded {groups}, Ray actors"
        place = _devices_text(reference.devices, plan.devices.on_cluster) + copies
    if config.policy.distill_coef != 0:
        sees = "" if config.policy.teacher_prompt is None else ", which sees policy.teacher_prompt"
        place += f"; the teacher{sees}"
    has_own_settings = config.ref_model.name is not None or config.ref_model.dtype is not None
    if not has_own_settings or reference.home in ("none", "base of the LoRA policy"):
        return place
    return f"{place}; {config.reference_model.name}, {config.reference_model.dtype}"


def _devices_text(devices: tuple[int, ...], on_cluster: bool = False) -> str:
    if on_cluster:
        return f"{len(devices) or 'no'} GPU(s) of the Ray cluster"
    return f"GPU {', '.join(map(str, devices))}" if devices else "CPU"


def _batch_lines(plan: Plan) -> list[str]:
    config, size = plan.config, plan.config.train_model.context_parallel
    sharing = config.train_model.microbatch_groups
    steps, limit = plan.learner.microbatches, config.train.max_tokens_per_microbatch
    unit = f"groups of {size} ranks" if size > 1 else "ranks"
    shared = f"{sharing} {unit} x " if sharing * size > 1 else ""
    microbatches = f"{shared}{steps} microbatches x {plan.learner.microbatch_rows}"
    if limit is not None:
        microbatches = f"{shared}at least {steps} microbatches of at most {limit} positions"
    groups = f"{config.prompts_per_iteration} prompts x {config.env.repeats} completions"
    count = f"{config.optimizer_steps_per_iteration} steps per iteration"
    positions = f"{microbatch_tokens(config, plan.shape)} positions in a microbatch"
    tokens = config.optim_batch_size * longest_row_tokens(config)
    compiled = "compiled" if plan.learner.compiles else "not compiled"
    return [
        format_line("iteration", f"{groups} = {config.completions_per_iteration} completions"),
        format_line("minibatch", f"{config.optim_batch_size} completions = {microbatches}; {count}"),
        format_line("tokens", f"up to {tokens} per optimizer step, {positions}"),
        format_line("layers", f"{compiled}; recomputed activations: {plan.learner.recomputation}"),
        format_line("run", f"{config.total_iterations} iterations, {config.total_optimizer_steps} optimizer steps"),
    ]


def _memory_lines(plan: Plan) -> list[str]:
    shape, machine = plan.shape, plan.machine
    if shape is None:
        return [_unknown_model_text(plan.config.model.name), *_scorer_lines(plan)]
    lines = [f"{shape.parameters / 1e6:.1f} million parameters; estimates without libraries and fragmentation"]
    on_cpu = plan.devices.on_cpu
    where = "learner" if on_cpu else "each training GPU"
    if not on_cpu and machine.gpu_memory_gib is not None:
        lines.append(format_line("usable", f"{where}: {format_gib(usable_bytes(machine.gpu_memory_gib))}"))
    for phase in plan.phases:
        lines.append(format_line(phase.name, f"{where}: {format_gib(phase.bytes)}"))
        lines += map(_use_line, phase.uses)
    lines += _scorer_lines(plan)
    host_memory = _size_text(machine.host_memory_gib, "", "[machine.host_memory_gib]")
    lines.append(format_line("host memory", f"{format_gib(host_bytes(plan, shape))} of {host_memory}"))
    return [*lines, *map(_use_line, host_uses(plan, shape))]


def _scorer_lines(plan: Plan) -> list[str]:
    """Returns the lines about a separate reference model and its scorers."""
    name, shape = plan.config.ref_model.name, plan.reference_shape
    lines = []
    if name is not None and plan.reference.home != "none":
        size = "" if shape is None else f"{shape.parameters / 1e6:.1f} million parameters of {name}"
        lines.append(size or _unknown_model_text(name))
    scorer = None if plan.devices.on_cpu else scorer_phase(plan)
    if scorer is None:
        return lines
    return [
        *lines,
        format_line(scorer.name, f"each scorer GPU: {format_gib(scorer.bytes)}"),
        *map(_use_line, scorer.uses),
    ]


def _unknown_model_text(model: str) -> str:
    return f"unknown: config.json of {model} is not on this machine yet"


def _size_text(size: float | None, suffix: str, knob: str) -> str:
    """Formats a size in GiB, or names the setting of an unknown size."""
    return f"an unknown size  {knob}" if size is None else f"{size:.2f} GiB{suffix}"


def _use_line(use: MemoryUse) -> str:
    return f"  {format_gib(use.bytes):>12}  {use.name}  [{use.knobs}]"


def _generation_lines(plan: Plan) -> list[str]:
    shape, config, engine = plan.shape, plan.config, plan.engine
    if shape is None:
        return []
    if engine.backend == "http":
        return list(_episode_lines(plan))
    on_cpu = plan.devices.on_cpu
    one = kv_bytes_per_sequence(config, shape, engine.dtype)
    weights = engine_weight_bytes(config, shape, engine.dtype, on_cpu and engine.backend == "vllm")
    knobs = "[inference_model.dtype, tensor_parallel_size]"
    length = "[inference_model.max_tokens, env.max_prompt_tokens]"
    lines = [
        format_line("engine weights", f"{format_gib(weights)} on each device of an engine  {knobs}"),
        format_line("a sequence", f"{config.max_model_len} tokens, {format_gib(one)} of KV cache  {length}"),
        *_episode_lines(plan),
    ]
    cache = kv_cache_per_device(plan, shape)
    if engine.backend != "vllm":
        return [*lines, format_line("KV cache", f"grows to {format_gib(cache or 0.0)}  [inference_model.max_num_seqs]")]
    if cache is None:
        share = f"{engine.gpu_memory_utilization:g} of a GPU less {format_gib(weights)}"
        return [*lines, format_line("KV cache", f"{share}; 1 GiB holds {GIB / one:.1f} sequences")]
    knob = "gpu_memory_utilization" if engine.kv_cache_bytes is None else "kv_cache_gib"
    size = max(0.0, cache)
    capacity = f"{format_gib(size)} hold {size / one:.1f} full sequences; at most {engine.max_num_seqs} run"
    if not on_cpu:
        lines.append(format_line("share of a GPU", f"{engine.gpu_memory_utilization:g}"))
    if plan.devices.colocated:
        state = "the engine sleeps" if engine.sleeps else "the engine stays awake"
        lines.append(format_line("while training", f"{state}  [inference_model.sleep]"))
    return [*lines, format_line("KV cache", f"{capacity}  [inference_model.{knob}, max_num_seqs]")]


def _episode_lines(plan: Plan) -> list[str]:
    """Describes the episodes of a run with several turns."""
    config, env = plan.config, plan.config.env
    if not env.plays_episodes:
        return []
    groups = config.groups_in_flight if plan.is_overlapped else config.prompts_per_iteration
    alive = groups * env.candidates if plan.is_overlapped else -(-groups * env.candidates // len(plan.devices.engines))
    if env.episodes is not None:
        alive = min(alive, env.episodes)
    elif env.agent is not None:
        alive = min(alive, -(-max_agents() // len(plan.devices.engines)))
    turn = "" if env.turn_tokens is None else f" of {env.turn_tokens} tokens"
    tokens = f"at most {env.turn_limit} turns{turn}, {config.response_tokens} tokens with all replies"
    seconds = f"{env.episode_timeout_s:g} s"
    knobs = "[env.episodes, env.max_steps, env.max_episode_tokens, env.episode_timeout_s]"
    return [format_line("episodes", f"{alive} alive on an engine, {tokens}, {seconds}  {knobs}")]


def _checkpoint_lines(plan: Plan) -> list[str]:
    if plan.shape is None:
        return []
    one, count = checkpoint_bytes(plan.config, plan.shape), max_stored_checkpoints(plan.config)
    model = exported_model_bytes(plan.config, plan.shape)
    free = _size_text(plan.machine.disk_gib, " free", "[machine.disk_gib]")
    knobs = "[train.keep_checkpoints, train.checkpoint_frequency]"
    whole = f"{format_gib(one)} each, at most {count} at a time: {format_gib(one * count)} of {free}  {knobs}"
    models = f"{format_gib(model)} each, at most {count}: {format_gib(model * count)}  [train.export]"
    return [format_line("checkpoints", whole), *([format_line("exported models", models)] if model else [])]


def unused_keys(plan: Plan) -> list[str]:
    """Returns changed keys that have no effect in this run, with the reason."""
    config, defaults = plan.config, Config()
    vllm, gpu = plan.engine.backend == "vllm", not plan.devices.on_cpu
    scores, has_teacher = config.policy.uses_reference, config.policy.distill_coef != 0
    has_separate_reference = plan.reference.home != "base of the LoRA policy"
    no_score = "nothing scores with ref_model: policy.kl_coef=0 and policy.distill_coef=0"
    episodes, has_tools = "episodes turn_tokens turn_ends history max_episode_tokens", config.env.plays_episodes
    asynchronous = "max_policy_age stale_groups weight_update_frequency buffer_groups"
    unused: list[str] = []
    for is_active, section, keys, reason in (
        (vllm, "inference_model", "kv_cache_gib enforce_eager quantization", "vLLM only"),
        (vllm and gpu, "inference_model", "gpu_memory_utilization max_num_batched_tokens", "vLLM on a GPU only"),
        (gpu, "inference_model", "colocate", "there is no GPU"),
        (vllm and plan.devices.colocated, "inference_model", "sleep", "engine and learner share no GPU"),
        (plan.is_overlapped, "inference_model", "update", "nothing is in flight when grpo.py pushes"),
        (plan.is_overlapped, "train", asynchronous, "grpo_async.py only"),
        (scores, "ref_model", "name dtype num_devices shard_size devices", no_score),
        (has_separate_reference or not scores, "ref_model", "dtype", "the base of the LoRA policy is the reference"),
        (scores, "policy", "kl_estimator", "policy.kl_coef=0"),
        (config.policy.kl_coef != 0, "policy", "kl_placement", "policy.kl_coef=0"),
        (has_teacher, "policy", "distill_log_prob distill_estimator distill_clamp", "policy.distill_coef=0"),
        (config.env.plays_episodes, "env", episodes, "completions have one turn"),
        (has_tools, "env", "tool_parser tool_result_characters", "there are no tools: env.tools"),
        (not plan.devices.in_process, "ray", "num_cpus_per_engine", "the engine is not a Ray actor"),
    ):
        for key in () if is_active else keys.split():
            value = vars(vars(config)[section])[key]
            if value != vars(vars(defaults)[section])[key]:
                unused.append(f"{section}.{key}={value}: {reason}")
    return unused
