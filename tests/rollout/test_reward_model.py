"""Tests of the reward model with a tiny random classifier in files of its own."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from config.schema.errors import ConfigError
from config.schema.model_rewards import RewardModelConfig
from envs.example import Completion, Example
from tests.script_runner import ROOT
from torchgrpo.rollout.model_rewards.interface import ModelRewardError
from torchgrpo.rollout.model_rewards.reward_model import RewardModel

Result = TypeVar("Result")
QUICKSTART = ROOT / "torchgrpo" / "models" / "quickstart"
SUM = Example(({"role": "user", "content": "4 + 7?"},), "11", 0)
TEXTS = ("11", "1", "4 + 7 = 11", "3 + 3 + 3", "")


def save_classifier(folder: Path, kind: Any = LlamaForSequenceClassification, **fields: Any) -> str:
    """Saves a random model with the quickstart's tokenizer; returns the folder."""
    shutil.copytree(QUICKSTART, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation*"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    padding = {"pad_token_id": tokenizer.pad_token_id or tokenizer.eos_token_id, "num_labels": 1}
    settings = {**sizes, **padding, "max_position_embeddings": 64, "initializer_range": 0.5, **fields}
    torch.manual_seed(3)
    kind(LlamaConfig(vocab_size=len(tokenizer), **settings)).save_pretrained(folder)
    return str(folder)


def run(config: RewardModelConfig, use: Callable[[RewardModel], Awaitable[Result]]) -> Result:
    """Runs a function of a reward model in a loop, and closes the model."""

    async def run_and_close() -> Result:
        model = RewardModel(config)
        try:
            return await asyncio.wait_for(use(model), 120.0)
        finally:
            await model.close()

    return asyncio.run(run_and_close())


def score(config: RewardModelConfig, *texts: str) -> tuple[list[float], dict[str, float]]:
    """Returns the scores of completions that are scored concurrently, and the metrics."""

    async def score_all(model: RewardModel) -> tuple[list[float], dict[str, float]]:
        scores = await asyncio.gather(*(model.score(Completion(text), SUM) for text in texts))
        return list(scores), model.metrics()

    return run(config, score_all)


def reference_score(folder: str, text: str, label: int = 0) -> float:
    """Computes the score of one completion in float64, alone and without padding."""
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    messages = [*SUM.messages, {"role": "assistant", "content": text}]
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=True)
    token_ids = torch.tensor([rendered["input_ids"]])
    hidden = model.model(token_ids).last_hidden_state[0].detach()
    padding = model.config.pad_token_id
    last = -1 if padding is None else int((token_ids[0] != padding).nonzero()[-1])
    return float(hidden[last] @ model.score.weight[label].detach())


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_of_batches_are_those_of_single_texts(batch_size: int, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    scores, metrics = score(RewardModelConfig(folder, batch_size=batch_size), *TEXTS)
    expected = [reference_score(folder, text) for text in TEXTS]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in scores}) == len(TEXTS)
    assert metrics["reward_model/rows"] == 5
    assert metrics["reward_model/batch_size"] == {1: 1.0, 3: 2.5, 16: 5.0}[batch_size]


def test_without_a_padding_token_each_text_is_a_batch(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", pad_token_id=None)
    scores, metrics = score(RewardModelConfig(folder), *TEXTS)
    assert scores == pytest.approx([reference_score(folder, text) for text in TEXTS], abs=1e-5)
    assert metrics["reward_model/batch_size"] == 1.0


def test_a_label_of_several_is_chosen(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", num_labels=3)
    scores, _ = score(RewardModelConfig(folder, label=2), *TEXTS)
    assert scores == pytest.approx([reference_score(folder, text, 2) for text in TEXTS], abs=1e-5)
    for label in (None, 3):
        with pytest.raises(ConfigError, match=rf"env.reward_model.label={label}: .* has 3 labels; .* 0 to 2"):
            RewardModel(RewardModelConfig(folder, label=label))


def test_rows_that_arrive_during_a_batch_form_the_next(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")

    async def score_in_turns(model: RewardModel) -> list[float]:
        first = asyncio.create_task(model.score(Completion("1"), SUM))
        while model._waiting or model._batches is None:
            await asyncio.sleep(0)
        later = [asyncio.create_task(model.score(Completion(text), SUM)) for text in TEXTS]
        cancelled = later.pop()
        cancelled.cancel()
        await asyncio.gather(first, *later)
        return list(model._sizes)

    assert run(RewardModelConfig(folder), score_in_turns) == [1, 4]


def test_a_long_text_is_an_error(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    with pytest.raises(ModelRewardError, match=r"have \d+ tokens, .* 1 to 64 \(env.reward_model.max_length\)"):
        score(RewardModelConfig(folder), "1+" * 100)
    with pytest.raises(ModelRewardError, match="1 to 5"):
        score(RewardModelConfig(folder, max_length=5), "11")


def test_control_tokens_in_a_completion_stay_text(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    model = RewardModel(RewardModelConfig(folder))
    eos, eos_id = model.tokenizer.eos_token, model.tokenizer.eos_token_id
    plain, spelled = (model.encode(Completion(text), SUM) for text in ("1", f"1{eos}"))
    assert spelled.count(eos_id) == plain.count(eos_id) and len(spelled) > len(plain)
    asyncio.run(model.close())


def test_a_score_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    model = RewardModel(RewardModelConfig(folder))
    with torch.no_grad():
        model.model.score.weight.fill_(float("nan"))

    async def score_and_close() -> None:
        with pytest.raises(ModelRewardError, match="the score is nan"):
            await model.score(Completion("1"), SUM)
        await model.close()

    asyncio.run(score_and_close())


def test_files_without_the_head_are_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", LlamaForCausalLM)
    with pytest.raises(
        ConfigError,
        match=r"env.reward_model.name=.*the files lack 1 tensor: score.weight; .* LlamaForSequenceClassification",
    ):
        RewardModel(RewardModelConfig(folder))


def test_a_missing_template_folder_or_device_is_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"env.reward_model.device=cuda:99: this machine has no such device"):
        RewardModel(RewardModelConfig(folder, device="cuda:99"))
    with pytest.raises(ConfigError, match=r"env.reward_model.name=.*absent: its tokenizer could not be loaded"):
        RewardModel(RewardModelConfig(str(tmp_path / "absent")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    shutil.rmtree(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"env.reward_model.name=.*its tokenizer has no chat template"):
        RewardModel(RewardModelConfig(folder))
