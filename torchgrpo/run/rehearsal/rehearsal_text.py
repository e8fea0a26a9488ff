"""What `run=rehearse` prints: the peak of every phase by kind, what is sent, the seconds, what is assumed."""

from collections.abc import Iterator

from torchgrpo.plan.memory import gib, usable_bytes
from torchgrpo.plan.microbatches import rows_at_a_time
from torchgrpo.plan.model_shape import GIB, ModelShape
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_text import line
from torchgrpo.plan.problems import Problem
from torchgrpo.run.rehearsal.roofline import TERA, seconds, theory
from torchgrpo.run.rehearsal.step import Peaks, Rehearsal, fullest, peak

KNOBS = {
    "parameters": "train_model.num_devices, train_model.offload=all, model.dtype",
    "optimizer": "train_model.num_devices, train_model.offload, train_model.lora.enabled",
    "gradients": "train_model.num_devices, train_model.offload=all, train_model.lora.enabled",
    "gradients on their way": "train_model.lora.enabled",
    "gathered parameters": "model.name",
    "reference": "ref_model.num_devices, ref_model.dtype, train_model.num_devices",
    "activations": "train.gradient_accumulation_steps, train.gradient_checkpointing, inference_model.max_tokens",
    "temporary": "train.gradient_accumulation_steps, train.log_prob_chunk_size",
}
"""By kind, the keys that change it."""


def room(plan: Plan) -> float | None:
    """Bytes that a rank may take; None where its memory is not known."""
    machine = plan.machine
    if plan.devices.on_cpu:
        host = machine.host_memory_gib
        return None if host is None else host * GIB / plan.devices.ranks_per_node
    return None if machine.gpu_memory_gib is None else usable_bytes(machine.gpu_memory_gib)


def too_large(plan: Plan, peaks: Peaks) -> list[Problem]:
    """Every phase that does not fit, with the kind that is largest in it."""
    there = room(plan)
    found = []
    for phase, held in peaks.items():
        if there is not None and held.total() > there:
            kind, size = held.most_common(1)[0]
            text = (
                f"phase {phase} takes {gib(held.total())} of a rank and {gib(there)} are there; the largest part is "
                f"{kind} with {gib(size)}: change {KNOBS[kind]}"
            )
            found.append(Problem(phase, text))
    return found


def report(plan: Plan, shape: ModelShape, rehearsal: Rehearsal) -> str:
    """The whole table. shape: the plan's."""
    sections = {
        "one learner rank": _rank(plan, shape),
        "memory": _memory(plan, rehearsal.peaks),
        "sent in a microbatch": _sent(plan, shape, rehearsal),
        "time of an optimizer step": _time(plan, rehearsal),
        "assumed": _assumed(plan),
    }
    return "\n".join(
        "\n".join([f"{name}:", *(f"  {one}" for one in lines)]) for name, lines in sections.items()
    )


def _rank(plan: Plan, shape: ModelShape) -> Iterator[str]:
    devices, learner, config = plan.devices, plan.learner, plan.config
    nodes = devices.ranks // devices.ranks_per_node
    yield line("model", f"{config.model.name}, {shape.parameters / 1e9:.2f} billion parameters")
    yield line("rank", f"0 of {devices.ranks} on {nodes} node(s), shards over {learner.shard_size}")
    longest = f"{config.env.max_prompt_tokens} + {config.inference_model.max_tokens} tokens"
    yield line("microbatch", f"{rows_at_a_time(config, shape)} completions of {longest}, all at their limits")


def _memory(plan: Plan, peaks: Peaks) -> Iterator[str]:
    there = room(plan)
    if there is not None:
        yield line("usable", gib(there))
    wrong = {problem.line for problem in too_large(plan, peaks)}
    for phase, held in peaks.items():
        mark = "  <── does not fit" if phase in wrong else ""
        largest = ", the peak" if phase == fullest(peaks) else ""
        yield line(phase, f"{gib(held.total())}{largest}{mark}")
        for kind, size in held.most_common():
            if size > 1 << 20:
                yield f"  {gib(size):>12}  {kind}"
    planned = max((phase.bytes for phase in plan.phases), default=0.0)
    yield line("run=plan says", f"{gib(planned)}, {planned / peak(peaks):.2f} of it")


def _sent(plan: Plan, shape: ModelShape, rehearsal: Rehearsal) -> Iterator[str]:
    expected = theory(plan, shape)
    for name in ("all-gather", "reduce-scatter", "all-reduce"):
        calls, size = rehearsal.calls[name], rehearsal.sent[name]
        if calls:
            yield line(name, f"{gib(size)} in {calls} calls; in theory {gib(expected[name])}")
    if not rehearsal.calls:
        yield "nothing: the learner is one rank"


def _time(plan: Plan, rehearsal: Rehearsal) -> Iterator[str]:
    took = seconds(plan, rehearsal)
    yield line("arithmetic", f"{took.arithmetic:.3f} s a microbatch, {rehearsal.flops / TERA:.1f} TFLOP")
    yield line("memory", f"{took.memory:.3f} s a microbatch, {gib(rehearsal.moved)} read and written")
    yield line("links", f"{took.links:.3f} s a microbatch")
    yield line("optimizer", f"{took.step:.3f} s, {gib(rehearsal.moved_by_step)}")
    bound = max(("arithmetic", "memory", "links"), key=lambda name: vars(took)[name])
    yield line("together", f"{took.total:.1f} s: {took.microbatches} microbatches, bound by {bound}")


def _assumed(plan: Plan) -> Iterator[str]:
    figures = plan.config.plan
    yield line("arithmetic", f"{figures.gpu_tflops:g} TFLOP/s, all of it reached  [plan.gpu_tflops]")
    yield line("memory", f"{figures.gpu_bandwidth_gib_s:g} GiB/s of a GPU  [plan.gpu_bandwidth_gib_s]")
    yield line("link", f"{figures.link_gib_s:g} GiB/s of a GPU each way, in its node  [plan.link_gib_s]")
    yield line(
        "network", f"{figures.network_gib_s:g} GiB/s of a GPU each way, to others  [plan.network_gib_s]"
    )
    yield "bytes read and written are those of every operation for itself: no two are fused"
    yield "attention is one kernel that holds no mask; its FLOPs are those of the pairs that see each other"
    yield "fragmentation and libraries: 3% and 1.5 GiB of a GPU are kept free for them"
