"""Trains the quickstart model: a tiny chat model that adds numbers, often wrongly.

    python torchgrpo/models/make_quickstart.py    rewrites torchgrpo/models/quickstart in a few minutes

First the model is trained on right sums. Then its labels come from a sloppy adder, which writes the right sum
in about one case out of four and most often loses a ten. The model picks up that habit, slips included:
sampled at temperature 1 it is right about a third of the time, and its most likely answer is usually a slip.
Reinforcement learning can then improve the model from the rewards of its samples alone.

All random numbers come from fixed seeds on one thread, so equal torch builds on equal processors give equal
bytes. `make_quickstart_tools.py` trains a second model from this one, which calls a tool.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent / "quickstart"
MAX_OPERAND = 49
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<' ~ message['role'] ~ '>' ~ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SLOPPY_ERRORS = {0: 0.27, -10: 0.53, 1: 0.1, -1: 0.1}
"""Errors of the sloppy sum, and the probability of each."""
IGNORED_LABEL = -100
"""Label that the cross entropy ignores."""
BatchMaker = Callable[[int, bool, random.Random], tuple[torch.Tensor, torch.Tensor]]
"""Function of size, sloppiness and random numbers: token ids and labels, int64 [size, T]."""


@dataclass(frozen=True)
class Schedule:
    """Training schedule: right sums for `clean_steps`, then sloppy sums up to `steps`."""

    steps: int = 1000
    clean_steps: int = 600
    batch_size: int = 128
    learning_rate: float = 2e-3
    warm_up_steps: int = 30
    seed: int = 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per byte, after the special tokens of a chat.

    Every text survives encoding and decoding unchanged.
    """
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Builds a randomly initialised Llama of about one million parameters, fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def sample_sloppy_answer(total: int, generator: random.Random) -> int:
    """Samples a sloppy answer to a sum; an answer below zero is excluded."""
    slips, weights = zip(*((slip, p) for slip, p in SLOPPY_ERRORS.items() if total + slip >= 0), strict=True)
    slip: int = generator.choices(slips, weights)[0]
    return total + slip


def make_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, sloppy: bool, generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples additions with answers: token ids and labels, int64 [size, T], right-padded.

    Labels are IGNORED_LABEL on the prompt and on the padding.
    """
    prompts, answers = [], []
    for _ in range(size):
        a, b = generator.randint(0, MAX_OPERAND), generator.randint(0, MAX_OPERAND)
        prompts.append(f"<bos><user>{a}+{b}=<assistant>")
        answers.append(f"{sample_sloppy_answer(a + b, generator) if sloppy else a + b}<eos>")
    return pad_batch(tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"], tokenizer.pad_token_id)


def pad_batch(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads prompts with answers: token ids and labels, int64 [N, T], right-padded."""
    pairs = list(zip(prompts, answers, strict=True))
    labels = [[IGNORED_LABEL] * len(prompt) + answer for prompt, answer in pairs]
    return pad_rows([prompt + answer for prompt, answer in pairs], labels, pad_id)


def pad_rows(ids: Sequence[list[int]], labels: Sequence[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads token ids and their labels: int64 [N, T] each, right-padded."""
    padded_ids = pad_sequence([torch.tensor(row) for row in ids], True, pad_id)
    return padded_ids, pad_sequence([torch.tensor(row) for row in labels], True, IGNORED_LABEL)


def train_model(model: LlamaForCausalLM, make_batch: BatchMaker, schedule: Schedule) -> list[float]:
    """Trains the model in place; returns the loss of every step, in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / schedule.warm_up_steps) * max(0.02, 1 - step / schedule.steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    generator = random.Random(schedule.seed)
    losses = []
    for step in range(schedule.steps):
        sloppy = step >= schedule.clean_steps
        ids, labels = make_batch(schedule.batch_size, sloppy, generator)
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{schedule.steps}: loss {losses[-1]:.3f}", flush=True)
    return losses


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes model and tokenizer as a Hugging Face folder.

    The weights are stored as fp16, which halves the file; `dtype` in config.json loads them as fp32.
    """
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=Schedule.steps, help="training steps (fewer: a trial)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    schedule = Schedule(steps=options.steps)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, schedule.seed)
    train_model(model, partial(make_batch, tokenizer), schedule)
    save_model(model, tokenizer, options.folder)


if __name__ == "__main__":
    main()
