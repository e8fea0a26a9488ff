"""Log-probs of sampled responses under a model: one prompt forward per group, logits in chunks.

    prompt [P, Lp] ──forward──▶ keys/values ──repeat G times──▶ responses [P*G, R] ──▶ hidden ──▶ log-probs

Sharing is exact: attention to a prompt does not depend on which response asks. It needs full attention and a
plain key/value cache, so models with sliding windows or recurrent state take the whole sequences instead.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from training.batch import Batch, Tokens
from training.log_probs import selected_log_probs
from training.minibatches import microbatches
from training.model import causal_model
from training.sharding import Within, directly


@dataclass(frozen=True)
class Scores:
    """log_prob [N, R] float32, 0 where the mask is false; entropy the same, or None."""

    log_prob: torch.Tensor
    entropy: torch.Tensor | None


def can_share_prompt(model: PreTrainedModel) -> bool:
    """Whether every layer is full attention, so that a prompt's keys and values serve its whole group."""
    types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    return types == {"full_attention"}


@dataclass(eq=False)
class ResponseScorer:
    """Scores batches of groups with `model`. `together`: rows that must come side by side, a group or one.

    repeats: completions per prompt; rows come group by group.
    share_prompt: one prompt forward per group, where the model can (`can_share_prompt`).
    chunk_size: response tokens whose logits exist at one time; None: by the head's size.
    temperature, top_p, top_k: of the distribution that the engine sampled from. `temperature=None`: each row has its
        own, which a call says.
    autocast_dtype: arithmetic of the forward pass, None for the weights' own.
    within: where the model's parameters are whole.
    """

    model: nn.Module
    repeats: int
    share_prompt: bool
    chunk_size: int | None = None
    temperature: float | None = 1.0
    top_p: float = 1.0
    top_k: int = 0
    autocast_dtype: torch.dtype | None = None
    within: Within = directly

    def __post_init__(self) -> None:
        self.share_prompt = self.share_prompt and can_share_prompt(causal_model(self.model))
        self.together = self.repeats if self.share_prompt else 1

    def __call__(
        self, tokens: Tokens, temperature: torch.Tensor | None = None, with_entropy: bool = False
    ) -> Scores:
        """tokens: [N] rows, a multiple of `together`. temperature: [N, 1]; read where `self.temperature` is None."""
        width = tokens.response.shape[1]
        tokens = trim(tokens)
        mask = tokens.loss_mask
        log_prob, entropy = self.within(partial(self._selected, tokens, temperature, with_entropy))
        return Scores(
            _spread(log_prob, mask, width), None if entropy is None else _spread(entropy, mask, width)
        )

    def _selected(
        self, tokens: Tokens, temperature: torch.Tensor | None, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-prob and entropy [M] of the tokens in the loss."""
        causal = causal_model(self.model)
        device = causal.device
        tokens = tokens.to(device)
        mask = tokens.loss_mask
        with torch.autocast(
            device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=self.share_prompt,  # else every weight is used once, and its copy would only stay
        ):
            hidden = self._shared(causal, tokens) if self.share_prompt else self._whole(causal, tokens)
            return selected_log_probs(
                *self._at_the_head(causal, hidden, tokens.response, mask),
                temperature=self._temperature(temperature, causal, mask),
                chunk_size=self.chunk_size,
                with_entropy=with_entropy,
                top_p=self.top_p,
                top_k=self.top_k,
            )

    def _at_the_head(
        self, causal: PreTrainedModel, hidden: torch.Tensor, response: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """hidden [M, D], weight, bias and targets [M] of the tokens in the loss, where the output head is.

        A model's layers may lie on several devices: `response` and `mask` are where its first one is, `hidden`
        [N, R, D] where its last one is. Under autocast `hidden` takes its dtype, as the input of every linear
        layer does; the residual stream of float32 weights is float32.
        """
        head = causal.get_output_embeddings()
        device = head.weight.device
        picked = hidden[mask.to(hidden.device)].to(device, self.autocast_dtype)
        return picked, head.weight, head.bias, response[mask].to(device)

    def _temperature(
        self, of_rows: torch.Tensor | None, causal: PreTrainedModel, mask: torch.Tensor
    ) -> float | torch.Tensor:
        """One for all tokens in the loss, or [M] with that of each one's row."""
        if self.temperature is not None:
            return self.temperature
        assert of_rows is not None, "the engines' temperature changes, so every row must say its own"
        picked = of_rows.to(mask.device).expand_as(mask)[mask]
        return picked.to(causal.get_output_embeddings().weight.device)

    def _shared(self, causal: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
        """Hidden states [N, R, D] that predict the response tokens."""
        prompt, mask = _to_right(tokens.prompt[:: self.repeats], tokens.prompt_mask[:: self.repeats])
        lengths = mask.sum(-1)
        cache = DynamicCache()
        output = causal.base_model(prompt, past_key_values=cache, use_cache=True)
        states: torch.Tensor = output.last_hidden_state
        rows = torch.arange(len(prompt), device=states.device)
        last = states[rows, lengths.to(states.device) - 1].repeat_interleave(self.repeats, dim=0)[:, None]
        if tokens.response.shape[1] == 1:
            return last
        width = tokens.response.shape[1] - 1
        lengths = lengths.repeat_interleave(self.repeats, dim=0)
        visible = torch.cat(
            [mask.repeat_interleave(self.repeats, dim=0), tokens.response_mask[:, :-1]], dim=1
        )
        steps = torch.arange(width, device=prompt.device)
        response = causal.base_model(
            tokens.response[:, :-1],
            attention_mask=_attend(visible, width),
            position_ids=lengths[:, None] + steps,
            past_key_values=Cache([_Continued(layer) for layer in cache.layers]),
            use_cache=True,
        )
        return torch.cat([last, response.last_hidden_state], dim=1)

    def _whole(self, causal: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
        ids = torch.cat([tokens.prompt, tokens.response], dim=1)
        mask = torch.cat([tokens.prompt_mask, tokens.response_mask], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        output = causal.base_model(
            ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
        ).last_hidden_state
        hidden: torch.Tensor = output[:, -tokens.response.shape[1] - 1 : -1]
        return hidden


class _Continued(DynamicLayer):
    """A prompt's keys and values, which every completion of its group continues.

    A layer repeats them only where they meet the completions' own and keeps nothing: a cache that is repeated as a
    whole is one more copy of every layer's.
    """

    def __init__(self, prompt: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert isinstance(prompt, DynamicLayer)
        self.keys, self.values, self.is_initialized = prompt.keys, prompt.values, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return _continue(self.keys, key_states), _continue(self.values, value_states)


def _continue(prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """[P, H, L, D] and, behind it for each of its group, [P*G, H, R, D]: [P*G, H, L + R, D]."""
    groups = response.unflatten(0, (len(prompt), -1))
    shared = prompt[:, None].expand(-1, groups.shape[1], -1, -1, -1)
    return torch.cat([shared, groups], dim=3).flatten(0, 1)


def score_all(scorer: ResponseScorer, batch: Batch, rows: int) -> torch.Tensor:
    """Log-probs [N, R] of whole groups, `rows` rows at a time."""
    parts = [
        (part.rows, scorer(part.batch.tokens, part.batch.temperature).log_prob)
        for part in microbatches(batch, scorer.together, rows)
    ]
    if len(parts) == 1:
        return parts[0][1]
    together = torch.cat([log_prob for _, log_prob in parts])
    order = torch.cat([places for places, _ in parts]).to(together.device)
    return torch.empty_like(together).index_copy_(0, order, together)


def trim(tokens: Tokens) -> Tokens:
    """Without the columns that are padding in every row."""
    prompt_width = int(tokens.prompt_mask.sum(-1).max())
    width = max(1, int(tokens.response_mask.sum(-1).max()))
    return Tokens(
        prompt=tokens.prompt[:, -prompt_width:],
        prompt_mask=tokens.prompt_mask[:, -prompt_width:],
        response=tokens.response[:, :width],
        response_mask=tokens.response_mask[:, :width],
        loss_mask=tokens.loss_mask[:, :width],
        batch_size=tokens.batch_size,
    )


def _to_right(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded rows [P, L] moved to the left edge: then a causal model needs no mask for them."""
    width = ids.shape[1]
    offset = width - mask.sum(-1, keepdim=True)
    columns = torch.arange(width, device=ids.device)
    moved = ids.gather(1, (columns + offset).clamp_max(width - 1))
    return moved, columns < width - offset


def _attend(visible: torch.Tensor, queries: int) -> torch.Tensor:
    """bool [N, 1, queries, L]: query i sees the visible positions up to its own, the last `queries` of L.

    A padded query sees itself, so that no row of the softmax is empty.
    """
    length = visible.shape[1]
    columns = torch.arange(length, device=visible.device)
    own = torch.arange(length - queries, length, device=visible.device)[:, None]
    return ((visible[:, None, None] & (columns <= own)) | (columns == own)).contiguous()


def _spread(values: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """[M] values back to their places in [N, width], zeros elsewhere."""
    placed = torch.zeros(mask.shape[0], width, dtype=values.dtype, device=values.device)
    full = torch.nn.functional.pad(mask, (0, width - mask.shape[1])).to(values.device)
    return placed.masked_scatter(full, values)
