"""The frozen reference: fewer bytes with the same numbers, and weights that visit a device only to score."""

import gc
from pathlib import Path

import pytest
import torch

from config.schema.models import ModelConfig
from tests.pretend_gpu import pretend_gpus
from tests.tiny import tiny_llama
from tests.training.scorers import collected, scorer
from torchgrpo.batches.batch import Batch, Tokens
from torchgrpo.training.forward import ResponseScorer, Scores
from torchgrpo.training.model_loading import load_frozen, load_model
from torchgrpo.training.reference import HostMemory, Reference

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batch() -> Batch:
    return collected(num_groups=6)


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
            scores = scorer(model, packs)
            scores.autocast_dtype = precision
            log_probs.append(Reference(scores).log_prob([batch])[0])
        assert torch.equal(*log_probs)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_host_memory_visit_the_device_to_score(batch: Batch, tied: bool) -> None:
    """The device is the CPU itself here: what is checked is that the weights are in memory of its own while the model
    works, that they are nowhere but in the host's buffer before and after, and that the numbers are the same."""
    expected = Reference(scorer(tiny_llama(tied), True)).log_prob([batch])[0]
    model = tiny_llama(tied)
    size = sum(parameter.nbytes for parameter in model.parameters())
    home = HostMemory(model, CPU)
    assert size <= home._host.nbytes <= size + 256 * len(list(model.parameters()))
    inside = range(home._host.data_ptr(), home._host.data_ptr() + home._host.nbytes)
    seen: list[bool] = []

    class Noting(ResponseScorer):
        def __call__(
            self, tokens: Tokens, temperature: torch.Tensor | None = None, with_entropy: bool = False
        ) -> Scores:
            seen.extend(parameter.data_ptr() in inside for parameter in model.parameters())
            return super().__call__(tokens, temperature, with_entropy)

    reference = Reference(Noting(model, True, chunk_size=7), visit=home.visit)
    before = home._host.clone()
    for _ in range(2):
        assert not any(parameter.numel() for parameter in model.parameters())
        assert torch.equal(reference.log_prob([batch])[0], expected)
    assert not any(parameter.numel() for parameter in model.parameters())
    assert seen and not any(seen)
    assert torch.equal(home._host, before)


def test_the_weights_leave_after_a_failure(batch: Batch) -> None:
    model = tiny_llama()
    home = HostMemory(model, CPU)
    with pytest.raises(KeyError), home.visit():
        raise KeyError
    assert not any(parameter.numel() for parameter in model.parameters())
    with pytest.raises((RuntimeError, IndexError, AssertionError)):
        scorer(model, True)(batch.tokens)


class Runtime:
    """CUDA's calls to pin memory, recorded."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_on_a_gpu_the_weights_are_pinned_and_the_cpu_computes_nothing(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended GPU, which refuses operands of the CPU as CUDA does; pinning is recorded."""
    runtime = Runtime()
    expected = Reference(scorer(tiny_llama(), True)).log_prob([batch])[0]
    model = tiny_llama()
    with pretend_gpus(2), monkeypatch.context() as within:
        within.setattr(torch.cuda, "cudart", lambda: runtime)
        device = torch.device("cuda", 1)
        home = HostMemory(model, device)
        assert runtime.pinned == {home._host.data_ptr(): home._host.nbytes}
        assert home._host.device == CPU
        with home.visit():
            tensors = [*model.parameters(), *model.buffers()]
            assert all(tensor.device == device for tensor in tensors)
        log_prob = Reference(scorer(model, True), visit=home.visit).log_prob([batch])[0]
        assert log_prob.device == device
        ours = log_prob.cpu()
    assert torch.equal(ours, expected)
    del home, log_prob
    gc.collect()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_gpus(1), monkeypatch.context() as within:
        within.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
        with pytest.raises(RuntimeError, match=r"CUDA error 2.*ref_model\.devices"):
            HostMemory(tiny_llama(), torch.device("cuda", 0))
