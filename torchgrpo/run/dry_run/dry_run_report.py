"""Formats the output of `run=dry_run`, and finds phases that exceed the available memory."""

from collections.abc import Iterator

from torchgrpo.plan.memory import format_gib, usable_bytes
from torchgrpo.plan.microbatch_sizes import longest_microbatch_rows
from torchgrpo.plan.model_shape import GIB, TERA, ModelShape
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_report import format_line
from torchgrpo.plan.problems import Problem
from torchgrpo.run.dry_run.operation_prices import BANDWIDTH_SHARE, PRODUCT_SHARE
from torchgrpo.run.dry_run.roofline import collective_bytes, priced_step, step_seconds
from torchgrpo.run.dry_run.step import DryRun, Peaks, peak_bytes, peak_phase

KNOBS = {
    "parameters": "train_model.num_devices, train_model.offload=all, model.dtype",
    "optimizer": "train_model.num_devices, train_model.offload, train_model.lora.enabled",
    "gradients": "train_model.num_devices, train_model.offload=all, train_model.lora.enabled",
    "unsharded gradients": "train_model.lora.enabled",
    "gathered parameters": "model.name",
    "reference": "ref_model.num_devices, ref_model.dtype, train_model.num_devices",
    "activations": "train.gradient_accumulation_steps, train.gradient_checkpointing, train_model.context_parallel, "
    "inference_model.max_tokens",
    "temporary": "train.gradient_accumulation_steps, train.log_prob_chunk_size",
}
"""Config keys that change the memory of a kind of tensor."""


def available_bytes(plan: Plan) -> float | None:
    """Returns the bytes that a rank may use; None if its memory is unknown."""
    machine = plan.machine
    if plan.devices.on_cpu:
        host = machine.host_memory_gib
        return None if host is None else host * GIB / plan.devices.ranks_per_node
    return None if machine.gpu_memory_gib is None else usable_bytes(machine.gpu_memory_gib)


def oversized_phases(plan: Plan, peaks: Peaks) -> list[Problem]:
    """Returns a problem for each phase that does not fit the available memory."""
    available = available_bytes(plan)
    problems = []
    for phase, peak in peaks.items():
        if available is not None and peak.total() > available:
            kind, size = peak.most_common(1)[0]
            text = (
                f"phase {phase} needs {format_gib(peak.total())} on a rank and {format_gib(available)} are usable; "
                f"the largest part is {kind} with {format_gib(size)}: change {KNOBS[kind]}"
            )
            problems.append(Problem(phase, text))
    return problems


def format_dry_run(plan: Plan, shape: ModelShape, dry_run: DryRun) -> str:
    """Formats the table of a dry run. shape: the sizes of the plan's model."""
    sections = {
        "one learner rank": _rank_lines(plan, shape),
        "memory": _memory_lines(plan, dry_run.peaks),
        "sent in a microbatch": _traffic_lines(plan, shape, dry_run),
        "minimum time of an optimizer step": _time_lines(plan, dry_run),
        "priced time, not measured": _priced_lines(plan, shape, dry_run),
        "assumed": _assumption_lines(plan),
    }
    return "\n".join("\n".join([f"{name}:", *(f"  {row}" for row in lines)]) for name, lines in sections.items())


def _rank_lines(plan: Plan, shape: ModelShape) -> Iterator[str]:
    devices, learner, config = plan.devices, plan.learner, plan.config
    nodes = devices.ranks // devices.ranks_per_node
    yield format_line("model", f"{config.model.name}, {shape.parameters / 1e9:.2f} billion parameters")
    yield format_line("rank", f"0 of {devices.ranks} on {nodes} node(s), shards over {learner.shard_size}")
    longest = f"{config.env.max_prompt_tokens} + {config.response_tokens} tokens"
    yield format_line(
        "microbatch", f"{longest_microbatch_rows(config, shape)} completions of {longest}, all of maximum length"
    )


def _memory_lines(plan: Plan, peaks: Peaks) -> Iterator[str]:
    available = available_bytes(plan)
    if available is not None:
        yield format_line("usable", format_gib(available))
    oversized = {problem.line for problem in oversized_phases(plan, peaks)}
    for phase, peak in peaks.items():
        mark = "  <── does not fit" if phase in oversized else ""
        largest = ", the peak" if phase == peak_phase(peaks) else ""
        yield format_line(phase, f"{format_gib(peak.total())}{largest}{mark}")
        for kind, size in peak.most_common():
            if size > 1 << 20:
                yield f"  {format_gib(size):>12}  {kind}"
    planned_bytes = max((phase.bytes for phase in plan.phases), default=0.0)
    yield format_line(
        "plan estimate", f"{format_gib(planned_bytes)}, {planned_bytes / peak_bytes(peaks):.2f} of the peak"
    )


def _traffic_lines(plan: Plan, shape: ModelShape, dry_run: DryRun) -> Iterator[str]:
    expected = collective_bytes(plan, shape)
    for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        calls, size = dry_run.collective_calls[name], dry_run.sent_bytes[name]
        if calls:
            yield format_line(name, f"{format_gib(size)} in {calls} calls; in theory {format_gib(expected[name])}")
    if not dry_run.collective_calls:
        yield "nothing: the learner is one rank"


def _time_lines(plan: Plan, dry_run: DryRun) -> Iterator[str]:
    seconds = step_seconds(plan, dry_run)
    yield format_line("arithmetic", f"{seconds.arithmetic:.3f} s a microbatch, {dry_run.flops / TERA:.1f} TFLOP")
    yield format_line(
        "memory", f"{seconds.memory:.3f} s a microbatch, {format_gib(dry_run.moved_bytes)} read and written"
    )
    yield format_line("links", f"{seconds.links:.3f} s a microbatch")
    yield format_line("optimizer", f"{seconds.optimizer:.3f} s, {format_gib(dry_run.optimizer_moved_bytes)}")
    bound = max(("arithmetic", "memory", "links"), key=lambda name: vars(seconds)[name])
    yield format_line("together", f"{seconds.total:.1f} s: {seconds.microbatches} microbatches, bound by {bound}")


def _priced_lines(plan: Plan, shape: ModelShape, dry_run: DryRun) -> Iterator[str]:
    priced, is_compiled = priced_step(plan, shape, dry_run), plan.learner.compiles
    layers = "compiled layers" if is_compiled else "layers without fusion"
    yield format_line(
        "microbatch", f"{priced.microbatch:.3f} s in {len(dry_run.kernels)} kernels, {layers}  [train.compile]"
    )
    yield format_line("products", f"{priced.products:.3f} s of it in matrix products and attention")
    yield format_line("optimizer", f"{priced.optimizer:.3f} s in {len(dry_run.optimizer_kernels)} kernels")
    useful = f"{priced.useful_flops / TERA:.1f} useful TFLOP of {dry_run.flops / TERA:.1f} in a microbatch"
    yield format_line("priced MFU", f"{100 * priced.mfu:.1f}%: {useful}")


def _assumption_lines(plan: Plan) -> Iterator[str]:
    rates = plan.config.machine
    yield format_line("arithmetic", f"{rates.gpu_tflops:g} TFLOP/s, fully used  [machine.gpu_tflops]")
    yield format_line("memory", f"{rates.gpu_bandwidth_gib_s:g} GiB/s of a GPU  [machine.gpu_bandwidth_gib_s]")
    yield format_line("link", f"{rates.link_gib_s:g} GiB/s of a GPU each way, in its node  [machine.link_gib_s]")
    yield format_line(
        "network", f"{rates.network_gib_s:g} GiB/s of a GPU each way, to other nodes  [machine.network_gib_s]"
    )
    yield "minimum: every operation reads and writes its own bytes, no operations are fused"
    yield f"priced: products reach {PRODUCT_SHARE:.0%} of the arithmetic, other kernels {BANDWIDTH_SHARE:.0%} of memory"
    yield "attention is one kernel without a mask; its FLOPs count visible pairs of tokens only"
    yield "3% and 1.5 GiB of a GPU are kept free for fragmentation and libraries"
