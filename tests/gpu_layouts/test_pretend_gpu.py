"""The pretence itself: it raises where CUDA raises, and only there; gradients and optimizers are the CPU's own."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.pretend_gpu import PretendedGPUs, pretend_gpus

MIXED = "at least two devices"
INDICES = "indices should be either on cpu or on the same device"


@pytest.fixture
def gpus() -> Iterator[PretendedGPUs]:
    with pretend_gpus(2) as machine:
        yield machine


def floats(device: str, *shape: int) -> Tensor:
    return torch.arange(24, device=device).float().reshape(shape or (4, 6))


def mask(device: str) -> Tensor:
    return torch.ones(4, 6, dtype=torch.bool, device=device)


def rows(device: str) -> Tensor:
    return torch.tensor([0, 2], device=device)


def one(device: str) -> Tensor:
    return torch.tensor(1.0, device=device)


REFUSED: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "add": (MIXED, lambda a, b: floats(a) + floats(b)),
    "add in place": (MIXED, lambda a, b: floats(a).add_(floats(b))),
    "matmul": (MIXED, lambda a, b: floats(a) @ floats(b).T),
    "linear": (MIXED, lambda a, b: nn.Linear(6, 2, device=a)(floats(b))),
    "embedding": (MIXED, lambda a, b: nn.Embedding(4, 6, device=a)(rows(b))),
    "cat": (MIXED, lambda a, b: torch.cat([floats(a), floats(b)])),
    "stack of scalars": (MIXED, lambda a, b: torch.stack([one(a), one(b)])),
    "where, condition": (MIXED, lambda a, b: torch.where(mask(a), floats(b), 0.0)),
    "where, value": (MIXED, lambda a, b: torch.where(mask(a), floats(a), floats(b))),
    "gather": (MIXED, lambda a, b: floats(a).gather(1, torch.zeros(4, 1, dtype=torch.long, device=b))),
    "scatter": (MIXED, lambda a, b: floats(a).scatter(1, torch.zeros(4, 1, dtype=torch.long, device=b), 1.0)),
    "index_select": (MIXED, lambda a, b: floats(a).index_select(0, rows(b))),
    "index_add_": (MIXED, lambda a, b: floats(a).index_add_(0, rows(a), floats(b)[:2])),
    "index_put_ of values": (MIXED, lambda a, b: floats(a).index_put_((rows(a),), floats(b)[:2])),
    "set rows": (MIXED, lambda a, b: floats(a).__setitem__(rows(a), floats(b)[:2])),
    "masked_select": (MIXED, lambda a, b: floats(a).masked_select(mask(b))),
    "masked_fill": (MIXED, lambda a, b: floats(a).masked_fill(mask(b), 0.0)),
    "masked_scatter": (MIXED, lambda a, b: floats(a).masked_scatter(mask(b), floats(b))),
    "out=": (MIXED, lambda a, b: torch.exp(floats(a), out=floats(b))),
    "mm out=": (MIXED, lambda a, b: torch.mm(floats(a), floats(a).T, out=torch.empty(4, 4, device=b))),
    "equal": (MIXED, lambda a, b: torch.equal(floats(a), floats(b))),
    "attention": (
        MIXED,
        lambda a, b: functional.scaled_dot_product_attention(
            floats(a, 1, 4, 6), floats(a, 1, 4, 6), floats(b, 1, 4, 6)
        ),
    ),
    "two scalars, in place": (MIXED, lambda a, b: one(a).add_(one(b))),
    "comparison": (MIXED, lambda a, b: mask(a) & (floats(b) == 1)),
}
"""Refused wherever a and b differ, one of them may be the CPU."""


@pytest.mark.parametrize("where", [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("cuda:1", "cpu")], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_operands_on_two_devices_are_refused(name: str, where: tuple[str, str], gpus: PretendedGPUs) -> None:
    message, action = REFUSED[name]
    if name == "two scalars, in place" and where == ("cuda:1", "cpu"):
        action(*where)  # a CPU scalar that is only read
        return
    with pytest.raises(RuntimeError, match=message):
        action(*where)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
def test_the_same_on_one_device_is_not(name: str, where: str, gpus: PretendedGPUs) -> None:
    REFUSED[name][1](where, where)


ALSO_REFUSED: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "mask of another GPU": (RuntimeError, INDICES, lambda: floats("cuda:0")[mask("cuda:1")]),
    "rows of another GPU": (RuntimeError, INDICES, lambda: floats("cuda:0")[rows("cuda:1")]),
    "a CPU tensor by a GPU's mask": (RuntimeError, INDICES, lambda: floats("cpu")[mask("cuda:0")]),
    "set by another GPU's mask": (
        RuntimeError,
        INDICES,
        lambda: floats("cuda:0").__setitem__(mask("cuda:1"), 0.0),
    ),
    "a scalar of another GPU": (RuntimeError, MIXED, lambda: floats("cuda:0") * one("cuda:1")),
    "a CPU tensor times a GPU's scalar": (RuntimeError, MIXED, lambda: floats("cpu") * one("cuda:0")),
    "clamp by a CPU scalar": (RuntimeError, MIXED, lambda: floats("cuda:0").clamp(min=one("cpu"))),
    "numpy": (TypeError, "can't convert cuda:0", lambda: floats("cuda:0").numpy()),
    "a CPU generator": (
        RuntimeError,
        "generator",
        lambda: torch.randn(3, device="cuda:0", generator=torch.Generator()),
    ),
    "pinning GPU memory": (RuntimeError, "only dense CPU tensors", lambda: floats("cuda:0").pin_memory()),
    "a GPU that is not there": (RuntimeError, "invalid device ordinal", lambda: floats("cuda:2")),
    "a move to a GPU that is not there": (
        RuntimeError,
        "invalid device ordinal",
        lambda: floats("cpu").to("cuda:7"),
    ),
    "a gradient from elsewhere": (
        RuntimeError,
        "assigned grad",
        lambda: setattr(nn.Parameter(one("cuda:0")), "grad", one("cuda:1")),
    ),
}


@pytest.mark.parametrize("name", ALSO_REFUSED)
def test_refused_as_well(name: str, gpus: PretendedGPUs) -> None:
    error, message, action = ALSO_REFUSED[name]
    with pytest.raises(error, match=message):
        action()


ALLOWED: dict[str, Callable[[], Tensor]] = {
    "a number": lambda: floats("cuda:1") * 2 + 1,
    "a CPU scalar": lambda: floats("cuda:1") * one("cpu"),
    "a CPU scalar, first": lambda: one("cpu") - floats("cuda:1"),
    "two scalars": lambda: one("cpu") + one("cuda:1"),
    "a CPU scalar in place": lambda: floats("cuda:1").div_(one("cpu")),
    "where with a CPU scalar": lambda: torch.where(mask("cuda:1"), floats("cuda:1"), one("cpu")),
    "masked_fill with a CPU scalar": lambda: floats("cuda:1").masked_fill(mask("cuda:1"), one("cpu")),
    "CPU rows": lambda: floats("cuda:1")[rows("cpu")],
    "a CPU mask": lambda: floats("cuda:1")[mask("cpu")],
    "a list of rows": lambda: floats("cuda:1")[[0, 2]],
    "values from a CPU scalar": lambda: floats("cuda:1").index_put_((rows("cuda:1"),), one("cpu")),
    "copy_ from another GPU": lambda: floats("cuda:1").copy_(floats("cuda:0")),
    "copy_ from the CPU": lambda: floats("cuda:1").copy_(floats("cpu")),
    "a slice from the CPU": lambda: _set_slice(floats("cuda:1"), floats("cpu")),
    "factories like it": lambda: torch.zeros_like(floats("cuda:1")) + floats("cuda:1").new_ones(4, 6),
    "a factory made in C++": lambda: functional.one_hot(rows("cuda:1"), 4) * rows("cuda:1")[:, None],
    "full": lambda: torch.full((3,), 2.0, device="cuda:1") + torch.arange(3, device=torch.device("cuda", 1)),
    "to like another": lambda: floats("cpu").to(floats("cuda:1")),
    "to and dtype": lambda: floats("cuda:0").to("cuda:1", torch.float64).half(),
    "cuda of an index": lambda: floats("cpu").cuda(1),
    "a default device": lambda: _under("cuda:1"),
    "as_tensor": lambda: torch.as_tensor(floats("cpu"), device="cuda:1"),
    "pinned first": lambda: floats("cpu").pin_memory().to("cuda:1", non_blocking=True),
}
"""Each gives a tensor on cuda:1."""


def _set_slice(own: Tensor, other: Tensor) -> Tensor:
    own[1:3] = other[:2]
    return own


def _under(device: str) -> Tensor:
    with torch.device(device):
        return torch.zeros(3)


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_and_the_result_lies_on_the_gpu(name: str, gpus: PretendedGPUs) -> None:
    result = ALLOWED[name]()
    assert result.device == torch.device("cuda", 1)
    assert result.is_cuda
    assert result.get_device() == 1
    assert result.cpu().device == torch.device("cpu")


def test_views_and_moves_keep_their_values_apart(gpus: PretendedGPUs) -> None:
    here = floats("cuda:0")
    there = here.to("cuda:1")
    here[0].zero_()
    assert here.T.device == here[0].device == torch.device("cuda", 0)
    assert there[0].sum() == 15
    assert here.to("cuda:0") is here
    assert here.cpu().numpy().sum() == here.sum().item()


def test_gradients_cross_devices_and_are_the_cpus(gpus: PretendedGPUs) -> None:
    """Two layers on two GPUs, checkpointed: every gradient lies beside its parameter, and equals the CPU's."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    torch.manual_seed(0)
    spread = nn.Sequential(nn.Linear(6, 5).to("cuda:0"), nn.Tanh(), nn.Linear(5, 3).to("cuda:1"))
    plain(floats("cpu") / 24).square().sum().backward()
    hidden = checkpoint(spread[:2], (floats("cpu") / 24).to("cuda:0"), use_reentrant=False)
    assert isinstance(hidden, Tensor)
    spread[2](hidden.to("cuda:1")).square().sum().backward()
    for ours, theirs in zip(plain.parameters(), spread.parameters(), strict=True):
        assert theirs.grad is not None
        assert theirs.grad.device == theirs.device
        assert torch.equal(theirs.grad.cpu(), ours.grad)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_and_optimizers_go_device_by_device(fused: bool, gpus: PretendedGPUs) -> None:
    layers = [nn.Linear(3, 3).to(device) for device in ("cuda:0", "cuda:1")]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
    layers[1](layers[0](torch.ones(2, 3, device="cuda:0")).to("cuda:1")).sum().backward()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert norm.device == torch.device("cuda", 0)
    before = [parameter.clone() for parameter in parameters]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert optimizer.state[parameters[2]]["exp_avg"].device == torch.device("cuda", 1)


def test_a_scaler_of_fp16(gpus: PretendedGPUs) -> None:
    layer, scaler = nn.Linear(3, 3).to("cuda:1"), torch.amp.GradScaler(init_scale=4.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(2, 3, device="cuda:1")).sum()).backward()
    scaler.unscale_(optimizer)
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [2.0, 2.0, 2.0]
    scaler.step(optimizer)
    scaler.update()


def test_autocast_is_the_cpus(gpus: PretendedGPUs) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        product = floats("cuda:1") @ floats("cuda:1").T
    assert product.dtype == torch.bfloat16
    assert product.device == torch.device("cuda", 1)


def test_a_product_that_only_cuda_has(gpus: PretendedGPUs) -> None:
    half, out = floats("cuda:1").bfloat16(), torch.empty(4, 4, device="cuda:1")
    torch.mm(half, half.T, out_dtype=torch.float32, out=out)
    assert torch.equal(out, floats("cuda:1") @ floats("cuda:1").T)
    with pytest.raises(RuntimeError, match=MIXED):
        torch.mm(half, half.T.to("cuda:0"), out_dtype=torch.float32)
    with pytest.raises(NotImplementedError):
        torch.mm(half.cpu(), half.cpu().T, out_dtype=torch.float32)


def test_a_tensordict_moves(gpus: PretendedGPUs) -> None:
    moved = TensorDict({"a": floats("cpu"), "b": {"c": mask("cpu")}}, [4]).to("cuda:1")
    assert moved.device == moved["a"].device == moved["b", "c"].device == torch.device("cuda", 1)


def test_a_thread_is_under_the_same_rules_with_a_current_device_of_its_own(gpus: PretendedGPUs) -> None:
    torch.cuda.set_device(1)
    seen: list[object] = []

    def work() -> None:
        seen.append(torch.zeros(1, device="cuda").device.index)
        try:
            floats("cuda:0") + floats("cuda:1")
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.zeros(1, device="cuda").device.index == 1
    assert seen[0] == 0
    assert MIXED in str(seen[1])


def test_nothing_stays_behind() -> None:
    with pretend_gpus(3) as gpus:
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 3)
        torch.cuda.synchronize(2)
        kept = floats("cuda:1")
    assert gpus.synchronized == [torch.device("cuda", 2)]
    assert kept.device == torch.device("cpu")
    assert not torch.cuda.is_available()
    assert (kept + floats("cpu")).sum() == 552
