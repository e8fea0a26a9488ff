"""Reward by a sequence classifier of transformers on a device of its own (`env.reward_model`).

run's loop                                          one thread
──────────                                          ──────────
score ─▶ waiting rows of any group
batch task, while rows wait:
  takes all rows, shortest first ── batch_size ──▶  forward pass
  new rows gather meanwhile      ◀── logits ─────
closed: the thread ends after its forward pass
"""

import asyncio
import math
import re
import statistics
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from config.schema.errors import ConfigError, RunError
from config.schema.model_rewards import RewardModelConfig
from envs.chat_template import render_chat
from envs.control_tokens import control_tokens
from envs.example import Completion, Example, Message
from torchgrpo.plan.model_shape import model_path
from torchgrpo.rollout.model_rewards.interface import ModelRewardError
from torchgrpo.training.model_loading import check_loading_report, convert_loading_errors, silence_transformers

WINDOW_SIZE = 1000
"""Number of the last batches whose durations and sizes count."""


@dataclass(eq=False)
class _Row:
    """Waiting text: its token ids, and the future of its score."""

    token_ids: list[int]
    answer: asyncio.Future[float]


class RewardModel:
    """Sequence classifier as an async reward; the score is the logit of the label.

    The chat template of its own tokenizer renders prompt and completion. Control tokens that are spelled in a text stay
    text.

    Raises:
        ConfigError: model, tokenizer, label or device cannot be used.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        config.check_complete()
        self.config, self.place = config, f"env.reward_model.name={config.name}"
        self.device = _find_device(config.device)
        try:
            self.tokenizer, self.model = _load(config, self.device)
        except ConfigError as error:
            raise ConfigError(re.sub(r"\bmodel\.name=", "env.reward_model.name=", str(error))) from error
        self.label = self._find_label()
        text_config = self.model.config.get_text_config()
        self.pad_token_id: int | None = text_config.pad_token_id
        # The library's decoders find the last token of a row by its padding, and without a padding token only in a
        # batch of one.
        self.batch_size = config.batch_size if self.pad_token_id is not None else 1
        positions = text_config.to_dict().get("max_position_embeddings") or math.inf
        self.max_length = config.max_length or min(self.tokenizer.model_max_length, positions)
        self._executor = ThreadPoolExecutor(1, "reward model", torch.get_num_threads)
        self._waiting: list[_Row] = []
        self._batches: asyncio.Task[None] | None = None
        self._num_rows = 0
        self._sizes: deque[int] = deque(maxlen=WINDOW_SIZE)
        self._seconds: deque[float] = deque(maxlen=WINDOW_SIZE)

    async def score(self, completion: Completion, example: Example) -> float:
        """Returns the logit of a completion with its prompt.

        Raises:
            ModelRewardError: the text is too long, the template refuses the messages, or the logit is not finite.
            RunError: the device has too little memory.
        """
        row = _Row(self.encode(completion, example), asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._run_batches())
        score = await row.answer
        if not math.isfinite(score):
            raise ModelRewardError(f"{self.place}: the score is {score}")
        return score

    def encode(self, completion: Completion, example: Example) -> list[int]:
        """Encodes prompt and completion as token ids. Raises ModelRewardError as `score`."""
        turns = completion.turns if len(completion.turns) > 1 else [_answer(completion)]
        messages = [*example.messages, *turns]
        control = control_tokens(self.tokenizer)
        try:
            if control.spells_control_token(messages, example.tools):
                text = control.render_with_private_names(messages, example.tools, add_generation_prompt=False)
                token_ids = control.encode_rendered(text)
            else:
                text = render_chat(self.tokenizer, messages, example.tools, add_generation_prompt=False)
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # a template is a program and can raise any exception
            raise ModelRewardError(f"{self.place}: its chat template refuses the messages: {error}") from error
        if not 0 < len(token_ids) <= self.max_length:
            raise ModelRewardError(
                f"{self.place}: prompt and completion have {len(token_ids)} tokens, and the reward model takes 1 to "
                f"{self.max_length} (env.reward_model.max_length)"
            )
        return token_ids

    def metrics(self) -> dict[str, float]:
        """Returns the number of rows, and mean size and median seconds of the last batches."""
        return {
            "reward_model/rows": float(self._num_rows),
            "reward_model/batch_size": statistics.fmean(self._sizes) if self._sizes else 0.0,
            "reward_model/seconds": statistics.median(self._seconds) if self._seconds else 0.0,
        }

    async def close(self) -> None:
        """Ends the thread after its forward pass."""
        if self._batches is not None:
            self._batches.cancel()
        self._executor.shutdown(cancel_futures=True)

    async def _run_batches(self) -> None:
        """Scores the waiting rows in batches, shortest first, until no row waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # rows of other completions that can continue now join the batch
            taken, self._waiting = self._waiting, []
            rows = sorted((row for row in taken if not row.answer.done()), key=lambda row: len(row.token_ids))
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                began = time.monotonic()
                try:
                    scores = await loop.run_in_executor(self._executor, self._forward, [row.token_ids for row in batch])
                except Exception as error:  # fails the calls that wait, and not this task alone
                    _fail(batch, self._describe_failure(error))
                    continue
                self._num_rows += len(batch)
                self._sizes.append(len(batch))
                self._seconds.append(time.monotonic() - began)
                for row, score in zip(batch, scores, strict=True):
                    if not row.answer.done():
                        row.answer.set_result(score)

    def _describe_failure(self, error: Exception) -> Exception:
        """Returns a failure of the forward pass with its remedy, if one is known."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        failure = RunError(
            f"env.reward_model.batch_size={self.config.batch_size}: {self.device} has too little memory for a forward "
            "pass; lower env.reward_model.batch_size, or set another env.reward_model.device"
        )
        failure.__cause__ = error
        return failure

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Returns the logit of the label for each row of token ids."""
        length, padding = max(map(len, rows)), self.pad_token_id or 0
        padded = [row + [padding] * (length - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
        token_ids, attention_mask = (torch.tensor(each, device=self.device) for each in (padded, mask))
        logits: Tensor = self.model(input_ids=token_ids, attention_mask=attention_mask).logits  # [rows, labels]
        scores: list[float] = logits[:, self.label].float().tolist()
        return scores

    def _find_label(self) -> int:
        """Returns the index of the label.

        Raises:
            ConfigError: the setting is not an index of one of the model's labels.
        """
        labels: int = self.model.config.num_labels or 0
        label = self.config.label
        if label is None and labels == 1:
            return 0
        if label is None or label >= labels:
            raise ConfigError(
                f"env.reward_model.label={label}: {self.config.name} has {labels} labels; set env.reward_model.label "
                f"to the index of the label that is the score, 0 to {labels - 1}"
            )
        return label


def _answer(completion: Completion) -> Message:
    return {"role": "assistant", "content": completion.full_text}


def _fail(rows: list[_Row], error: Exception) -> None:
    for row in rows:
        if not row.answer.done():
            row.answer.set_exception(error)


def _find_device(name: str) -> torch.device:
    """Returns the device. Raises ConfigError if this machine has no such device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"env.reward_model.device={name}: this machine has no such device ({reason}); set cpu, or cuda:INDEX"
        ) from error
    return device


def _load(config: RewardModelConfig, device: torch.device) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Loads tokenizer and model. Raises ConfigError if files, tensors or the chat template are missing."""
    name = str(config.name)
    with convert_loading_errors("its tokenizer", name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.name={name}: its tokenizer has no chat template, which renders prompt and completion; save the "
            "template that the model was trained with as chat_template.jinja in a local folder of the model"
        )
    loader: Any = AutoModelForSequenceClassification
    with convert_loading_errors("the model", name), silence_transformers():
        model, report = loader.from_pretrained(
            model_path(name),
            dtype=getattr(torch, config.dtype),
            device_map={"": device},
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loading_report` refuses them
        )
    check_loading_report(name, model, report)
    return tokenizer, model.eval()
