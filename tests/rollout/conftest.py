"""Tiny random Llama models, one real vLLM engine for each, shared by all tests of a module, and pools."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from envs.group import ALONE, Sampling
from torchgrpo.cluster.runtime import Place
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.interface import Engine, Request, Response, SteppedEngine, WeightTarget
from torchgrpo.rollout.engines.pool import RayPool
from torchgrpo.rollout.engines.supervisor import PoolSettings
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import VLLMSettings
from torchgrpo.rollout.weights.host_copy import Transport
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory

VOCAB = 320
EOS = 2
MAX_LEN = 320


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines of vLLM are of the second tier, but for those of one file."""
    for item in items:
        engines = {"start_engine", "vllm_pool"} & set(getattr(item, "fixturenames", ()))
        if engines and item.path.name != "test_vllm_engine.py":
            item.add_marker(pytest.mark.long)


def tiny_llama(tied: bool, seed: int = 0) -> LlamaForCausalLM:
    """Two layers, fp32, weights four times the usual size so that log-probs react to every fault."""
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
    """A tiny Llama under adapters that change every output."""
    policy = get_peft_model(
        tiny_llama(tied), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **how)
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return policy.eval()


def scores_of_one(engine: WeightTarget, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of an engine that is alone."""
    (name, found), *others = engine.score(sequences).items()
    assert (name, others) == (ALONE, [])
    return found.log_probs


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Hugging Face folders of the tiny model, keyed by whether its embeddings are tied."""
    torch.set_num_threads(1)
    folders = {}
    for tied in (False, True):
        folders[tied] = tmp_path_factory.mktemp(f"tiny_{'tied' if tied else 'untied'}")
        tiny_llama(tied).save_pretrained(folders[tied])
    return folders


def tiny_settings(folder: Path, **changes: object) -> VLLMSettings:
    usual: dict[str, object] = {"max_num_seqs": 64, "kv_cache_bytes": 32 << 20, "max_model_len": MAX_LEN}
    usual["eos_token_ids"] = (EOS,)
    return VLLMSettings(model=str(folder), **(usual | changes))  # type: ignore[arg-type]


StartEngine = Callable[..., VLLMEngine]


@pytest.fixture(scope="module")
def start_engine(tiny_folders: dict[bool, Path]) -> Iterator[StartEngine]:
    """Starts engines by `tied` and changed settings; they end together, since closing one ends vLLM's
    process-wide state for all, and with the module, since others run whole scripts in this process."""
    if installed_vllm() is None:
        pytest.skip("vLLM is not installed")
    engines: list[VLLMEngine] = []

    def start(tied: bool = False, **changes: object) -> VLLMEngine:
        engines.append(VLLMEngine(tiny_settings(tiny_folders[tied], **changes)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    assert not [file for engine in engines for file in engine._files if file.exists()]


@pytest.fixture(scope="module")
def started_engines(start_engine: StartEngine) -> dict[bool, VLLMEngine]:
    return {tied: start_engine(tied) for tied in (False, True)}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def vllm_engine(started_engines: dict[bool, VLLMEngine], tied: bool) -> VLLMEngine:
    """The shared engine, back at the weights of `tiny_llama(tied)` and version 0, nothing in flight."""
    engine = started_engines[tied]
    engine.load(tiny_llama(tied).state_dict().items(), version=0)
    assert engine.in_flight == 0
    return engine


# --- pools -----------------------------------------------------------------------------------------------

SAMPLING = Sampling(max_tokens=16)
OpenPool = Callable[..., RayPool]


def through_memory() -> Transport:
    return Transport(SharedMemory())


@pytest.fixture
def open_pool(local_ray: None) -> Iterator[OpenPool]:
    opened: list[RayPool] = []

    def open_one(
        factory: Callable[[], Engine], engines: int = 1, transport: Transport | None = None, **settings: float
    ) -> RayPool:
        places = [Place(f"engine {index}") for index in range(engines)]
        way = transport or through_memory()
        opened.append(RayPool(factory, places, PoolSettings(**settings), way))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for pool in opened:
        pool.close()


def requests(count: int, n: int = 2) -> list[Request]:
    return [Request(i, (3 + i, 4, 5), n, SAMPLING, seed=100 + i) for i in range(count)]


def drain(engine: SteppedEngine) -> list[Response]:
    responses: list[Response] = []
    while engine.in_flight:
        responses += engine.step(timeout=1.0)
    return responses
