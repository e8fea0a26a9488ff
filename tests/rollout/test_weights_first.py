import copy

import pytest
import torch
from torch import nn

from rollout.engines.weights_first import WeightsFirst, put_weights_first


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_as_near_to_the_exact_one_as_the_plain_layers(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias, dtype=dtype)
    ours = copy.deepcopy(plain)
    put_weights_first(ours)
    assert type(ours) is WeightsFirst and ours.weight.data_ptr() != plain.weight.data_ptr()
    rows = torch.randn(5, 3, 96, dtype=dtype)
    exact = copy.deepcopy(plain).double()(rows.double())
    with torch.no_grad():
        mine, theirs = ours(rows), plain(rows)
    assert mine.shape == theirs.shape and mine.is_contiguous() and mine.dtype == dtype
    error, usual = ((each.double() - exact).abs().max() for each in (mine, theirs))
    assert error <= usual + torch.finfo(dtype).eps * exact.abs().max()
    torch.testing.assert_close(
        mine.double(), exact, atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps
    )


def test_only_plain_layers_in_half_precision_change_and_no_name_does() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "halved": nn.Linear(4, 4, dtype=torch.bfloat16),
            "single": nn.Linear(4, 4),
            "special": Special(4, 4, dtype=torch.bfloat16),
        }
    )
    names = list(model.state_dict())
    put_weights_first(model)
    assert [type(one) for one in model.values()] == [WeightsFirst, nn.Linear, Special]
    assert list(model.state_dict()) == names
