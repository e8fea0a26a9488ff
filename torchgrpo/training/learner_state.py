"""All tensors of a learner under plain names, as a checkpoint holds them: live, to be written from and read into.

    model.NAME                  a trained parameter, or a buffer that is saved
    optimizer.NAME.exp_avg ...  what the optimizer remembers of the parameter NAME

Names are the parameters', so that any number of ranks, each with its shards (DTensors), finds its part. Counts of
steps are single numbers and kept apart: as a tensor in a file each would take a thousand bytes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from config.schema.errors import ConfigError
from torchgrpo.training.master_weights import MasterWeights
from torchgrpo.training.optimizer import JointOptimizer
from torchgrpo.training.parameter_groups import Resumable
from torchgrpo.training.trained_parameters import MODEL, trained_tensors

OPTIMIZER, STEP = "optimizer.", "step"
States = dict[str, Tensor]
"""What an optimizer remembers of one parameter."""


def learner_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parts of them that this process has.

    States that the optimizer makes in its first step are made here if they are not there yet: zeros, as it would.
    """
    tensors = {f"{MODEL}{name}": tensor for name, tensor in trained_tensors(model).items()}
    return tensors | optimizer_tensors(model, optimizer)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Those of the optimizer alone."""
    tensors: dict[str, Tensor] = {}
    for name, state in _named_states(model, optimizer).items():
        tensors |= {f"{OPTIMIZER}{name}.{key}": tensor for key, tensor in state.items() if key != STEP}
    return tensors


def step_counts(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """The steps that each parameter has taken, by its name, where the optimizer counts them."""
    found = {name: state[STEP] for name, state in _named_states(model, optimizer).items() if STEP in state}
    return {name: int(count) for name, count in found.items()}


def load_step_counts(model: nn.Module, optimizer: Optimizer, counts: Mapping[str, int]) -> None:
    """Take up what `step_counts` gave."""
    states = _named_states(model, optimizer)
    for name, count in counts.items():
        states[name][STEP].fill_(count)


def check_same_tensors(here: Mapping[str, Tensor], there: Mapping[str, list[int]]) -> None:
    """Refuse (ConfigError) a checkpoint of other tensors than `here`. there: whole shapes, by name."""
    shapes = {name: list(tensor.shape) for name, tensor in here.items()}
    for name in {**there, **shapes}:
        if there.get(name) != shapes.get(name):
            raise ConfigError(
                f"another kind of learner wrote it: the shape of {name} is {there.get(name)} in the checkpoint and "
                f"{shapes.get(name)} here; give the optimizer and the model.dtype that its run had"
            )


def _named_states(model: nn.Module, optimizer: Optimizer) -> dict[str, States]:
    states = _states(optimizer, {})
    return {name: states[one] for name, one in model.named_parameters() if one in states}


def _states(optimizer: Optimizer, whole: Mapping[Tensor, Tensor]) -> Mapping[Tensor, States]:
    """By parameter. whole: for those that are empty now, a tensor of their shape and placement."""
    if isinstance(optimizer, MasterWeights):
        inner = _states(optimizer.inner, {shadow: weight for weight, shadow in optimizer.shadows.items()})
        seen = {optimizer.shadows.get(one, one): one for one in optimizer.parameters}
        states = {seen[parameter]: dict(kept) for parameter, kept in inner.items()}
        for parameter, remainder in optimizer.remainders.items():
            states.setdefault(parameter, {})["remainder"] = remainder
        return states
    if isinstance(optimizer, JointOptimizer):
        return {key: kept for member in optimizer.members for key, kept in _states(member, whole).items()}
    if not isinstance(optimizer, Resumable):
        return optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                like = torch.zeros_like(whole.get(parameter, parameter), dtype=parameter.dtype)
                optimizer.state[parameter].update(optimizer.first_state(like.detach(), group))
    return optimizer.state
