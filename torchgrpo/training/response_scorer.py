"""Computes log-probs and entropies of response tokens under a model, from packed or padded rows.

    rows ──pack──▶ one sequence, each prompt once ──forward──▶ hidden states of the targets ──head──▶ log-probs

Logits are computed in chunks. Packing needs an architecture for which `supports_packing` holds; other models
get padded rows.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from config.schema.errors import RunError
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.microbatch_sizes import BLOCK_SIZE, padded_positions
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.block_mask import BlockMaskTensors
from torchgrpo.training.context_parallel import ContextGroup
from torchgrpo.training.device_copy import copy_to_device
from torchgrpo.training.log_probs import check_temperature, selected_log_probs
from torchgrpo.training.packed_attention import (
    ATTENTION_NAME,
    Segments,
    attends_in_blocks,
    count_attending_modules,
    supports_packing,
)
from torchgrpo.training.packed_sequence import pack_rows, packed_positions, pad_to_blocks, slice_sequence
from torchgrpo.training.sharding import UnshardedContext, compute_device, no_sharding


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs and entropies of response tokens, float32 [N, R], 0 outside the loss mask.

    entropy: None if not requested.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | None


@dataclass(frozen=True)
class ScoringInputs:
    """Inputs of a model for [N, R] responses, of which M tokens are scored.

    This process scores m of them: all, or those in its slice of a sequence that several ranks compute together.

    ids: int64 [1, L] of a packed sequence, or [N, W] of padded rows. positions: int64 [1, L] of a packed sequence.
    predicting: int64 [m], index in the flattened `ids` of the position that predicts each token.
    targets: int64 [m], ids of the tokens. target_indices: int64 [M], indices in the flattened responses.
    temperature: of all tokens, or [m]. shape: N and R. segments, block_mask: of a packed sequence; `block_mask` is
    None where no layer needs it on another device. own_indices: int64 [m], which of the M tokens are scored here;
    None: all.
    """

    ids: torch.Tensor
    positions: torch.Tensor | None
    predicting: torch.Tensor
    targets: torch.Tensor
    target_indices: torch.Tensor
    temperature: float | torch.Tensor
    shape: torch.Size
    segments: Segments | None = None
    block_mask: BlockMaskTensors | None = None
    own_indices: torch.Tensor | None = None


@dataclass(eq=False)
class ResponseScorer:
    """Computes log-probs and entropies of response tokens with `model`.

    Args:
        packs: whether rows go through the model as one packed sequence; false if the model does not support
            packing.
        chunk_size: response tokens whose logits exist at one time; None: from the size of the output head.
        temperature: of the distribution that the engine sampled from, as `top_p`, `top_k` and `min_p`. None: each
            call passes the temperature of each row.
        autocast_dtype: autocast dtype of the forward pass; None: no autocast.
        unsharded_context: runs a function with unsharded parameters.
        context: ranks that compute each packed sequence together; None: this process computes it alone.

    Raises:
        ConfigError: `context` with a model that does not support packing, or whose heads it does not divide.
    """

    model: nn.Module
    packs: bool = True
    chunk_size: int | None = None
    temperature: float | None = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    autocast_dtype: torch.dtype | None = None
    unsharded_context: UnshardedContext = no_sharding
    context: ContextGroup | None = None

    def __post_init__(self) -> None:
        causal = causal_model(self.model)
        self.packs = self.packs and supports_packing(causal)
        if self.packs:
            # Stays set, because activation checkpointing runs the attention again in the backward pass.
            causal.set_attn_implementation(ATTENTION_NAME)
        if self.context is not None:
            self.context.check_model(causal, self.packs)

    @property
    def device(self) -> torch.device:
        """Device of the output head, on which log-probs are computed."""
        return compute_device(causal_model(self.model).get_output_embeddings().weight)

    def __call__(
        self, tokens: Tokens, temperature: torch.Tensor | None = None, with_entropy: bool = False
    ) -> TokenLogProbs:
        """Computes log-probs, and entropies if requested, of the tokens in the loss.

        tokens: [N] rows. temperature: [N, 1], needed if `self.temperature` is None.
        """
        return self.score(copy_to_device(self.prepare(tokens, temperature), self.device), with_entropy)

    def prepare(self, tokens: Tokens, temperature: torch.Tensor | None = None) -> ScoringInputs:
        """Prepares the inputs of `score` on the device of the tokens.

        The arguments are those of `__call__`. Tensors whose shapes depend on masks are computed here: on a GPU, the
        host would wait for the shapes.

        Raises:
            ValueError: a temperature is not above 0.
        """
        mask = tokens.loss_mask
        indices = mask.flatten().nonzero()[:, 0]
        divisor: float | torch.Tensor | None = self.temperature
        if divisor is None:
            assert temperature is not None, (
                "the engines' temperature changes, so a call needs the temperature of each row"
            )
            divisor = temperature.to(mask.device).expand_as(mask).flatten()[indices]
            check_temperature(divisor)
        targets = tokens.response.flatten()[indices]
        if not self.packs:
            ids, prompt_lengths = padded_rows(tokens)
            rows, columns = indices // mask.shape[1], indices % mask.shape[1]
            predicting = rows * ids.shape[1] + prompt_lengths[rows] + columns - 1
            return ScoringInputs(ids, None, predicting, targets, indices, divisor, mask.shape)
        packed, own, in_blocks = pack_rows(tokens), None, attends_in_blocks(self.device)
        if self.context is None:
            packed = pad_to_blocks(packed) if in_blocks else packed
        else:
            packed, own = slice_sequence(packed, self.context, BLOCK_SIZE if in_blocks else 1)
            targets = targets[own]
            divisor = divisor[own] if isinstance(divisor, torch.Tensor) else divisor
        return ScoringInputs(
            packed.ids,
            packed.positions,
            packed.target_positions,
            targets,
            indices,
            divisor,
            mask.shape,
            packed.segments,
            packed.segments.block_mask_tensors() if in_blocks else None,
            own,
        )

    def score(self, inputs: ScoringInputs, with_entropy: bool = False) -> TokenLogProbs:
        """Computes log-probs, and entropies if requested, from inputs on `self.device`."""
        log_prob, entropy = self.unsharded_context(partial(self._score_loss_tokens, inputs, with_entropy))
        return TokenLogProbs(
            _place_targets(log_prob, inputs), None if entropy is None else _place_targets(entropy, inputs)
        )

    def _score_loss_tokens(self, inputs: ScoringInputs, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes log-prob and entropy [M] of the tokens in the loss.

        The layers of a model may lie on several devices; the hidden states [M, D] are on the device of the last
        layer. Under autocast they are cast to its dtype, like the inputs of linear layers; the residual stream
        of float32 weights is float32.
        """
        causal = causal_model(self.model)
        hidden_states = self._packed_hidden_states if self.packs else self._padded_hidden_states
        head = causal.get_output_embeddings()
        with torch.autocast(
            causal.device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=False,  # each weight is used once; a cached copy would only occupy memory
        ):
            log_prob, entropy = selected_log_probs(
                hidden_states(causal, inputs).to(head.weight.device, self.autocast_dtype),
                head.weight,
                head.bias,
                inputs.targets,
                temperature=inputs.temperature,
                chunk_size=self.chunk_size,
                with_entropy=with_entropy,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
            )
        if self.context is None or inputs.own_indices is None:
            return log_prob, entropy
        join = partial(self.context.join_values, indices=inputs.own_indices, count=len(inputs.target_indices))
        return join(log_prob), None if entropy is None else join(entropy)

    def count_positions(self, tokens: Tokens) -> int:
        """Counts the positions that the model computes for [N] rows, padding included."""
        if self.packs:
            positions = packed_positions(tokens)
            in_blocks = attends_in_blocks(self.device)
            if self.context is not None:
                return self.context.padded_length(positions, BLOCK_SIZE if in_blocks else 1)
            return padded_positions(positions) if in_blocks else positions
        lengths = tokens.prompt_mask.sum(1) + tokens.response_mask.sum(1)
        return len(tokens) * int(lengths.max())

    def _packed_hidden_states(self, causal: PreTrainedModel, inputs: ScoringInputs) -> torch.Tensor:
        """Computes the hidden states [m, D] that predict the loss tokens, from a packed sequence.

        Raises:
            RunError: a layer did not attend by segments, and so mixed rows.
        """
        segments, device = inputs.segments, causal.device
        assert segments is not None and inputs.positions is not None
        if inputs.block_mask is not None:
            segments.set_block_mask(inputs.block_mask)
        hidden: torch.Tensor = causal.base_model(
            inputs.ids.to(device),
            # transformers uses a four-dimensional mask unchanged instead of building an [L, L] mask from
            # positions.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            position_ids=inputs.positions.to(device),
            use_cache=False,
            segments=segments,
        ).last_hidden_state
        attending, layers = count_attending_modules(causal, segments), causal.config.num_hidden_layers
        if attending != layers:
            raise RunError(
                f"only {attending} of {layers} layers of {type(causal).__name__} used segment attention: set "
                "train.packing=false"
            )
        return _predicting_states(hidden, inputs)

    def _padded_hidden_states(self, causal: PreTrainedModel, inputs: ScoringInputs) -> torch.Tensor:
        """Computes the hidden states [M, D] that predict the loss tokens, from padded rows.

        The padding is on the right. No token of a causal model attends to padding on its right.
        """
        return _predicting_states(
            causal.base_model(inputs.ids.to(causal.device), use_cache=False).last_hidden_state, inputs
        )


def padded_rows(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins prompts and responses to rows padded on the right.

    Returns ids int64 [N, longest], zeros as padding, and prompt lengths [N].
    """
    mask = torch.cat([tokens.prompt_mask, tokens.response_mask], dim=1)
    ids = torch.cat([tokens.prompt, tokens.response], dim=1)
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    longest = int(mask.sum(1).max())
    return ids.gather(1, order)[:, :longest], tokens.prompt_mask.sum(1)


def _predicting_states(states: torch.Tensor, inputs: ScoringInputs) -> torch.Tensor:
    """Selects the states [M, D] that predict the targets from those of all positions."""
    return states.flatten(0, 1).index_select(0, inputs.predicting.to(states.device))


def _place_targets(values: torch.Tensor, inputs: ScoringInputs) -> torch.Tensor:
    """Writes values [M] of the targets at their places in [N, R], zeros elsewhere.

    Indices need no wait for the device, unlike the backward pass of `masked_scatter`.
    """
    zeros = values.new_zeros(inputs.shape.numel())
    return zeros.index_put((inputs.target_indices,), values).view(inputs.shape)
