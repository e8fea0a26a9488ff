"""Tiny random models, and a fake tokenizer and rewards, for tests without skill."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from envs.group import Verdict
from envs.task import Completion, Example, Reward

VOCABULARY = 40
EOS = 3


def tiny_llama(tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=EOS,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).float()


def resized_quickstart(folder: Path, **settings: object) -> None:
    """Saves the quickstart's tokenizer and a model of other sizes with fresh weights."""
    shutil.copytree(Path(__file__).resolve().parent.parent / "torchgrpo" / "models" / "quickstart", folder)
    config = AutoConfig.from_pretrained(folder, **settings)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def tiny_mixture(folder: Path, kind: Literal["qwen3_moe", "mixtral"]) -> None:
    """Saves a random mixture of experts with the quickstart's tokenizer.

    In files each expert has tensors of its own, in layers all experts share one.
    """
    shutil.copytree(Path(__file__).resolve().parent.parent / "torchgrpo" / "models" / "quickstart", folder)
    (folder / "config.json").unlink()
    experts = {"num_experts": 4, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {"num_local_experts": 4}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        **experts,
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class LetterTokenizer:
    """Fake tokenizer with one token per character, and an end token."""

    chat_template = "letters"
    name_or_path = "letters"
    eos_token_id = EOS
    all_special_ids = (EOS,)
    added_tokens_decoder = MappingProxyType({EOS: AddedToken("<eos>", special=True)})

    def apply_chat_template(self, chat: list[dict[str, str]], **kwargs: object) -> str:
        return "".join(turn["content"] for turn in chat)

    def encode(self, text: str, **kwargs: object) -> list[int]:
        return [5 + ord(letter) % 30 for letter in text]

    def __len__(self) -> int:
        return 1000

    def get_vocab(self) -> dict[str, int]:
        return {chr(65 + token): token for token in range(1000)}

    def batch_decode(self, rows: Sequence[Sequence[int]], **kwargs: object) -> list[str]:
        return ["".join(chr(65 + token) for token in row if token != EOS) for row in rows]


@dataclass
class ScoredBatch:
    """Ticket of a batch whose verdicts are known."""

    verdicts: list[Verdict]
    num_missing: int = 0


class ImmediateRewards:
    """Reward service that scores at once, by the `score` of a subclass."""

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Reward]:
        raise NotImplementedError

    def submit(self, completions: Sequence[Completion], examples: Sequence[Example]) -> ScoredBatch:
        scored = self.score(completions, examples)
        return ScoredBatch([Verdict(one.score, one.components, one.outcome) for one in scored])

    def poll(self, ticket: ScoredBatch, timeout: float = 0.0) -> list[Verdict] | None:
        return None if ticket.num_missing else ticket.verdicts


class LengthReward(ImmediateRewards):
    """Scores a text by its length."""

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Reward]:
        return [Reward(float(len(completion.text)), {"length": 1.0}) for completion in completions]


def numbered_examples(count: int) -> list[Example]:
    return [Example(({"role": "user", "content": f"{i}+{i * 7}="},), str(i * 8), i) for i in range(count)]
