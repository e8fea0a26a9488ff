"""Linear layers for few rows in half precision on a CPU: the weights are the first factor.

There `weights @ rowsᵀ` reads the weights at the speed of memory, while the usual `rows @ weightsᵀ` brings them into
another order at each call, which takes as long again.
"""

import torch
from torch import Tensor, nn


class WeightsFirst(nn.Linear):
    """The same layer, names and numbers."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = (self.weight @ input.reshape(-1, self.in_features).t()).t().contiguous()
        out = rows.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def put_weights_first(model: nn.Module) -> None:
    """Every plain linear layer of `model` that is in half precision on a CPU; others stay."""
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.device.type != "cpu":
            continue
        if module.weight.dtype in (torch.bfloat16, torch.float16):
            module.__class__ = WeightsFirst
