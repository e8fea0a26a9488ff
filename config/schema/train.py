"""The `train` section: run length, batch sizes, precision, checkpoints, policy age, reactions to alarms."""

from dataclasses import dataclass

from config.schema.values import check_choice, check_fields, check_minimum, is_positive


@dataclass
class TrainConfig:
    """Length of the run, batch sizes, precision, checkpoints, and the limits of the overlapped schedule."""

    seed: int = 0
    """Seed of the prompt order and of all random numbers."""
    total_dialog_turns: int = 100_000
    """Completions, not turns, of the whole run."""
    dialog_turns_per_batch: int | None = None
    """Completions, not turns, of one iteration. Unset: `env.num_envs * env.repeats`."""
    optim_batch_size: int | None = None
    """Completions per optimizer step. Unset: all completions of an iteration."""
    gradient_accumulation_steps: int = 1
    """Microbatches per optimizer step, of about equal size; they change the memory, not the gradient."""
    max_tokens_per_microbatch: int | None = None
    """Maximum number of positions in a microbatch, including prompts, responses and padding; a longer response
    forms a microbatch by itself. If the limit requires more microbatches than `gradient_accumulation_steps`,
    their number increases. Unset: no limit."""
    epochs: int = 1
    """Passes over the completions of an iteration."""
    mixed_precision: str = "fp32"
    """Precision of the forward and backward pass: `fp32`, `bf16`, `fp16` (with a gradient scaler). Weights in
    bfloat16 (`model.dtype`) compute in bfloat16 under `fp32` too."""
    gradient_checkpointing: str | None = None
    """Activations that the backward pass recomputes: `none`, `selective` or `full`. `selective` keeps the outputs
    of matrix products and attention; `full` keeps the inputs of layers alone, for about a third more time.
    `false` and `true` mean `none` and `full`. Unset: `none` on a CPU. Unset on a GPU: the first of the three
    whose planned memory fits with a reserve, or `full` if the GPU's size or the model's layers are unknown."""
    packing: bool = True
    """Runs a microbatch through the model as one sequence without padding, each prompt once; the results are
    exact. Packed sequences use their own attention kernel instead of `model.attn_implementation`. Models with
    sliding windows or recurrent layers always use padded rows."""
    compile: bool | None = None
    """Compiles each decoder layer with torch.compile: a slower first step, faster later steps
    (docs/scaling.md), equal results up to rounding. Needs a C++ compiler. Unset: off on a CPU, on for GPUs.
    Exceptions are layers in 4 bits or of unknown kind, a missing compiler, and vLLM in the process that switches
    compiled code off. `run=plan` prints the reason."""
    log_prob_chunk_size: int | None = None
    """Response tokens whose logits are in memory at one time, [chunk, vocabulary]. Unset: chosen by the head's
    size."""
    checkpoint_frequency: int = 100
    """Iterations between checkpoints; 0 writes only the checkpoint at the end."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep; older ones are removed. 0 keeps all. A run that resumes from an
    earlier checkpoint always removes the later ones."""
    keep_best: str | None = None
    """An evaluation metric such as `eval/SET/pass@1`: the checkpoint with the highest value is kept as well,
    and a checkpoint is written after each evaluation with a new highest value. `checkpoints/best` and
    `models/best` are links to the best checkpoint and its model."""
    export: bool = True
    """Writes a model in Hugging Face format for each checkpoint that is kept, `models/checkpoint_000040`, and
    the link `model` to the newest one. Each model takes the disk space of the weights in `model.dtype`. A LoRA
    adapter is merged into the weights, and also written to the subfolder `adapter`."""
    async_checkpoint: bool = True
    """Continues training while a checkpoint is written from a copy in host memory; `false`: training waits."""
    resume: str | None = None
    """The checkpoint to resume from, or the folder of a run, for its newest checkpoint. `auto` takes the newest
    checkpoint of this run's folder, or of the newest run with the same settings."""
    restarts: int = 0
    """Number of automatic restarts from the newest checkpoint after the loss of a learner rank."""
    max_nonfinite_steps: int = 3
    """Number of consecutive optimizer steps with a non-finite loss or gradient after which the run stops."""
    deterministic: bool | None = None
    """On a CPU, equal configs and seeds give bitwise equal results. On a GPU, learner and engine in one process
    use deterministic kernels where they exist, which are slower. Unset: `true` on a CPU, `false` on GPUs."""
    max_policy_age: int = 1
    """grpo_async.py: maximum age of a group when the learner trains on it, in policy versions behind the
    learner."""
    stale_groups: str = "drop"
    """grpo_async.py: `drop` discards a group older than `max_policy_age`; `wait` delays the start of a group so
    that it cannot exceed that age."""
    weight_update_frequency: int = 1
    """grpo_async.py: optimizer steps between two weight pushes, rounded up to a multiple of `epochs`."""
    buffer_groups: int | None = None
    """grpo_async.py: maximum number of finished groups that wait for the learner. Unset: the groups of two
    optimizer steps."""
    on_alarm: str = "log"
    """Reaction to an alarm of the diagnostics (docs/diagnostics.md). `log` prints it. `checkpoint` also writes
    a checkpoint at the end of the iteration. `stop` ends the run there with a checkpoint and exit code 1.
    Warnings are only printed."""
    weight_check_every: int = 10
    """Weight pushes between two checks of the engines' weights, which compare log-probs of fixed sequences
    (docs/devices.md). The check also runs at the first push, with new engines and before evaluations. Log-probs
    of sampled tokens are compared after every push."""
    on_mismatch: str = "stop"
    """Reaction when an engine's log-probs differ from the learner's: `stop` ends the run; `log` prints a
    warning and continues."""
    wait_timeout_s: float = 600.0
    """Maximum seconds that the learner waits for groups, a weight push for the engines, or the run for a
    checkpoint; then the run stops."""

    def __post_init__(self) -> None:
        if self.gradient_checkpointing is not None:
            switch = {"true": "full", "false": "none"}  # the key was a switch in earlier versions
            name = str(self.gradient_checkpointing)
            self.gradient_checkpointing = switch.get(name.lower(), name)
            check_choice("train.gradient_checkpointing", self.gradient_checkpointing, ("none", "selective", "full"))
        check_choice("train.mixed_precision", self.mixed_precision, ("fp32", "bf16", "fp16"))
        check_fields("train", self, ("wait_timeout_s",), is_positive, "must be above 0")
        check_choice("train.on_alarm", self.on_alarm, ("log", "checkpoint", "stop"))
        check_choice("train.on_mismatch", self.on_mismatch, ("stop", "log"))
        check_choice("train.stale_groups", self.stale_groups, ("drop", "wait"))
        counts = (
            "weight_check_every", "total_dialog_turns", "gradient_accumulation_steps", "epochs", "max_nonfinite_steps",
            "weight_update_frequency", "log_prob_chunk_size", "max_tokens_per_microbatch",
        )  # fmt: skip
        for key in counts:
            check_minimum(f"train.{key}", vars(self)[key], 1)
        for key in ("checkpoint_frequency", "keep_checkpoints", "max_policy_age", "restarts"):
            check_minimum(f"train.{key}", vars(self)[key], 0)
