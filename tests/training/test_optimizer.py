"""Tests of optimizers and schedules: parameter groups, rates, exact resume."""

import copy
import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from config.schema.errors import ConfigError
from config.schema.optimizer import OptimizerConfig
from torchgrpo.training.checkpoint_tensors import read_tensors, write_tensors
from torchgrpo.training.learner_state import learner_tensors, load_step_counts, step_counts
from torchgrpo.training.optimizer import JointOptimizer, make_optimizer, make_scheduler, set_schedule_step

PRESETS = Path(__file__).resolve().parents[2] / "config" / "optimizer"
NAMES = ("adamw", "muon_adamw")


def model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


def train(network: LlamaForCausalLM, optimizer: torch.optim.Optimizer, scheduler: object, steps: int) -> None:
    for step in range(steps):
        ids = torch.arange(12).reshape(2, 6) + step % 5
        network(ids, labels=ids).loss.backward()
        optimizer.step()
        scheduler.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()


def test_the_yaml_files_are_the_names() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == set(NAMES)
    for name in NAMES:
        loaded = OmegaConf.merge(OptimizerConfig, OmegaConf.load(PRESETS / f"{name}.yaml"))
        assert OmegaConf.to_object(loaded).name == name  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
def test_muon_updates_only_hidden_matrices(tied: bool) -> None:
    network = model(tied)
    optimizer = make_optimizer(network, OptimizerConfig(name="muon_adamw", lr=1e-3, muon_lr=2e-3))
    assert isinstance(optimizer, JointOptimizer)
    by_id = {id(parameter): name for name, parameter in network.named_parameters()}
    parameter_names = [
        {by_id[id(parameter)] for group in member.param_groups for parameter in group["params"]}
        for member in optimizer.members
    ]
    assert parameter_names[0].isdisjoint(parameter_names[1])
    assert parameter_names[0] | parameter_names[1] == set(by_id.values())
    assert all(name.endswith("proj.weight") for name in parameter_names[1])
    assert len(parameter_names[1]) == 2 * 7
    assert {group["lr"] for group in optimizer.members[1].param_groups} == {2e-3}


def test_learning_rate_and_decay_by_parameter() -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, group_lr={"*embed_tokens*": 1e-4, "model.*": 5e-4})
    network = model()
    optimizer = make_optimizer(network, config)
    settings = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert settings[id(network.model.embed_tokens.weight)] == (1e-4, 0.1)
    assert settings[id(network.model.norm.weight)] == (5e-4, 0.0)
    assert settings[id(network.lm_head.weight)] == (1e-3, 0.1)
    assert optimizer.param_groups[0]["fused"]


def test_frozen_parameters_are_left_alone() -> None:
    network = model()
    network.model.requires_grad_(False)
    optimizer = make_optimizer(network, OptimizerConfig(name="muon_adamw"))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        make_optimizer(network.requires_grad_(False), OptimizerConfig())


@pytest.mark.parametrize("name", NAMES)
def test_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = OptimizerConfig(name=name, lr=1e-2, muon_lr=1e-2, schedule="cosine", warmup_steps=3)
    network = model()
    optimizer = make_optimizer(network, config)
    scheduler = make_scheduler(optimizer, config, 10)
    train(network, optimizer, scheduler, 4)

    write_tensors(tmp_path, learner_tensors(network, optimizer))
    resumed = copy.deepcopy(model())
    resumed_optimizer = make_optimizer(resumed, config)
    resumed_scheduler = make_scheduler(resumed_optimizer, config, 10)
    read_tensors(tmp_path, learner_tensors(resumed, resumed_optimizer))
    load_step_counts(resumed, resumed_optimizer, step_counts(network, optimizer))
    set_schedule_step(resumed_scheduler, scheduler.last_epoch)

    train(network, optimizer, scheduler, 4)
    train(resumed, resumed_optimizer, resumed_scheduler, 4)
    for (key, ours), theirs in zip(network.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in resumed_optimizer.param_groups]
    assert rates[0] < 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_reduce_a_loss(name: str) -> None:
    network = model()
    optimizer = make_optimizer(network, OptimizerConfig(name=name, lr=1e-2, muon_lr=1e-2))
    ids = torch.arange(12).reshape(2, 6)
    before = network(ids, labels=ids).loss.item()
    train(network, optimizer, make_scheduler(optimizer, OptimizerConfig(), 20), 20)
    assert network(ids, labels=ids).loss.item() < 0.5 * before


def rates(total: int = 10, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    optimizer = make_optimizer(torch.nn.Linear(2, 2), config)
    scheduler = make_scheduler(optimizer, config, total)
    learning_rates = []
    for _ in range(total):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return learning_rates


def test_schedules() -> None:
    assert rates() == [1.0] * 10
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates(warmup_fraction=0.2) == pytest.approx([0.5] + [1.0] * 9)
    assert rates(schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])
    floored = rates(schedule="linear", min_lr_fraction=0.5, warmup_steps=2)
    assert floored == pytest.approx([0.5, 1.0] + [1 - 0.5 * step / 8 for step in range(8)])
    cosine = rates(schedule="cosine", min_lr_fraction=0.1)
    assert cosine == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * step / 10)) for step in range(10)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd"}, "optimizer.name='sgd': choose one of adamw, muon_adamw"),
        ({"lr": -1.0}, "optimizer.lr=-1.0"),
        ({"min_lr_fraction": 2.0}, r"optimizer.min_lr_fraction=2.0: must lie in \[0, 1\]"),
        ({"betas": (0.9, 1.0)}, "optimizer.betas"),
        ({"clip_grad_norm": 0.0}, "optimizer.clip_grad_norm=0.0: must be above 0, or null"),
        ({"group_lr": {"*": -1.0}}, "optimizer.group_lr"),
    ],
)
def test_bad_values(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'\*embedding\*'.*matches no parameter; .*model.embed_tokens.weight"):
        make_optimizer(model(), OptimizerConfig(group_lr={"*embedding*": 1.0}))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_scaler_skips_an_infinite_gradient(name: str) -> None:
    network = model()
    optimizer = make_optimizer(network, OptimizerConfig(name=name, lr=1e-2))
    before = copy.deepcopy(network.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(network(torch.zeros(1, 2).long(), labels=torch.zeros(1, 2).long()).loss).backward()
    network.lm_head.weight.grad[0, 0] = torch.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])
