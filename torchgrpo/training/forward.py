"""Log-probs of sampled responses under a model: one packed sequence, or whole rows; logits in chunks.

    rows ──pack──▶ one sequence, each prompt once ──forward──▶ hidden states of the targets ──head──▶ log-probs

Packing needs an architecture that it is held equal for (`can_pack`); others take whole rows, padded.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from config.schema.errors import RunError
from torchgrpo.batches.batch import Tokens
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.attention import NAME, can_pack
from torchgrpo.training.log_probs import selected_log_probs
from torchgrpo.training.packed_sequence import pack, packed_positions
from torchgrpo.training.sharding import Within, directly


@dataclass(frozen=True)
class Scores:
    """log_prob [N, R] float32, 0 where the mask is false; entropy the same, or None."""

    log_prob: torch.Tensor
    entropy: torch.Tensor | None


@dataclass(eq=False)
class ResponseScorer:
    """Scores batches of completions with `model`.

    packs: rows go through the model as one sequence, where the model can (`can_pack`).
    chunk_size: response tokens whose logits exist at one time; None: by the head's size.
    temperature, top_p, top_k: of the distribution that the engine sampled from. `temperature=None`: each row has its
        own, which a call says.
    autocast_dtype: arithmetic of the forward pass, None for the weights' own.
    within: where the model's parameters are whole.
    """

    model: nn.Module
    packs: bool = True
    chunk_size: int | None = None
    temperature: float | None = 1.0
    top_p: float = 1.0
    top_k: int = 0
    autocast_dtype: torch.dtype | None = None
    within: Within = directly

    def __post_init__(self) -> None:
        causal = causal_model(self.model)
        self.packs = self.packs and can_pack(causal)
        if self.packs:
            # For good: checkpointing attends again in the backward pass.
            causal.set_attn_implementation(NAME)

    def __call__(
        self, tokens: Tokens, temperature: torch.Tensor | None = None, with_entropy: bool = False
    ) -> Scores:
        """tokens: [N] rows. temperature: [N, 1]; read where `self.temperature` is None."""
        mask = tokens.loss_mask
        log_prob, entropy = self.within(partial(self._selected, tokens, temperature, with_entropy))
        return Scores(_spread(log_prob, mask), None if entropy is None else _spread(entropy, mask))

    def _selected(
        self, tokens: Tokens, temperature: torch.Tensor | None, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-prob and entropy [M] of the tokens in the loss.

        A model's layers may lie on several devices: hidden states [M, D] are where its last one is. Under autocast they
        take its dtype, as the input of every linear layer does; the residual stream of float32 weights is float32.
        """
        causal, mask = causal_model(self.model), tokens.loss_mask
        hidden_states = self._packed if self.packs else self._whole
        head = causal.get_output_embeddings()
        device = head.weight.device
        divisor: float | torch.Tensor | None = self.temperature
        if divisor is None:
            assert temperature is not None, "the engines' temperature changes, so every row must say its own"
            divisor = temperature.to(mask.device).expand_as(mask)[mask].to(device)
        with torch.autocast(
            causal.device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=False,  # every weight is used once, and its copy would only stay
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
            )

    def positions(self, tokens: Tokens) -> int:
        """Positions that the model computes for [N] rows, padding included."""
        if self.packs:
            return packed_positions(tokens)
        lengths = tokens.prompt_mask.sum(1) + tokens.response_mask.sum(1)
        return len(tokens) * int(lengths.max())

    def _packed(self, causal: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
        """Hidden states [M, D] that predict the loss's tokens. Raises RunError where layers join rows."""
        packed, device = pack(tokens), causal.device
        hidden: torch.Tensor = causal.base_model(
            packed.ids.to(device),
            # As a mask of four dimensions is taken as it is, transformers makes none, [L, L], from the positions.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            position_ids=packed.positions.to(device),
            use_cache=False,
            segments=packed.segments,
        ).last_hidden_state[0]
        layers = causal.config.num_hidden_layers
        if packed.segments.layers != layers:
            raise RunError(
                f"{packed.segments.layers} of {layers} layers of {type(causal).__name__} attended by the segments of a "
                "packed sequence: set train.packing=false"
            )
        return hidden.index_select(0, packed.where.to(hidden.device))

    def _whole(self, causal: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
        """The same from whole rows, padded behind, which no token of a causal model sees."""
        tokens = tokens.to(causal.device)
        ids, prompt_lengths = whole_rows(tokens)
        hidden: torch.Tensor = causal.base_model(ids, use_cache=False).last_hidden_state
        rows, columns = tokens.loss_mask.nonzero(as_tuple=True)
        before = prompt_lengths[rows] + columns - 1
        return hidden[rows.to(hidden.device), before.to(hidden.device)]


def whole_rows(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a prompt and its response, int64 [N, longest], zeros behind; and the prompts' lengths [N]."""
    mask = torch.cat([tokens.prompt_mask, tokens.response_mask], dim=1)
    ids = torch.cat([tokens.prompt, tokens.response], dim=1)
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    longest = int(mask.sum(1).max())
    return ids.gather(1, order)[:, :longest], tokens.prompt_mask.sum(1)


def _spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[M] values at the places of `mask` [N, R], zeros elsewhere."""
    placed = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return placed.masked_scatter(mask.to(values.device), values)
