"""Names this process's trained parameters and optimizer states, for writing and reading checkpoints.

    model.NAME                  a trained parameter, or a persistent buffer
    optimizer.NAME.exp_avg ...  the optimizer's state of the parameter NAME

The functions return the live tensors, not copies: a checkpoint is written from these tensors and read into them. The
names do not depend on the number of ranks, so any number of ranks can load their shards (DTensors). Step counts are
single numbers and are saved apart from the tensors, because each tensor in a file has a large header.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from config.schema.errors import ConfigError
from torchgrpo.training.master_weights import MasterWeights
from torchgrpo.training.optimizer import JointOptimizer
from torchgrpo.training.parameter_groups import ResumableOptimizer
from torchgrpo.training.trained_parameters import MODEL_PREFIX, trained_tensors

OPTIMIZER_PREFIX, STEP_KEY = "optimizer.", "step"
ParameterState = dict[str, Tensor]
"""An optimizer's state of one parameter, by key."""


def learner_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns this process's tensors or shards of model and optimizer.

    States that the optimizer creates in its first step are created here if necessary: zeros, as in that step.
    """
    tensors = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in trained_tensors(model).items()}
    return tensors | optimizer_tensors(model, optimizer)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the state tensors of the optimizer alone."""
    tensors: dict[str, Tensor] = {}
    for name, state in _named_states(model, optimizer).items():
        tensors |= {f"{OPTIMIZER_PREFIX}{name}.{key}": tensor for key, tensor in state.items() if key != STEP_KEY}
    return tensors


def step_counts(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Returns the number of steps of each parameter, by name, where the optimizer counts them."""
    counts = {name: state[STEP_KEY] for name, state in _named_states(model, optimizer).items() if STEP_KEY in state}
    return {name: int(count) for name, count in counts.items()}


def load_step_counts(model: nn.Module, optimizer: Optimizer, counts: Mapping[str, int]) -> None:
    """Restores the counts that `step_counts` returned."""
    states = _named_states(model, optimizer)
    for name, count in counts.items():
        states[name][STEP_KEY].fill_(count)


def check_same_tensors(expected_tensors: Mapping[str, Tensor], saved_shapes: Mapping[str, list[int]]) -> None:
    """Refuses a checkpoint whose tensors differ from the expected ones.

    saved_shapes: full shapes in the checkpoint, by name.

    Raises:
        ConfigError: the shape of a tensor differs, or a tensor is missing on one side.
    """
    shapes = {name: list(tensor.shape) for name, tensor in expected_tensors.items()}
    for name in {**saved_shapes, **shapes}:
        if saved_shapes.get(name) != shapes.get(name):
            raise ConfigError(
                f"the checkpoint is of another kind of learner: the shape of {name} is "
                f"{saved_shapes.get(name)} in the checkpoint and {shapes.get(name)} here; set the optimizer "
                "and the model.dtype of its run"
            )


def _named_states(model: nn.Module, optimizer: Optimizer) -> dict[str, ParameterState]:
    """Returns the states of all parameters, by name."""
    states = _optimizer_states(optimizer, {})
    return {name: states[one] for name, one in model.named_parameters() if one in states}


def _optimizer_states(optimizer: Optimizer, weights: Mapping[Tensor, Tensor]) -> Mapping[Tensor, ParameterState]:
    """Returns the states by parameter.

    weights: for a parameter that is empty between steps, a tensor of its full shape and placement.
    """
    if isinstance(optimizer, MasterWeights):
        inner = _optimizer_states(optimizer.inner, {shadow: weight for weight, shadow in optimizer.shadows.items()})
        parameter_of = {optimizer.shadows.get(one, one): one for one in optimizer.parameters}
        states = {parameter_of[parameter]: dict(state) for parameter, state in inner.items()}
        for parameter, remainder in optimizer.remainders.items():
            states.setdefault(parameter, {})["remainder"] = remainder
        return states
    if isinstance(optimizer, JointOptimizer):
        return {key: state for member in optimizer.members for key, state in _optimizer_states(member, weights).items()}
    if not isinstance(optimizer, ResumableOptimizer):
        return optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                like = torch.zeros_like(weights.get(parameter, parameter), dtype=parameter.dtype)
                optimizer.state[parameter].update(optimizer.initial_state(like.detach(), group))
    return optimizer.state
