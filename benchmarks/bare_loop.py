"""GRPO with nothing around it: one file, plain torch, the yardstick of lockstep.py. Not used by the scripts."""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Bare:
    """One iteration on `model`: sample groups, judge them, one clipped update with a KL to `reference`."""

    model: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    repeats: int
    max_tokens: int
    kl_coef: float
    eos: int

    def iteration(self, messages: list[list[dict[str, str]]], answers: list[str]) -> float:
        """Returns the mean reward."""
        prompts = [
            self.tokenizer.apply_chat_template(
                m, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for m in messages
        ]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        responses, mask, sampled = self.generate(ids, lengths)
        texts = self.tokenizer.batch_decode(
            [row[keep].tolist() for row, keep in zip(responses, mask, strict=True)], skip_special_tokens=True
        )
        rewards = torch.tensor(
            [float(text.strip() == answers[row // self.repeats]) for row, text in enumerate(texts)]
        ).view(-1, self.repeats)
        deviation = rewards.std(1, keepdim=True)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)).view(-1, 1)
        self.update(ids, lengths, responses, mask, sampled, advantage)
        return float(rewards.mean())

    @torch.no_grad()
    def generate(
        self, ids: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batched sampling, the prompt prefilled once for its group; finished rows ride along to the end."""
        cache = DynamicCache()
        width = ids.shape[1]
        hidden = self.model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state
        hidden = hidden[torch.arange(len(ids)), lengths - 1].repeat_interleave(self.repeats, 0)
        cache.batch_repeat_interleave(self.repeats)
        lengths = lengths.repeat_interleave(self.repeats)
        visible = torch.arange(width) < lengths[:, None]
        running = torch.ones(len(lengths), dtype=torch.bool)
        tokens, masks, log_probs = [], [], []
        for step in range(self.max_tokens):
            logits = self.model.lm_head(hidden).log_softmax(-1)
            token = torch.multinomial(logits.exp(), 1)
            tokens.append(token)
            masks.append(running[:, None].clone())
            log_probs.append(logits.gather(1, token))
            running &= token[:, 0] != self.eos
            if not running.any() or step == self.max_tokens - 1:
                break
            visible = torch.cat([visible, torch.ones(len(lengths), 1, dtype=torch.bool)], 1)
            hidden = self.model.model(
                token,
                attention_mask=visible[:, None, None],
                position_ids=(lengths + step)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, 0]
        return torch.cat(tokens, 1), torch.cat(masks, 1), torch.cat(log_probs, 1)

    def log_probs(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        responses: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        cache = DynamicCache()
        hidden = model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state
        last = hidden[torch.arange(len(ids)), lengths - 1].repeat_interleave(self.repeats, 0)[:, None]
        cache.batch_repeat_interleave(self.repeats)
        lengths = lengths.repeat_interleave(self.repeats)
        queries, width = responses.shape[1] - 1, ids.shape[1]
        columns = torch.arange(width + queries)
        own = torch.arange(width, width + queries)[:, None]
        seen = torch.cat([torch.arange(width) < lengths[:, None], mask[:, :-1]], 1)
        attend = (seen[:, None, None] & (columns <= own)) | (columns == own)
        hidden = model.model(
            responses[:, :-1],
            attention_mask=attend,
            position_ids=lengths[:, None] + torch.arange(queries),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits = model.lm_head(torch.cat([last, hidden], 1)[mask])
        return logits.log_softmax(-1).gather(1, responses[mask][:, None])[:, 0]

    def update(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        responses: torch.Tensor,
        mask: torch.Tensor,
        sampled: torch.Tensor,
        advantage: torch.Tensor,
    ) -> None:
        with torch.no_grad():
            reference = self.log_probs(self.reference, ids, lengths, responses, mask)
        log_prob = self.log_probs(self.model, ids, lengths, responses, mask)
        ratio = (log_prob - sampled[mask]).exp()
        advantage = advantage.expand_as(mask)[mask]
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        difference = reference - log_prob
        loss = -(objective - self.kl_coef * (difference.exp() - difference - 1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
