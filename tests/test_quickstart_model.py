"""Tests of the quickstart model: files, tokenizer, accuracy, and the script that trains it."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchgrpo.models.make_quickstart import (
    FOLDER,
    MAX_OPERAND,
    SLOPPY_ERRORS,
    main,
    make_batch,
    make_tokenizer,
    sample_sloppy_answer,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Restores the number of threads after the script has set it to one."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def generate_answers(model: Any, tokenizer: Any, operands: list[tuple[int, int]], sample: bool) -> list[str]:
    """Returns one completion per addition: decoded text with `<eos>`, without padding."""
    chats = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in operands]
    texts = [str(tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False)) for c in chats]
    prompts = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(**prompts, max_new_tokens=6, **options)
    completions = output[:, prompts["input_ids"].shape[1] :]
    return [str(tokenizer.decode(completion)).replace("<pad>", "") for completion in completions]


def accuracy(texts: list[str], operands: list[tuple[int, int]]) -> float:
    return sum(text == f"{a + b}<eos>" for text, (a, b) in zip(texts, operands, strict=True)) / len(texts)


def random_operands(count: int) -> list[tuple[int, int]]:
    generator = random.Random(0)
    return [(generator.randint(0, MAX_OPERAND), generator.randint(0, MAX_OPERAND)) for _ in range(count)]


def test_the_folder_fits_into_the_repository() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 3_000_000


def test_loads_as_fp32_and_is_stored_as_fp16(model: Any) -> None:
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert {weight.dtype for weight in load_file(FOLDER / "model.safetensors").values()} == {torch.float16}
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_is_a_llama_of_one_million_parameters(model: Any, tokenizer: Any) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 32
    assert config["vocab_size"] == len(tokenizer)
    assert 900_000 <= model.num_parameters() <= 1_100_000


def test_special_tokens_are_distinct_and_known_to_the_model(model: Any, tokenizer: Any) -> None:
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert len(set(specials)) == 3
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == specials


def test_chat_template(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "17+5="}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<bos><user>17+5=<assistant>"
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert encoded["input_ids"] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    token_texts = [tokenizer.decode([token]) for token in encoded["input_ids"]]
    assert token_texts == ["<bos>", "<user>", *"17+5=", "<assistant>"]
    full_chat = [{"role": "system", "content": "Add."}, *chat, {"role": "assistant", "content": "22"}]
    text = tokenizer.apply_chat_template(full_chat, tokenize=False)
    assert text == "<bos><system>Add.<user>17+5=<assistant>22<eos>"


@pytest.mark.parametrize("text", ["17+5=", " two\n\n spaces ", "¿größer? 日本 🙂", "<|im_end|>", "a" * 300])
def test_every_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_adds_badly_but_not_hopelessly(model: Any, tokenizer: Any) -> None:
    operands = random_operands(1500)
    sampled = generate_answers(model, tokenizer, operands, sample=True)
    assert 0.25 <= accuracy(sampled, operands) <= 0.40
    assert accuracy(generate_answers(model, tokenizer, operands, sample=False), operands) < 0.5


def test_most_wrong_answers_are_slips_of_the_training_data(model: Any, tokenizer: Any) -> None:
    operands = random_operands(500)
    texts = generate_answers(model, tokenizer, operands, sample=True)
    slip_texts = [{f"{a + b + slip}<eos>" for slip in SLOPPY_ERRORS} for a, b in operands]
    assert sum(text in slips for text, slips in zip(texts, slip_texts, strict=True)) >= 0.85 * len(texts)


def test_sloppy_answers_have_their_probabilities_and_are_not_negative() -> None:
    generator = random.Random(0)
    errors = [sample_sloppy_answer(40, generator) - 40 for _ in range(4000)]
    for slip, probability in SLOPPY_ERRORS.items():
        assert errors.count(slip) / len(errors) == pytest.approx(probability, abs=0.03)
    assert {sample_sloppy_answer(0, generator) for _ in range(200)} == {0, 1}


def test_only_the_answer_has_labels() -> None:
    tokenizer = make_tokenizer()
    ids, labels = make_batch(tokenizer, 16, sloppy=False, generator=random.Random(0))
    assert ids.shape == labels.shape
    for row, label in zip(ids, labels, strict=True):
        question = str(tokenizer.decode(row[label < 0])).replace("<pad>", "")
        a, b = question.removeprefix("<bos><user>").removesuffix("=<assistant>").split("+")
        assert tokenizer.decode(label[label >= 0]) == f"{int(a) + int(b)}<eos>"


@pytest.mark.usefixtures("restored_threads")
def test_the_script_is_deterministic_and_reproduces_the_tokenizer(tmp_path: Path) -> None:
    folders = (tmp_path / "first", tmp_path / "second")
    for folder in folders:
        main(["--steps", "3", "--folder", str(folder)])
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
    committed = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert set(first) == set(committed)
    for name in (*TOKENIZER_FILES, "config.json"):
        assert first[name] == committed[name], name
    assert first["model.safetensors"] != committed["model.safetensors"]
