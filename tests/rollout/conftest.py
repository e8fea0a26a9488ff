"""Fixtures of rollout tests: tiny random Llama models, shared vLLM engines, and engine pools."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from config.schema.models import ModelConfig
from envs.group import SINGLE_ENGINE_NAME, Sampling
from tests.rollout.recording import QUICKSTART
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.engine_supervisor import EnginePoolSettings
from torchgrpo.rollout.engines.interface import Engine, Request, Response, SteppedEngine, WeightTarget
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.model_loading import load_model

VOCAB = 320
EOS = 2
MAX_LEN = 320


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests with vLLM engines as long, except those of one file."""
    for item in items:
        engines = {"start_engine", "vllm_pool"} & set(getattr(item, "fixturenames", ()))
        if engines and item.path.name != "test_vllm_engine.py":
            item.add_marker(pytest.mark.long)


def tiny_llama(tied: bool, seed: int = 0) -> LlamaForCausalLM:
    """Makes a float32 Llama of two layers.

    Its weights are four times the usual size, so that log-probs react to every fault.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def lora_policy(tied: bool = False, **how: Any) -> Any:
    """Makes a tiny Llama with LoRA adapters that change every output."""
    policy = get_peft_model(
        tiny_llama(tied), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **how)
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return policy.eval()


def score_single_engine(engine: WeightTarget, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Scores sequences with an engine that is not one of several."""
    (name, scores), *others = engine.score(sequences).items()
    assert (name, others) == (SINGLE_ENGINE_NAME, [])
    return scores.log_probs


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(QUICKSTART)
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(ModelConfig(name=str(QUICKSTART)), torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Saves the tiny models as Hugging Face folders, keyed by whether their embeddings are tied."""
    torch.set_num_threads(1)
    folders = {}
    for tied in (False, True):
        folders[tied] = tmp_path_factory.mktemp(f"tiny_{'tied' if tied else 'untied'}")
        tiny_llama(tied).save_pretrained(folders[tied])
    return folders


def tiny_settings(folder: Path, **changes: object) -> VLLMSettings:
    defaults: dict[str, object] = {"max_num_seqs": 64, "kv_cache_bytes": 32 << 20, "max_model_len": MAX_LEN}
    defaults["eos_token_ids"] = (EOS,)
    return VLLMSettings(model=str(folder), **(defaults | changes))  # type: ignore[arg-type]


StartEngine = Callable[..., VLLMEngine]


@pytest.fixture(scope="module")
def start_engine(tiny_folders: dict[bool, Path]) -> Iterator[StartEngine]:
    """Returns a function that starts vLLM engines by `tied` and changed settings.

    The engines are closed together, since closing one ends vLLM's process-wide state for all. They are closed after
    each module, since other modules run whole scripts in this process.
    """
    if installed_vllm() is None:
        pytest.skip("vLLM is not installed")
    engines: list[VLLMEngine] = []

    def start(tied: bool = False, tokenizer: PreTrainedTokenizerBase | None = None, **changes: object) -> VLLMEngine:
        engines.append(VLLMEngine(tiny_settings(tiny_folders[tied], **changes), tokenizer))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    assert not [file for engine in engines for file in engine._worker_files if file.exists()]


@pytest.fixture(scope="module")
def started_engines(start_engine: StartEngine) -> dict[bool, VLLMEngine]:
    return {tied: start_engine(tied) for tied in (False, True)}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def vllm_engine(started_engines: dict[bool, VLLMEngine], tied: bool) -> VLLMEngine:
    """Shared engine, reset to the weights of `tiny_llama(tied)` and version 0."""
    engine = started_engines[tied]
    engine.load(tiny_llama(tied).state_dict().items(), version=0)
    assert engine.in_flight == 0
    return engine


# --- pools -----------------------------------------------------------------------------------------------

SAMPLING = Sampling(max_tokens=16)
OpenPool = Callable[..., RayEnginePool]


def shared_memory_transport() -> WeightTransport:
    return WeightTransport(SharedMemory())


@pytest.fixture
def open_pool(local_ray: None) -> Iterator[OpenPool]:
    open_pools: list[RayEnginePool] = []

    def open_one(
        factory: Callable[[], Engine], engines: int = 1, transport: WeightTransport | None = None, **settings: float
    ) -> RayEnginePool:
        places = [DeviceSlot(f"engine {index}") for index in range(engines)]
        way = transport or shared_memory_transport()
        open_pools.append(RayEnginePool(factory, places, EnginePoolSettings(**settings), way))  # type: ignore[arg-type]
        return open_pools[-1]

    yield open_one
    for pool in open_pools:
        pool.close()


def make_requests(count: int, n: int = 2) -> list[Request]:
    return [Request(i, (3 + i, 4, 5), n, SAMPLING, seed=100 + i) for i in range(count)]


def drain(engine: SteppedEngine) -> list[Response]:
    responses: list[Response] = []
    while engine.in_flight:
        responses += engine.step(timeout=1.0)
    return responses
