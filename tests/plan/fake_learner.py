"""The learner's own step on tensors that have a shape and no memory, under torch's own memory tracker.

The model, `ResponseScorer`, `Learner.step` and the optimizer are the project's. What depends on values is answered
as if every row were full: masks are true everywhere, nothing is trimmed, numbers that are read are 1. The CPU build has
no fake CUDA device, so tensors are on the CPU, the output head is told to compute as on a GPU, and a packed sequence
is attended to by a kernel that keeps what flex attention keeps.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Qwen2Config

from config.schema import Config
from plan.memory import microbatch_rows
from plan.model_shape import ModelShape
from training import forward, log_probs, split_learner, worker
from training.batch import Batch, Scores, Tokens
from training.forward import ResponseScorer
from training.learner_models import Models
from training.learner_state import learner_tensors
from training.local_learner import LocalLearner
from training.model import add_lora
from training.weights import named_weights

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_VALUES: dict[Any, Callable[[Tensor], object]] = {
    Tensor.__bool__: lambda tensor: True,
    Tensor.__float__: lambda tensor: 1.0,
    Tensor.item: lambda tensor: 1.0,
    Tensor.tolist: lambda tensor: [1.0] * tensor.numel(),
}


class FullRows(TorchFunctionMode):
    """Answers what fake tensors cannot say: a boolean index takes everything, a number is 1."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUES:
            return _VALUES[func](args[0])
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0].flatten(0, args[1].ndim - 1).clone()
        return func(*args, **(kwargs or {}))


class OneKernel:
    """Segments of a packed sequence whose attention is one kernel, as on a GPU: operands and result are kept."""

    def calls(self, device: torch.device) -> "OneKernel":
        return self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float
    ) -> Tensor:
        shared = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
        return out.transpose(1, 2)


def full_pack(repeats: int, tokens: Tokens) -> Any:
    """What `training.packing.pack` makes of groups of full rows."""
    rows, prompt = tokens.prompt.shape
    targets = rows * tokens.response.shape[1]
    ids = torch.zeros(1, -(-rows // repeats) * prompt + targets - rows, dtype=torch.long)
    return SimpleNamespace(
        ids=ids, positions=ids.clone(), segments=OneKernel(), where=torch.zeros(targets, dtype=torch.long)
    )


class _NoModules:
    """In place of the tracker's statistics by module, which take most of its time."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *hooks: object) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class Tracker(MemTracker):
    """torch's memory tracker, totals only. Several periods may be tracked one after the other."""

    def __init__(self, *known: nn.Module | torch.optim.Optimizer | Tensor) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()
        self.track_external(*known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls
            return args[0].fake_device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def peak(self) -> float:
        """Bytes at the fullest moment of the last period."""
        return float(sum(device["Total"] for device in self.get_tracker_snapshot("peak").values()))


PHASES = ("score", "optimize", "optimizer step")


def measured(config: Config, shape: ModelShape, phases: Sequence[str] = PHASES) -> dict[str, float]:
    """Peak bytes of `phases` of `plan.memory.train_phases`, for one microbatch into gradients that are there.

    The optimizer's states exist, as from the second step on.
    """
    rows = microbatch_rows(config)
    with on_a_gpu(), fake_learner(_one_microbatch(config, rows), shape) as learner:
        batch = full_batch(config, rows)
        tracker = Tracker(
            learner.worker.model,
            learner.worker.optimizer,
            *learner_tensors(learner.worker.model, learner.worker.optimizer).values(),
        )
        peaks = {}
        for phase in phases:
            if phase == "score":
                with torch.no_grad(), tracker:
                    learner.worker.scorer(batch.tokens)
            elif phase == "optimize":
                if config.train.gradient_accumulation_steps > 1:
                    tracker.track_external(*_fill_gradients(learner.worker.model))
                with tracker, patch.object(learner.worker.optimizer, "step"):
                    learner.step(batch)
            else:
                tracker.track_external(*_fill_gradients(learner.worker.model))
                with tracker:
                    learner.worker.optimizer.step()
            peaks[phase] = tracker.peak()
    return peaks


def _one_microbatch(config: Config, rows: int) -> Config:
    """The learner takes whole groups, so a smaller microbatch is made a group of its own."""
    train = replace(config.train, gradient_accumulation_steps=1, optim_batch_size=rows)
    env = replace(config.env, repeats=min(config.env.repeats, rows))
    return replace(config, train=train, env=env)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """The output head's chunks and factors as on CUDA; no row shorter than the batch is wide."""
    chunks = {"cpu": log_probs.CHUNK_ELEMENTS["cuda"]}
    with (
        patch.object(log_probs, "CHUNK_ELEMENTS", chunks),
        patch.object(log_probs, "_multiplies_half", lambda device: True),
        patch.object(forward, "trim", lambda tokens: tokens),
    ):
        yield


@contextmanager
def fake_learner(config: Config, shape: ModelShape) -> Iterator[LocalLearner]:
    """A learner whose optimizer has made its first step, inside the fake mode."""
    model = _on_meta(config, shape)
    with FakeTensorMode(), FullRows(), tempfile.TemporaryDirectory() as folder:
        _without_memory(model)
        scorer = ResponseScorer(
            model,
            config.train.packing,
            chunk_size=config.train.log_prob_chunk_size,
            autocast_dtype=DTYPES[config.train.mixed_precision],
        )
        with patch.object(worker, "base_digest", lambda model: "of no values"):  # a third of the time
            learner = LocalLearner(config, Models(model, scorer, None), named_weights, Path(folder))
        _fill_gradients(model)
        learner.worker.optimizer.step()
        learner.worker.optimizer.zero_grad(set_to_none=True)
        with (
            patch.object(forward, "pack", partial(full_pack, config.env.repeats)),
            patch.object(forward, "packed_positions", lambda tokens: 1),
            patch.object(split_learner, "real_tokens", lambda tokens: 1),
        ):
            yield learner


def _on_meta(config: Config, shape: ModelShape) -> nn.Module:
    hugging_face = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.max_positions,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hugging_face, dtype=getattr(torch, config.model.dtype), attn_implementation="sdpa"
        )
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        lora = config.train_model.lora
        return add_lora(model, lora) if lora.enabled else model


def _without_memory(model: nn.Module) -> None:
    """Meta tensors become fake ones on the CPU; tied weights stay one."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if old not in made:
                empty = torch.empty(old.shape, dtype=old.dtype)
                made[old] = nn.Parameter(empty, requires_grad=old.requires_grad)
            setattr(module, name, made[old])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _fill_gradients(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def full_batch(config: Config, rows: int) -> Batch:
    """The longest prompts and responses."""
    prompt, response = config.env.max_prompt_tokens, config.inference_model.max_tokens

    def ids(width: int) -> Tensor:
        return torch.zeros(rows, width, dtype=torch.long)

    def true(width: int) -> Tensor:
        return torch.ones(rows, width, dtype=torch.bool)

    def zeros(width: int) -> Tensor:
        return torch.zeros(rows, width)

    return Batch(
        tokens=Tokens(
            prompt=ids(prompt),
            prompt_mask=true(prompt),
            response=ids(response),
            response_mask=true(response),
            loss_mask=true(response),
            batch_size=[rows],
        ),
        next=Scores(reward=zeros(1), reward_status=ids(1), batch_size=[rows]),
        group_id=ids(1),
        sample_log_prob=zeros(response),
        policy_version=ids(response),
        finish_reason=ids(1),
        temperature=zeros(1),
        ref_log_prob=zeros(response),
        advantage=zeros(1),
        mask=true(response),
        batch_size=[rows],
    )
