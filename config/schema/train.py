"""The `train` section: length, batches, precision, checkpoints, and how old a group may be."""

from dataclasses import dataclass

from config.schema.values import above_0, at_least, check_fields, one_of


@dataclass
class TrainConfig:
    """Length of the run, batch sizes, precision, checkpoints, and the limits of the overlapped schedule."""

    seed: int = 0
    """Fixes the order of the prompts and every random draw."""
    total_dialog_turns: int = 100_000
    """Completions, not turns, that the whole run trains on."""
    dialog_turns_per_batch: int | None = None
    """Completions, not turns, of one iteration. Unset: `env.num_envs * env.repeats`."""
    optim_batch_size: int | None = None
    """Completions per optimizer step. Unset: all of an iteration's."""
    gradient_accumulation_steps: int = 1
    """Microbatches per optimizer step, of about equal size; changes memory, not the gradient."""
    max_tokens_per_microbatch: int | None = None
    """Positions of a microbatch at most, prompts, responses and padding; a single longer response goes alone. Needs it
    more microbatches than `gradient_accumulation_steps`, there are more. Unset: no limit."""
    epochs: int = 1
    """Passes over an iteration's completions."""
    mixed_precision: str = "fp32"
    """Arithmetic of forward and backward: `fp32`, `bf16`, `fp16` (with a gradient scaler)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    packing: bool = True
    """A microbatch goes through the model as one sequence without padding, each prompt once (exact); by an attention
    of its own, whatever `model.attn_implementation` says. Models with sliding windows or recurrent layers take whole,
    padded rows all the same."""
    compile: bool = False
    """Each decoder layer is compiled (torch.compile): the first step takes up to 100 s on a CPU, later ones 6 to 11%
    less time (docs/scaling.md); the same numbers to rounding. Needs a C++ compiler."""
    log_prob_chunk_size: int | None = None
    """Response tokens whose logits exist at one time, [chunk, vocabulary]. Unset: by the head's size."""
    checkpoint_frequency: int = 100
    """Iterations between checkpoints; 0 keeps only the one at the end."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept; older ones are removed. 0 keeps all. A run that is resumed from an earlier
    checkpoint removes the later ones in any case."""
    keep_best: str | None = None
    """A metric of evaluation such as `eval/SET/pass@1`: the checkpoint with its highest value is kept too, and one is
    written after an evaluation that gives a higher one. `checkpoints/best` and `models/best` name it."""
    export: bool = True
    """Beside each checkpoint that is kept, a folder in Hugging Face format, `models/checkpoint_000040`, and `model`,
    the newest: as much disk space each as the model's weights in `model.dtype`. A LoRA adapter is merged, and lies in
    `adapter` beside that."""
    async_checkpoint: bool = True
    """The run goes on while a checkpoint is written, from a copy in the host's memory; otherwise it waits."""
    resume: str | None = None
    """A checkpoint, the folder of a run (its newest one), or `auto`: of this run's folder or the newest run like it."""
    restarts: int = 0
    """How often a run whose learner rank was lost goes on by itself, from its newest checkpoint."""
    max_nonfinite_steps: int = 3
    """Optimizer steps with a non-finite loss or gradient in a row after which the run stops."""
    deterministic: bool = True
    """On a CPU the same config and seed give the same bits; on a GPU slower kernels where they exist."""
    max_policy_age: int = 1
    """grpo_async.py: versions that a group may lag behind the trainer when it is consumed."""
    stale_groups: str = "drop"
    """grpo_async.py: a group beyond `max_policy_age` is dropped, or with `wait` never started too early."""
    weight_update_frequency: int = 1
    """grpo_async.py: optimizer steps between two weight pushes, rounded up to whole batches of `epochs` steps."""
    buffer_groups: int | None = None
    """grpo_async.py: finished groups that may wait for the learner. Unset: two optimizer steps' worth."""
    on_alarm: str = "say"
    """What an alarm of the doctor (docs/doctor.md) does: `say` it; `checkpoint`, write one at the end of the iteration;
    `stop`, end the run there with a checkpoint and exit code 1. Warnings are said and no more."""
    weight_check_every: int = 10
    """Pushes from one comparison of engines and learner by fixed sequences to the next (docs/devices.md). At the first
    push, with new engines and before evaluations they are compared in any case; the sampled tokens after every push."""
    on_mismatch: str = "stop"
    """What happens when engines do not give the learner's log-probs: `stop` the run, or `say` it and go on."""
    wait_timeout_s: float = 600.0
    """Seconds that the learner may wait for groups, a push for the engines, or the run for a checkpoint, before the
    run stops."""

    def __post_init__(self) -> None:
        one_of("train.mixed_precision", self.mixed_precision, ("fp32", "bf16", "fp16"))
        check_fields("train", self, ("wait_timeout_s",), above_0, "must be above 0")
        one_of("train.on_alarm", self.on_alarm, ("say", "checkpoint", "stop"))
        one_of("train.on_mismatch", self.on_mismatch, ("stop", "say"))
        one_of("train.stale_groups", self.stale_groups, ("drop", "wait"))
        counts = (
            "weight_check_every", "total_dialog_turns", "gradient_accumulation_steps", "epochs", "max_nonfinite_steps",
            "weight_update_frequency", "log_prob_chunk_size", "max_tokens_per_microbatch",
        )  # fmt: skip
        for key in counts:
            at_least(f"train.{key}", vars(self)[key], 1)
        for key in ("checkpoint_frequency", "keep_checkpoints", "max_policy_age", "restarts"):
            at_least(f"train.{key}", vars(self)[key], 0)
