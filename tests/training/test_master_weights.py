"""bfloat16 parameters with master weights move bit for bit as float32 parameters."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema.optimizer import OptimizerConfig
from torchgrpo.plan.known_models import KNOWN_MODELS
from torchgrpo.training.checkpoint_tensors import read_tensors, write_tensors
from torchgrpo.training.learner_state import learner_tensors, load_step_counts, optimizer_tensors, step_counts
from torchgrpo.training.master_weights import BUCKET_ELEMENTS, MasterWeights, bucket_views, is_half, join, split
from torchgrpo.training.optimizer import make_optimizer

NAMES = ("adamw", "muon_adamw")


def network(dtype: torch.dtype) -> nn.Sequential:
    """Builds a network in `dtype` with weights that bfloat16 represents."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))
    return layers.to(torch.bfloat16).to(dtype)


def make_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Makes steps with random gradients that bfloat16 represents, equal for every model."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) + 0.3
            parameter.grad = gradient.to(torch.bfloat16).to(parameter.grad_dtype)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 + step % 3)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model: nn.Module, name: str = "adamw", lr: float = 1e-6) -> torch.optim.Optimizer:
    config = OptimizerConfig(name=name, lr=lr, muon_lr=2 * lr, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the float32 master weights of the half-precision parameters."""
    assert isinstance(optimizer, MasterWeights)
    rest = optimizer.remainders
    halves = [parameter.data for parameter in model.parameters() if is_half(parameter)]
    remainders = [rest[parameter] for parameter in model.parameters() if is_half(parameter)]
    return bucket_views(join(halves, remainders), halves)


def test_weight_and_remainder_are_the_float32_number() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    halves = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0], dtype=torch.int32)
    numbers = torch.cat([bits, halves, halves - 2**31]).view(torch.float32)
    numbers = numbers[numbers.abs() < torch.finfo(torch.bfloat16).max]
    weight, remainder = numbers.to(torch.bfloat16), torch.empty_like(numbers, dtype=torch.int16)
    nearest = weight.clone()
    split(numbers.clone(), [weight], [remainder])
    (joined,) = bucket_views(join([weight], [remainder]), [weight])
    assert torch.equal(joined.view(torch.int32), numbers.view(torch.int32))
    distance = [(rounded.double() - numbers.double()).abs() for rounded in (weight, nearest)]
    assert torch.equal(*distance)


def test_nan_and_infinity_stay() -> None:
    """NaN stays NaN, although arithmetic on its bits could make it zero.

    A GPU makes 0x7fffffff of 0/0.
    """
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000], dtype=torch.int32)
    weight, remainder = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    split(bits.view(torch.float32), [weight], [remainder])
    assert weight.isnan().tolist() == [True, True, False]
    assert weight.isinf().tolist() == [False, False, True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket_elements", [1, 60, 1 << 20])
def test_half_parameters_move_as_float32_bit_for_bit(name: str, bucket_elements: int) -> None:
    wide, half = network(torch.float32), network(torch.bfloat16)
    wide_optimizer, half_optimizer = optimizer_of(wide, name), optimizer_of(half, name)
    assert isinstance(half_optimizer, MasterWeights)
    half_optimizer.bucket_elements = bucket_elements
    make_steps(wide, wide_optimizer, range(40))
    make_steps(half, half_optimizer, range(40))
    for master, expected, weight in zip(
        masters(half, half_optimizer), wide.parameters(), half.parameters(), strict=True
    ):
        assert torch.equal(master, expected)
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight.float(), expected.data, rtol=2**-8, atol=0)


def test_small_updates_add_up() -> None:
    """Without master weights, AdamW moves bfloat16 weights only a few percent of the float32 way."""
    half, plain = network(torch.bfloat16), network(torch.bfloat16)
    start = copy.deepcopy(half)
    optimizer = optimizer_of(half)
    alone = torch.optim.AdamW(plain.parameters(), lr=1e-6, weight_decay=0.1)
    alone.param_groups[0]["initial_lr"] = 1e-6
    make_steps(half, optimizer, range(100))
    make_steps(plain, alone, range(100))
    before = torch.cat([parameter.float().flatten() for parameter in start.parameters()])
    moved = (torch.cat([master.flatten() for master in masters(half, optimizer)]) - before).abs().mean()
    rounded = torch.cat([parameter.float().flatten() for parameter in plain.parameters()])
    assert (rounded - before).abs().mean() < 0.3 * moved


@pytest.mark.parametrize("name", NAMES)
def test_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    first = network(torch.bfloat16)
    optimizer = optimizer_of(first, name)
    make_steps(first, optimizer, range(5))
    write_tensors(tmp_path, learner_tensors(first, optimizer))
    second = network(torch.bfloat16)
    resumed = optimizer_of(second, name)
    read_tensors(tmp_path, learner_tensors(second, resumed))
    load_step_counts(second, resumed, step_counts(first, optimizer))
    for model, own_optimizer in ((first, optimizer), (second, resumed)):
        make_steps(model, own_optimizer, range(5, 9))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert all(map(torch.equal, masters(first, optimizer), masters(second, resumed)))


def test_an_optimizer_without_states_keeps_its_remainders() -> None:
    model = network(torch.bfloat16)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(optimizer_tensors(model, optimizer)) == {
        f"optimizer.{name}.remainder" for name, _ in model.named_parameters()
    }


def test_states_are_float32_and_masters_take_no_memory_between_steps() -> None:
    model = network(torch.bfloat16)
    optimizer = optimizer_of(model)
    assert isinstance(optimizer, MasterWeights)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    make_steps(model, optimizer, range(2))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    for group in optimizer.inner.param_groups:
        for shadow in group["params"]:
            assert shadow.numel() == 0
            state = optimizer.inner.state[shadow]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_float32_parameters_pass_through() -> None:
    mixed, wide = network(torch.bfloat16), network(torch.float32)
    mixed[2].float()
    optimizers = [optimizer_of(model) for model in (mixed, wide)]
    for model, optimizer in zip((mixed, wide), optimizers, strict=True):
        make_steps(model, optimizer, range(10))
    assert not is_half(mixed[2].weight)
    assert torch.equal(mixed[2].weight, wide[2].weight)
    assert torch.equal(masters(mixed, optimizers[0])[0], wide[0].weight)


def test_float32_parameters_alone_need_no_master_weights() -> None:
    assert not isinstance(optimizer_of(network(torch.float32)), MasterWeights)


def test_gradients_of_many_microbatches_are_summed_in_float32() -> None:
    model = nn.Linear(48, 32, bias=False).to(torch.bfloat16)
    optimizer_of(model)
    expected = torch.zeros(model.weight.shape)
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        inputs, slopes = (torch.randn(5, size, generator=generator).to(torch.bfloat16) for size in (48, 32))
        out = model(inputs)
        expected += torch.autograd.grad(out, model.weight, slopes, retain_graph=True)[0].float()
        out.backward(slopes)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected)


class OperationCounter(TorchDispatchMode):
    """Counts dispatched operations that compute or copy; an operation on lists counts once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_record_function", "device")):
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


def test_an_optimizer_step_of_a_model_of_real_size_has_few_operations() -> None:
    """Counts the second step of Qwen2.5-1.5B on fake tensors; the first also creates the states."""
    shape = KNOWN_MODELS["Qwen/Qwen2.5-1.5B-Instruct"]
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16)
        optimizer = optimizer_of(model)
        assert isinstance(optimizer, MasterWeights)
        optimizer.bucket_elements = BUCKET_ELEMENTS
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
            with OperationCounter() as counter:
                optimizer.step()
    assert len(list(model.parameters())) == 338
    assert 0 < counter.operations.total() <= 40, counter.operations
