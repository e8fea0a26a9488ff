"""Tests of pushes copied into the live tensors of vLLM, as on a GPU.

vLLM's CPU build packs matrices; the tests switch the packing off, so that its parameters are those of a GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.log_capture import LogCapture
from tests.rollout.conftest import StartEngine, score_single_engine, tiny_llama
from tests.rollout.log_prob_comparison import max_log_prob_gap
from torchgrpo.rollout.engines import vllm_live_weights
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_live_weights import LiveWeights, UnmappableModelError
from torchgrpo.rollout.weights.weight_update import ReadyTensor, WeightUpdate
from torchgrpo.training.published_weights import PolicyWeights, named_weights

SEQUENCES = [list(range(3, 203)), list(range(40, 90))]
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def start_plain_engine(start_engine: StartEngine) -> Iterator[StartEngine]:
    """Starts engines of plain layers whose matrices are not packed."""
    utils = pytest.importorskip("vllm.model_executor.layers.utils")

    def compute_with_the_parameter(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(utils, "dispatch_cpu_unquantized_gemm", compute_with_the_parameter)
        yield start_engine


@pytest.fixture(scope="module")
def plain_engines(start_plain_engine: StartEngine) -> dict[bool, VLLMEngine]:
    return {tied: start_plain_engine(tied) for tied in (False, True)}


@pytest.fixture
def engine(plain_engines: dict[bool, VLLMEngine], tied: bool) -> VLLMEngine:
    return plain_engines[tied]


def worker_of(engine: VLLMEngine) -> Any:
    return engine._llm.model_executor.driver_worker.worker


def parameters_of(engine: VLLMEngine) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in worker_of(engine).get_model().named_parameters()}


def lose_parameters(engine: VLLMEngine) -> None:
    """Makes the parameters undefined, as sleep does."""
    with torch.no_grad():
        for parameter in worker_of(engine).get_model().parameters():
            parameter.fill_(torch.nan)


def assert_same_bits(parameters: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert parameters.keys() == expected.keys()
    for name, tensor in parameters.items():
        assert torch.equal(tensor, expected[name]), name


def reload_parameters(engine: VLLMEngine, update: WeightUpdate) -> dict[str, Tensor]:
    """Returns the parameters after vLLM's own reload."""
    with torch.no_grad():
        worker_of(engine).reload_weights(weights_iterator=iter(update))
    return parameters_of(engine)


def count_calls(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name at every call."""
    calls: list[str] = []
    method = getattr(owner, name)

    def record_call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, record_call)
    return calls


def test_copies_have_the_bits_of_vllms_reload(engine: VLLMEngine, tied: bool) -> None:
    for version in (1, 2):
        learner = PolicyWeights(tiny_llama(tied, seed=version), named_weights)
        expected = reload_parameters(engine, WeightUpdate(learner.publish()))
        lose_parameters(engine)
        engine.load(WeightUpdate(learner.publish()), version)
        assert_same_bits(parameters_of(engine), expected)
        for found, wanted in zip(score_single_engine(engine, SEQUENCES), learner.score(SEQUENCES), strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
    assert worker_of(engine).reload_reason is None


def test_float32_weights_are_rounded_as_the_reload_rounds(start_plain_engine: StartEngine) -> None:
    """The copy casts where the learner publishes another dtype than the engine's."""
    half = start_plain_engine(dtype="bfloat16")
    for dtype in (torch.bfloat16, torch.float32):
        learner = PolicyWeights(tiny_llama(False, seed=3), partial(named_weights, dtype=dtype))
        expected = reload_parameters(half, WeightUpdate(learner.publish()))
        lose_parameters(half)
        half.load(WeightUpdate(learner.publish()), 1)
        assert_same_bits(parameters_of(half), expected)
        assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16}


def test_a_later_push_is_one_copy_without_loading_code(
    engine: VLLMEngine, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied head is made and copied once."""
    learner = PolicyWeights(tiny_llama(tied, seed=4), named_weights)
    engine.load(WeightUpdate(learner.publish()), 1)
    worker = worker_of(engine)
    copies = count_calls(torch, "_foreach_copy_", monkeypatch)
    loads = count_calls(type(worker.get_model()), "load_weights", monkeypatch)
    reloads = count_calls(type(worker), "reload_weights", monkeypatch)
    update = WeightUpdate(learner.publish())
    engine.load(update, 2)
    assert (copies, loads, reloads) == (["_foreach_copy_"], [], [])
    distinct = {tensor.identity: tensor for tensor in update.tensors}
    assert update.transfer_size.bytes == sum(tensor.make().nbytes for tensor in distinct.values())


def test_many_bytes_are_copied_in_parts(engine: VLLMEngine, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast tensors need memory, so that only some of them exist at a time."""
    learner = PolicyWeights(tiny_llama(tied, seed=5), named_weights)
    expected = reload_parameters(engine, WeightUpdate(learner.publish()))
    lose_parameters(engine)
    monkeypatch.setattr(vllm_live_weights, "_MAX_COPY_BYTES", 100_000)
    copies = count_calls(torch, "_foreach_copy_", monkeypatch)
    engine.load(WeightUpdate(learner.publish()), 1)
    assert len(copies) > 2
    assert_same_bits(parameters_of(engine), expected)


def replace(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: weights | {name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace("model.layers.0.mlp.other.weight", torch.ones(4)), r"mlp\.other\.weight of shape \(4,\)"),
        (replace(QUERY, torch.ones(128, 63)), r"delivered model\.layers\.0\.self_attn\.q_proj\.weight with shape"),
        (lambda weights: {QUERY: weights[QUERY]}, r"only some shards of 1 matrices: \['model\.layers\.0\..*qkv_proj"),
    ],
    ids=["name", "shape", "shard"],
)
def test_a_push_that_does_not_fit_writes_nothing(
    engine: VLLMEngine, tied: bool, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    weights = dict(tiny_llama(tied).state_dict())
    engine.load(weights.items(), 1)
    before = parameters_of(engine)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            engine.load(change({name: tensor + 1 for name, tensor in weights.items()}).items(), 2)
        assert_same_bits(parameters_of(engine), before)
    engine.load(weights.items(), 3)
    assert worker_of(engine).reload_reason is None


def test_a_module_alone_may_be_pushed(engine: VLLMEngine, tied: bool) -> None:
    """Constant tensors are left out of later pushes."""
    weights = dict(tiny_llama(tied).state_dict())
    engine.load(weights.items(), 1)
    before = parameters_of(engine)
    attention = {name: tensor + 1 for name, tensor in weights.items() if "layers.0.self_attn" in name}
    engine.load(attention.items(), 2)
    after = parameters_of(engine)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.0.self_attn.{name}.weight" for name in ("qkv_proj", "o_proj")}
    assert torch.equal(after["model.layers.0.self_attn.qkv_proj.weight"][:128], attention[QUERY])


def test_new_memory_of_a_parameter_gets_a_new_map(engine: VLLMEngine, tied: bool) -> None:
    weights = dict(tiny_llama(tied).state_dict())
    engine.load(weights.items(), 1)
    expected = parameters_of(engine)
    for parameter in worker_of(engine).get_model().parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    engine.load(weights.items(), 2)
    assert_same_bits(parameters_of(engine), expected)


def test_a_layout_that_vllm_changed_is_reloaded(
    start_plain_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, log_capture: LogCapture
) -> None:
    """Some platforms store a matrix by columns; the reason is logged once."""
    engine, model = start_plain_engine(), tiny_llama(False, seed=7)
    layer = worker_of(engine).get_model().model.layers[1].mlp.down_proj
    layer.weight.data = layer.weight.data.t().contiguous().t()
    reloads = count_calls(type(worker_of(engine)), "reload_weights", monkeypatch)
    for version in (1, 2):
        engine.load(model.state_dict().items(), version)
    assert len(reloads) == 2
    assert torch.equal(layer.weight, model.state_dict()["model.layers.1.mlp.down_proj.weight"])
    messages = [message for message in log_capture.messages if "reloads the weights at every push" in message]
    assert len(messages) == 1
    assert messages[0].endswith("vLLM changed the layout of model.layers.1.mlp.down_proj.weight after loading")


def test_the_cache_wakes_after_the_weights_have_arrived(
    engine: VLLMEngine, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary tensors of a load never exist beside the cache.

    vLLM's CPU build keeps the memory itself.
    """
    executor = engine._llm.model_executor
    asleep_at_load: list[set[str]] = []
    load = engine._load_full_weights

    def record_load(weights: WeightUpdate) -> None:
        asleep_at_load.append(set(executor.sleeping_tags))
        load(weights)

    monkeypatch.setattr(engine, "_load_full_weights", record_load)
    model = tiny_llama(tied, seed=8)
    for version in (1, 2):
        engine.sleep()
        assert executor.sleeping_tags == {"weights", "kv_cache"}
        engine.wake()
        lose_parameters(engine)
        engine.load(model.state_dict().items(), version)
        assert not engine._llm.is_sleeping()
    assert asleep_at_load == [{"kv_cache"}] * 2
    assert max_log_prob_gap(model, engine, SEQUENCES) < 1e-4
    engine.load(model.state_dict().items(), 3)
    assert asleep_at_load[2:] == [set()]


# --- loading code that is no copy -----------------------------------------------------------------------

Loading = Callable[[nn.Parameter, Tensor], object]


class OneMatrix(nn.Module):
    """Model of one matrix [4, 2], whose loading code is a function."""

    def __init__(self, loading: Loading) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self._loading = loading

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self._loading(self.weight, tensor)


def tensors(*shape: int) -> Sequence[ReadyTensor]:
    return [ReadyTensor("weight", torch.arange(float(torch.Size(shape).numel())).view(shape))]


def test_padding_is_zero_after_every_push() -> None:
    pytest.importorskip("vllm")

    def load_rows(parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.data[:3].copy_(tensor)
        parameter.data[3:].fill_(0)

    model = OneMatrix(load_rows)
    live = LiveWeights.from_model(model, tensors(3, 2))
    for _ in range(2):
        model.weight.data.fill_(torch.nan)
        live.copy(WeightUpdate(tensors(3, 2)))
        assert model.weight.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]


def test_parts_of_a_pushed_tensor_go_to_several_places() -> None:
    pytest.importorskip("vllm")

    def swap_halves(parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.data[:2].copy_(tensor[2:])
        parameter.data[2:].copy_(tensor[:2])

    model = OneMatrix(swap_halves)
    live = LiveWeights.from_model(model, tensors(4, 2))
    assert not model.weight.any(), "recording writes nothing"
    live.copy(WeightUpdate(tensors(4, 2)))
    assert model.weight.tolist() == [[4.0, 5.0], [6.0, 7.0], [0.0, 1.0], [2.0, 3.0]]


def test_a_square_matrix_may_be_transposed() -> None:
    pytest.importorskip("vllm")
    model = OneMatrix(lambda parameter, tensor: parameter.data.copy_(tensor.T))
    model.weight = nn.Parameter(torch.zeros(2, 2))
    live = LiveWeights.from_model(model, tensors(2, 2))
    live.copy(WeightUpdate(tensors(2, 2)))
    assert model.weight.tolist() == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize(
    ("loading", "reason"),
    [
        (lambda parameter, tensor: parameter.data.copy_(tensor * 2), "calls aten.copy_"),
        (lambda parameter, tensor: parameter.data.add_(tensor), "calls aten.add_"),
        (lambda parameter, tensor: parameter.data.fill_(tensor[0, 0].item()), "at weight: "),
        (lambda parameter, tensor: parameter.data[:, :1].copy_(tensor[:, :1]), "consecutive elements"),
        (lambda parameter, tensor: parameter.data[:2].copy_(tensor[:2]), "reads a part of weight"),
        (lambda parameter, tensor: [parameter.data.copy_(tensor) for _ in range(2)], "reads a part of weight"),
        (lambda parameter, tensor: [parameter.data.copy_(tensor), parameter.data[0].zero_()], "exactly once"),
        (lambda parameter, tensor: None, "does not write every element of weight"),
        (lambda parameter, tensor: torch.zeros(2).copy_(tensor[0]), "other memory"),
    ],
)
def test_other_loading_code_has_no_map(loading: Loading, reason: str) -> None:
    pytest.importorskip("vllm")
    model = OneMatrix(loading)
    with pytest.raises(UnmappableModelError, match=reason):
        LiveWeights.from_model(model, tensors(4, 2))
    assert not model.weight.any()
