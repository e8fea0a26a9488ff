"""Two gloo ranks in Ray actors compute the same as one process.

Compared are losses, gradients, parameters, pushes, checkpoints and failures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.inference import InferenceModelConfig
from config.schema.models import LoraConfig, ModelConfig, TrainModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import AGGREGATIONS, PRESETS, PolicyConfig, load_policy
from config.schema.train import TrainConfig
from envs.group import Group, Verdict
from tests.groups import credit_groups
from tests.tiny_models import tiny_llama
from torchgrpo.cluster.runtime import DeviceSlot
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_weight_copy import WeightLayout
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training import tensor_stream
from torchgrpo.training.learner import Learner, make_learner
from torchgrpo.training.process_setup import prepare_process
from torchgrpo.training.rank_actor import RankActor
from torchgrpo.training.rank_workers import RankWorkers
from torchgrpo.training.ranks import Ranks, RankSettings

REPEATS, GROUPS, STEPS, MAX_TOKENS = 4, 5, 5, 12
TWO = RankSettings(nodes=1, ray_cpus=2, on_gpu=False, timeout_s=600.0)
SMALL_LR = OptimizerConfig(lr=1e-4)


def small_llama() -> LlamaForCausalLM:
    """Builds a tiny model with weights of a usual size.

    The weights of `tiny_llama` are so large that rounding shows.
    """
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.2)
    return model


def two_ranks() -> Ranks:
    ranks = Ranks([DeviceSlot("learner rank 0"), DeviceSlot("learner rank 1")], TWO, RankActor)
    ranks.start()
    return ranks


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    ranks = two_ranks()
    yield ranks
    ranks.close()


def length_verdict(group_id: int, place: int, text: str) -> Verdict:
    """Scores a text by its length, with errors in the first two groups.

    A rank that gets these groups alone has nothing in the loss.
    """
    return Verdict(float(len(text)), {}, "error" if group_id < 2 else "scored")


def config_of(model: str, ranks: int, policy: PolicyConfig | None = None, **train: object) -> Config:
    kind = str(train.pop("quantization", "none"))
    lora = LoraConfig(enabled=bool(train.pop("lora", False)), quantization=kind)
    optimizer = train.pop("optimizer", SMALL_LR)
    dtype = str(train.pop("dtype", "float32"))
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=GROUPS, repeats=REPEATS),
        model=ModelConfig(name=model, dtype=dtype),
        train=TrainConfig(**train),  # type: ignore[arg-type]
        train_model=TrainModelConfig(num_devices=ranks, num_threads=1, lora=lora),
        policy=policy or PolicyConfig(kl_coef=0.1),
        optimizer=optimizer,  # type: ignore[arg-type]
        inference_model=InferenceModelConfig(max_tokens=MAX_TOKENS, backend="transformers"),
        device="cpu",
    )
    config.derive_fields()
    return config


def plan_of(config: Config, folder: Path) -> Plan:
    return make_plan(config, False, this_machine(folder), folder)


def in_one_process(config: Config, folder: Path) -> Learner:
    plan = plan_of(config, folder)
    prepare_process(config, plan.learner.num_threads, torch.device("cpu"))
    return make_learner(config, plan, folder)


def ranked_learner(ranks: Ranks, config: Config, folder: Path) -> Learner:
    return Learner(config, RankWorkers(config, plan_of(config, folder), ranks), folder)


def single_and_ranked(
    ranks: Ranks, model: str, folder: Path, policy: PolicyConfig | None = None, **train: object
) -> tuple[Learner, Learner]:
    """Builds equal learners in this process and over the ranks."""
    one = in_one_process(config_of(model, 1, policy, **train), folder)
    return one, ranked_learner(ranks, config_of(model, 2, policy, **train), folder)


def step_metrics(learner: Learner, groups: Sequence[Group], count: int = STEPS) -> list[dict[str, float]]:
    batch = credit_groups(learner, groups, trained_at=1)
    return [learner.step(batch).metrics for _ in range(count)]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.make().clone() for tensor in learner.publish()}


def assert_equal_training(
    single: Learner, parallel: Learner, groups: Sequence[Group], bound: float = 1e-6, count: int = STEPS
) -> None:
    """Asserts that two learners report the same metrics and end with the same weights."""
    expected_rows, rows = step_metrics(single, groups, count), step_metrics(parallel, groups, count)
    for step, (wanted, found) in enumerate(zip(expected_rows, rows, strict=True)):
        assert wanted.keys() == found.keys()
        for name in wanted:
            if name != "throughput/padding":  # a divided group has its prompt twice
                assert found[name] == pytest.approx(wanted[name], rel=100 * bound, abs=10 * bound), (step, name)
        for name in ("loss/objective", "grad_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=bound, abs=bound), (step, name)
    before, after = weights(single), weights(parallel)
    for name, expected in before.items():
        assert (after[name] - expected).norm() <= bound * expected.norm(), name


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_every_preset(
    preset: str, packing: bool, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    one, two = single_and_ranked(ranks, model, tmp_path, load_policy(preset), packing=packing)
    assert_equal_training(one, two, groups)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation(aggregation: str, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path) -> None:
    policy = PolicyConfig(aggregation=aggregation, kl_aggregation=aggregation, kl_coef=0.1, pass_size=3)
    assert_equal_training(*single_and_ranked(ranks, model, tmp_path, policy, gradient_accumulation_steps=2), groups)


@pytest.mark.parametrize(
    "train",
    [
        {"max_tokens_per_microbatch": 40},
        {"gradient_checkpointing": True},
        {"epochs": 2},
        {"lora": True},
    ],
    ids=lambda train: ",".join(train),
)
def test_every_training_option(
    train: dict[str, object], ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    assert_equal_training(*single_and_ranked(ranks, model, tmp_path, **dict(train)), groups)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_a_base_in_4_bits(
    checkpointing: bool, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install -e '.[qlora]' in the project's folder")
    options = {"lora": True, "quantization": "nf4", "gradient_checkpointing": checkpointing}
    one, two = single_and_ranked(ranks, model, tmp_path, **options)
    assert_equal_training(one, two, groups)
    sequences = [[3, 4, 5, 6, 7, 8]]
    scores = torch.tensor([learner.score(sequences) for learner in (one, two)])
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
    for writer, reader in ((one, two), (two, one)):
        folder = tmp_path / writer.__class__.__name__
        writer.save(folder)()
        expected = weights(writer)
        step_metrics(reader, groups, 1)
        reader.load(folder, writer.scalar_state())
        for name, tensor in weights(reader).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_a_base_in_4_bits_in_half_precision(ranks: Ranks, model: str, groups: list[Group], tmp_path: Path) -> None:
    """Layers are gathered in bfloat16, dequantized weights are float32; products use one of the two."""
    pytest.importorskip("bitsandbytes", reason="pip install -e '.[qlora]' in the project's folder")
    options = {"lora": True, "quantization": "nf4"}
    exact = in_one_process(config_of(model, 1, **options), tmp_path)
    half = ranked_learner(ranks, config_of(model, 2, mixed_precision="bf16", **options), tmp_path)
    sequences = [[3, 4, 5, 6, 7, 8]]
    scores = torch.tensor([learner.score(sequences) for learner in (exact, half)])
    assert (scores[0] - scores[1]).abs().max() < 0.02
    here, there = (step_metrics(learner, groups, 1)[0] for learner in (exact, half))
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=0.05)


def test_adapters_in_half_precision_whose_base_scores_first(
    ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """The first forward pass is that of the reference, with disabled adapters."""
    exact = in_one_process(config_of(model, 1, lora=True), tmp_path)
    half = ranked_learner(ranks, config_of(model, 2, lora=True, mixed_precision="bf16"), tmp_path)
    here, there = (step_metrics(learner, groups, 2) for learner in (exact, half))
    for wanted, found in zip(here, there, strict=True):
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.05)


@pytest.mark.parametrize("lora", [False, True])
def test_bfloat16_weights(lora: bool, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path) -> None:
    """Ranks round their shares of a gradient, which soon moves ratios across the clip bounds."""
    one, two = single_and_ranked(ranks, model, tmp_path, dtype="bfloat16", lora=lora)
    assert_equal_training(one, two, groups, bound=2e-3, count=2)


def test_a_reference_kept_as_it_is_gathered_is_the_policy(
    ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """Policy and reference agree bit for bit before the first update.

    The shards of the policy are float32, those of the reference bfloat16.
    """
    learner = ranked_learner(ranks, config_of(model, 2, mixed_precision="bf16"), tmp_path)
    first, second = step_metrics(learner, groups, 2)
    assert first["kl/ref"] == 0.0 < second["kl/ref"]


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_changes_no_result(
    offload: str, dtype: str, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """Host and device are the same memory here, since a plan offloads on GPUs only."""
    config = config_of(model, 2, dtype=dtype)
    resident = ranked_learner(ranks, config, tmp_path)
    expected = step_metrics(resident, groups), weights(resident)
    offload_config = replace(config, train_model=replace(config.train_model, offload=offload))
    offloaded = Learner(offload_config, RankWorkers(offload_config, plan_of(config, tmp_path), ranks), tmp_path)
    assert step_metrics(offloaded, groups) == expected[0]
    after = weights(offloaded)
    assert all(torch.equal(after[name], tensor) for name, tensor in expected[1].items())


def test_muon(ranks: Ranks, model: str, groups: list[Group], tmp_path: Path) -> None:
    """Newton-Schulz iterations multiply in bfloat16, so the bound is wider."""
    muon = OptimizerConfig(name="muon_adamw", lr=1e-4)
    assert_equal_training(*single_and_ranked(ranks, model, tmp_path, optimizer=muon), groups, bound=1e-4)


def test_a_push_of_several_blocks(ranks: Ranks, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a push are read in any order, any number of times."""
    one = in_one_process(config_of(model, 1), tmp_path)
    expected = weights(one)
    monkeypatch.setattr(tensor_stream, "BLOCK_BYTES", 20_000)
    blocked = ranked_learner(ranks, config_of(model, 2), tmp_path)
    assert len(tensor_stream._plan_blocks(blocked.publish())[0]) > 5
    for tensor in (*blocked.publish(), *reversed(blocked.publish())):
        assert torch.equal(tensor.make(), expected[tensor.name])
    assert (
        WeightLayout.from_update(WeightUpdate(blocked.publish())).size
        == WeightLayout.from_update(WeightUpdate(one.publish())).size
    )


@pytest.mark.parametrize("name", ["adamw", "muon_adamw"])
def test_a_checkpoint_goes_from_two_ranks_to_one_process_and_back(
    name: str, ranks: Ranks, model: str, groups: list[Group], tmp_path: Path
) -> None:
    """Two ranks resume with equal bits; changing the number of processes is exact to 1e-5."""
    optimizer = OptimizerConfig(name=name, lr=1e-4, warmup_steps=5)

    def two() -> Learner:
        return ranked_learner(ranks, config_of(model, 2, optimizer=optimizer), tmp_path)

    first = two()
    step_metrics(first, groups, 2)
    first.score([[5, 6, 7]])  # as the weight check does; afterwards the parameters are shards again
    first.save(tmp_path / "two")()
    scalar_state = first.scalar_state()
    step_metrics(first, groups, 2)
    expected = weights(first)
    again = two()
    again.score([[5, 6, 7]])
    again.load(tmp_path / "two", scalar_state)
    assert again.optimizer_steps == 2
    step_metrics(again, groups, 2)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(again).items())
    one = in_one_process(config_of(model, 1, optimizer=optimizer), tmp_path)
    one.load(tmp_path / "two", scalar_state)
    step_metrics(one, groups, 1)
    one.save(tmp_path / "one")()
    last = two()
    last.load(tmp_path / "one", one.scalar_state())
    step_metrics(last, groups, 1)
    for key, tensor in weights(last).items():
        assert (tensor - expected[key]).norm() <= 1e-5 * expected[key].norm(), key


def test_memory_is_released_where_the_model_is(
    ranks: Ranks, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that would empty the allocator of a GPU are recorded in both processes."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("here"))
    in_one_process(config_of(model, 1), tmp_path).release_memory()
    actor = RankActor({})
    actor.worker = in_one_process(config_of(model, 1), tmp_path).worker
    actor.release_memory()
    assert calls == ["here", "here"]
    two = ranked_learner(ranks, config_of(model, 2), tmp_path)
    monkeypatch.setattr(ranks, "begin_call", lambda method, shares: calls.extend([method] * len(shares)) or [])
    monkeypatch.setattr(ranks, "wait_for_answers", lambda calls, subject: [None, None])
    two.release_memory()
    assert calls[2:] == ["release_memory", "release_memory"]
