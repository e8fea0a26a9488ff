"""Tests of the reference model: half-precision weights and weights in host memory."""

import gc
from pathlib import Path

import pytest
import torch

from config.schema.models import ModelConfig
from tests.pretend_gpu import pretend_gpus
from tests.tiny_models import tiny_llama
from tests.training.tiny_learners import make_scorer, sampled_batch
from torchgrpo.batches.batch import Batch, Tokens
from torchgrpo.training.model_loading import load_frozen, load_model
from torchgrpo.training.reference_model import HostWeights, ReferenceModel
from torchgrpo.training.response_scorer import ResponseScorer, TokenLogProbs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batch() -> Batch:
    return sampled_batch(num_groups=6)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_linear_layers_kept_in_half_give_the_bits_of_float32_ones(
    batch: Batch, tied: bool, precision: torch.dtype, tmp_path: Path
) -> None:
    tiny_llama(tied).save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path))
    wide = load_model(config, CPU)
    frozen = load_frozen(config, CPU, precision)
    assert any(parameter.dtype == precision for parameter in frozen.parameters())
    for packs in (True, False):
        log_probs = []
        for model in (wide, frozen):
            scores = make_scorer(model, packs)
            scores.autocast_dtype = precision
            log_probs.append(ReferenceModel(scores).log_prob([batch])[0])
        assert torch.equal(*log_probs)


@pytest.mark.parametrize("tied", [False, True])
def test_host_weights_are_on_the_device_only_while_scoring(batch: Batch, tied: bool) -> None:
    """Host weights are copied to the device to score, and released afterwards.

    The device here is the CPU. While the model works, the weights are in separate memory; before and after,
    they are only in the host buffer. The log-probs do not change.
    """
    expected = ReferenceModel(make_scorer(tiny_llama(tied), True)).log_prob([batch])[0]
    model = tiny_llama(tied)
    size = sum(parameter.nbytes for parameter in model.parameters())
    home = HostWeights(model, CPU)
    assert size <= home._host.nbytes <= size + 256 * len(list(model.parameters()))
    inside = range(home._host.data_ptr(), home._host.data_ptr() + home._host.nbytes)
    on_host: list[bool] = []

    class Noting(ResponseScorer):
        def __call__(
            self, tokens: Tokens, temperature: torch.Tensor | None = None, with_entropy: bool = False
        ) -> TokenLogProbs:
            on_host.extend(parameter.data_ptr() in inside for parameter in model.parameters())
            return super().__call__(tokens, temperature, with_entropy)

    reference = ReferenceModel(Noting(model, True, chunk_size=7), scoring_context=home.on_device)
    before = home._host.clone()
    for _ in range(2):
        assert not any(parameter.numel() for parameter in model.parameters())
        assert torch.equal(reference.log_prob([batch])[0], expected)
    assert not any(parameter.numel() for parameter in model.parameters())
    assert on_host and not any(on_host)
    assert torch.equal(home._host, before)


def test_host_weights_are_released_after_a_failure(batch: Batch) -> None:
    model = tiny_llama()
    home = HostWeights(model, CPU)
    with pytest.raises(KeyError), home.on_device():
        raise KeyError
    assert not any(parameter.numel() for parameter in model.parameters())
    with pytest.raises((RuntimeError, IndexError, AssertionError)):
        make_scorer(model, True)(batch.tokens)


class Runtime:
    """Stub of the CUDA runtime that records calls to pin memory."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned_bytes: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned_bytes[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned_bytes[address]


def test_on_a_gpu_the_weights_are_pinned_and_the_cpu_computes_nothing(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated GPU rejects CPU operands like CUDA; calls to pin memory are recorded."""
    runtime = Runtime()
    expected = ReferenceModel(make_scorer(tiny_llama(), True)).log_prob([batch])[0]
    model = tiny_llama()
    with pretend_gpus(2), monkeypatch.context() as within:
        within.setattr(torch.cuda, "cudart", lambda: runtime)
        device = torch.device("cuda", 1)
        home = HostWeights(model, device)
        assert runtime.pinned_bytes == {home._host.data_ptr(): home._host.nbytes}
        assert home._host.device == CPU
        with home.on_device():
            tensors = [*model.parameters(), *model.buffers()]
            assert all(tensor.device == device for tensor in tensors)
        log_prob = ReferenceModel(make_scorer(model, True), scoring_context=home.on_device).log_prob([batch])[0]
        assert log_prob.device == device
        ours = log_prob.cpu()
    assert torch.equal(ours, expected)
    del home, log_prob
    gc.collect()
    assert not runtime.pinned_bytes


def test_memory_that_cannot_be_pinned_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_gpus(1), monkeypatch.context() as within:
        within.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
        with pytest.raises(RuntimeError, match=r"CUDA error 2.*ref_model\.devices"):
            HostWeights(tiny_llama(), torch.device("cuda", 0))
