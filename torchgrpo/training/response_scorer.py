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
from torchgrpo.plan.microbatch_sizes import padded_positions
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.log_probs import selected_log_probs
from torchgrpo.training.packed_attention import (
    ATTENTION_NAME,
    attends_in_blocks,
    count_attending_modules,
    supports_packing,
)
from torchgrpo.training.packed_sequence import pack_rows, packed_positions, pad_to_blocks
from torchgrpo.training.sharding import UnshardedContext, no_sharding


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs and entropies of response tokens, float32 [N, R], 0 outside the loss mask.

    entropy: None if not requested.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | None


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

    def __post_init__(self) -> None:
        causal = causal_model(self.model)
        self.packs = self.packs and supports_packing(causal)
        if self.packs:
            # Stays set, because activation checkpointing runs the attention again in the backward pass.
            causal.set_attn_implementation(ATTENTION_NAME)

    def __call__(
        self, tokens: Tokens, temperature: torch.Tensor | None = None, with_entropy: bool = False
    ) -> TokenLogProbs:
        """Computes log-probs, and entropies if requested, of the tokens in the loss.

        tokens: [N] rows. temperature: [N, 1], needed if `self.temperature` is None.
        """
        mask = tokens.loss_mask
        log_prob, entropy = self.unsharded_context(partial(self._score_loss_tokens, tokens, temperature, with_entropy))
        return TokenLogProbs(
            _scatter_to_mask(log_prob, mask), None if entropy is None else _scatter_to_mask(entropy, mask)
        )

    def _score_loss_tokens(
        self, tokens: Tokens, temperature: torch.Tensor | None, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes log-prob and entropy [M] of the tokens in the loss.

        The layers of a model may lie on several devices; the hidden states [M, D] are on the device of the last
        layer. Under autocast they are cast to its dtype, like the inputs of linear layers; the residual stream
        of float32 weights is float32.
        """
        causal, mask = causal_model(self.model), tokens.loss_mask
        hidden_states = self._packed_hidden_states if self.packs else self._padded_hidden_states
        head = causal.get_output_embeddings()
        device = head.weight.device
        divisor: float | torch.Tensor | None = self.temperature
        if divisor is None:
            assert temperature is not None, (
                "the engines' temperature changes, so a call needs the temperature of each row"
            )
            divisor = temperature.to(mask.device).expand_as(mask)[mask].to(device)
        with torch.autocast(
            causal.device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=False,  # each weight is used once; a cached copy would only occupy memory
        ):
            return selected_log_probs(
                hidden_states(causal, tokens).to(device, self.autocast_dtype),
                head.weight,
                head.bias,
                tokens.response[mask].to(device),
                temperature=divisor,
                chunk_size=self.chunk_size,
                with_entropy=with_entropy,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
            )

    def count_positions(self, tokens: Tokens) -> int:
        """Counts the positions that the model computes for [N] rows, padding included."""
        if self.packs:
            positions = packed_positions(tokens)
            return padded_positions(positions) if attends_in_blocks(causal_model(self.model).device) else positions
        lengths = tokens.prompt_mask.sum(1) + tokens.response_mask.sum(1)
        return len(tokens) * int(lengths.max())

    def _packed_hidden_states(self, causal: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
        """Computes the hidden states [M, D] that predict the loss tokens, from a packed sequence.

        Raises:
            RunError: a layer did not attend by segments, and so mixed rows.
        """
        packed, device = pack_rows(tokens), causal.device
        if attends_in_blocks(device):
            packed = pad_to_blocks(packed)
            packed.segments.block_mask(device)  # before a compiled layer uses the mask
        hidden: torch.Tensor = causal.base_model(
            packed.ids.to(device),
            # transformers uses a four-dimensional mask unchanged instead of building an [L, L] mask from
            # positions.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            position_ids=packed.positions.to(device),
            use_cache=False,
            segments=packed.segments,
        ).last_hidden_state[0]
        attending, layers = count_attending_modules(causal, packed.segments), causal.config.num_hidden_layers
        if attending != layers:
            raise RunError(
                f"only {attending} of {layers} layers of {type(causal).__name__} used segment attention: set "
                "train.packing=false"
            )
        return hidden.index_select(0, packed.target_positions.to(hidden.device))

    def _padded_hidden_states(self, causal: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
        """Computes the hidden states [M, D] that predict the loss tokens, from padded rows.

        The padding is on the right. No token of a causal model attends to padding on its right.
        """
        tokens = tokens.to(causal.device)
        ids, prompt_lengths = padded_rows(tokens)
        hidden: torch.Tensor = causal.base_model(ids, use_cache=False).last_hidden_state
        rows, columns = tokens.loss_mask.nonzero(as_tuple=True)
        predicting = prompt_lengths[rows] + columns - 1
        return hidden[rows.to(hidden.device), predicting.to(hidden.device)]


def padded_rows(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins prompts and responses to rows padded on the right.

    Returns ids int64 [N, longest], zeros as padding, and prompt lengths [N].
    """
    mask = torch.cat([tokens.prompt_mask, tokens.response_mask], dim=1)
    ids = torch.cat([tokens.prompt, tokens.response], dim=1)
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    longest = int(mask.sum(1).max())
    return ids.gather(1, order)[:, :longest], tokens.prompt_mask.sum(1)


def _scatter_to_mask(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Writes values [M] at the true positions of `mask` [N, R], zeros elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return zeros.masked_scatter(mask.to(values.device), values)
