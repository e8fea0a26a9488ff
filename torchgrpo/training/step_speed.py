"""Counts the useful FLOPs of microbatches, and computes speed metrics of an optimizer step.

rows ─▶ packed sizes ─▶ useful FLOPs ─▶ MFU = useful FLOPs / (seconds x rate of the learner's GPUs)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from config.schema.config import Config
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.model_shape import GIB, TERA, ModelShape
from torchgrpo.plan.plan import Plan
from torchgrpo.training.microbatches import Microbatch
from torchgrpo.training.packed_sequence import count_real_tokens, packed_row_costs


@dataclass(frozen=True)
class PackedSizes:
    """Sizes of a packed microbatch.

    positions: positions that pass the layers. targets: response tokens. pairs: visible pairs of query and key.
    """

    positions: int
    targets: int
    pairs: int


def packed_sizes(tokens: Tokens) -> PackedSizes:
    """Computes the sizes of [N] rows as a packed microbatch.

    Rows of a group share their prompt.
    """
    prompt_indices, prompt_lengths, lengths = packed_row_costs(tokens)
    first_rows = torch.cat([prompt_indices.new_ones(1), prompt_indices.diff()]).bool()
    prompts = prompt_lengths[first_rows]
    pairs = (prompts * (prompts + 1)).sum() // 2 + (lengths * (lengths + 1)).sum() // 2
    return PackedSizes(
        positions=int(prompts.sum() + lengths.sum()),
        targets=int(tokens.loss_mask.sum()),
        pairs=int(pairs + (lengths * prompt_lengths).sum()),
    )


def useful_flops(
    shape: ModelShape, sizes: PackedSizes, *, has_gradient: bool = True, has_adapters: bool = False
) -> int:
    """Counts the FLOPs of a microbatch that training needs, without recomputation.

    A linear parameter has two FLOPs per position in the forward pass and four in the backward pass, or two if it is
    frozen under adapters. The head counts for response tokens only, and attention for visible pairs of tokens.
    has_gradient: the microbatch has a backward pass.
    """
    per_parameter = 2 if not has_gradient else 4 if has_adapters else 6
    products = shape.active_linear_parameters * sizes.positions + shape.head_parameters * sizes.targets
    attention = sizes.pairs * shape.num_heads * shape.head_dim * shape.num_layers
    return per_parameter * products + (12 if has_gradient else 4) * attention


@dataclass(frozen=True)
class StepSpeed:
    """Computes the speed metrics of optimizer steps of one run.

    shape: sizes of the policy; None if they are unknown. gpus: GPUs of the learner; 0 on a CPU. gpu_flops: FLOPs of one
    GPU in a second. has_adapters: the base is frozen. has_own_processes: no engine shares a process with the learner,
    whose peak of memory is then the learner's alone.
    """

    shape: ModelShape | None
    gpus: int
    gpu_flops: float
    has_adapters: bool
    has_own_processes: bool

    @classmethod
    def from_plan(cls, config: Config, plan: Plan) -> "StepSpeed":
        """Returns the object for the learner of a plan.

        Clients of servers outside the run take no GPU memory.
        """
        devices = plan.devices
        return cls(
            shape=plan.shape,
            gpus=0 if devices.on_cpu else devices.ranks,
            gpu_flops=config.machine.gpu_tflops * TERA,
            has_adapters=config.train_model.lora.enabled,
            has_own_processes=devices.ranks > 1 or not devices.in_process or bool(config.inference_model.urls),
        )

    def metrics(
        self, tokens: Tokens, shares: Sequence[Sequence[Microbatch]], seconds: float, peak_bytes: int
    ) -> dict[str, float]:
        """Returns the metrics of one step.

        tokens: those of the whole batch. shares: the microbatches of each worker.
        """
        metrics = {"throughput/learner_tokens_per_s": count_real_tokens(tokens) / seconds}
        if self.gpus and self.shape is not None:
            flops = sum(self._flops(self.shape, one) for one in chain.from_iterable(shares) if not one.idle)
            metrics["throughput/learner_mfu"] = flops / (seconds * self.gpus * self.gpu_flops)
        if self.gpus and self.has_own_processes:
            metrics["memory/learner_peak_gib"] = peak_bytes / GIB
        return metrics

    def _flops(self, shape: ModelShape, microbatch: Microbatch) -> int:
        sizes = packed_sizes(microbatch.batch.tokens)
        return useful_flops(shape, sizes, has_gradient=microbatch.has_gradient, has_adapters=self.has_adapters)
