"""Tests that the weight check finds and names known faults of pushes into vLLM.

The faults are injected into the real vLLM (its CPU build).
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from envs.group import SINGLE_ENGINE_NAME, Sampling
from tests.local_policy import LocalPolicy, check_plan
from tests.rollout.conftest import VOCAB, StartEngine, tiny_llama
from torchgrpo.plan.log_prob_bounds import BOUNDS
from torchgrpo.rollout.engines import vllm_weight_receiver
from torchgrpo.rollout.engines.interface import Request, SequenceScores, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch, log_prob_gap, random_sequences
from torchgrpo.rollout.weights.weight_pusher import WeightPusher
from torchgrpo.training.published_weights import named_weights

HEAD = "lm_head.weight"
Tensors = dict[str, Tensor]


class PushRun:
    """Learner, engine, and the weight check between them."""

    def __init__(self, engine: VLLMEngine, model: LlamaForCausalLM, check_interval: int = 1) -> None:
        self.engine, self.model = engine, model
        self.learner = LocalPolicy(model, named_weights)
        self.check = WeightCheck(check_plan(engine.settings.dtype), engine, self.learner, check_interval)
        self.weights = WeightPusher(self.learner, engine, self.check)

    def push(self, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> dict[str, float]:
        load = self.engine.load
        try:
            self.engine.load = lambda weights, version: load(  # type: ignore[method-assign]
                change({name: tensor.clone() for name, tensor in weights}).items(), version
            )
            self.weights.push()
        finally:
            self.engine.load = load  # type: ignore[method-assign]
        return self.weights.check_push()

    def step_and_push(
        self, change: Callable[[Tensors], Tensors] = lambda tensors: tensors, scale: float = 0.05
    ) -> dict[str, float]:
        train_a_little(self.model, self.weights.version, scale)
        return self.push(change)


def train_a_little(model: LlamaForCausalLM, step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def run(vllm_engine: VLLMEngine, tied: bool) -> PushRun:
    return make_pushed_run(vllm_engine, tiny_llama(tied))


def make_pushed_run(engine: VLLMEngine, model: LlamaForCausalLM) -> PushRun:
    run = PushRun(engine, model)
    run.push()
    return run


def swap_halves(*names: str) -> Callable[[Tensors], Tensors]:
    def change(weights: Tensors) -> Tensors:
        return weights | {name: torch.cat(weights[name].chunk(2)[::-1]) for name in names if name in weights}

    return change


def round_to_float8(weights: Tensors) -> Tensors:
    return {name: tensor.to(torch.float8_e4m3fn).float() for name, tensor in weights.items()}


def not_a_number(weights: Tensors) -> Tensors:
    return weights | {"model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan)}


def raise_temperature(weights: Tensors) -> Tensors:
    return weights | {"model.norm.weight": weights["model.norm.weight"] / 0.7}


def without_head(weights: Tensors) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


DAMAGING_CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "query": swap_halves("model.layers.0.self_attn.q_proj.weight"),
    "mlp": swap_halves("model.layers.1.mlp.down_proj.weight"),
    "embedding": swap_halves("model.embed_tokens.weight", HEAD),
    "float8": round_to_float8,
}


@pytest.mark.parametrize("scale", [0.05, 1e-3, 1e-6, 0.0])
def test_good_pushes_pass(run: PushRun, scale: float) -> None:
    for _ in range(3):
        assert run.step_and_push(scale=scale)["weight_check/max"] < BOUNDS["float32"].largest / 50


@pytest.mark.parametrize("scale", [0.05, 1e-5])
def test_a_push_that_is_lost(run: PushRun, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Even a change inside the bounds must change some bit of the engine's answer."""
    monkeypatch.setattr(run.engine, "_load_full_weights", lambda weights: None)
    with pytest.raises(WeightMismatch, match=r"push of policy version 1: .*Cause: old weights"):
        run.step_and_push(scale=scale)


@pytest.mark.parametrize("scale", [0.05, 1e-4])
def test_a_prefix_cache_that_outlives_a_push(run: PushRun, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(run.engine._llm, "reset_prefix_cache", lambda **how: True)
    with pytest.raises(WeightMismatch, match="Cause: prefix cache: 384 tokens"):
        run.step_and_push(scale=scale)
    monkeypatch.undo()
    run.engine._llm.reset_prefix_cache(reset_running_requests=True)


def test_an_evaluation_may_use_its_own_cached_prefixes(run: PushRun) -> None:
    run.step_and_push()
    run.check.engine_pids = ()
    assert run.weights.check()["weight_check/max"] < BOUNDS["float32"].largest


def test_another_temperature(run: PushRun) -> None:
    with pytest.raises(WeightMismatch, match=r"Cause: another temperature.* 0\.7,"):
        run.step_and_push(raise_temperature)


@pytest.mark.parametrize("change", DAMAGING_CHANGES.values(), ids=DAMAGING_CHANGES)
def test_damaged_tensors(run: PushRun, change: Callable[[Tensors], Tensors]) -> None:
    with pytest.raises(WeightMismatch, match=r"Cause: .*cut, permuted or rounded"):
        run.step_and_push(change)


def test_tensors_that_are_not_finite(run: PushRun) -> None:
    with pytest.raises(WeightMismatch, match="Cause: the engine's log-probs are not finite"):
        run.step_and_push(not_a_number)


def test_a_learner_that_diverged(run: PushRun) -> None:
    with torch.no_grad():
        run.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(WeightMismatch, match="the learner's own log-probs are not finite"):
        run.push()


def test_an_engine_that_is_wrong_from_the_start(vllm_engine: VLLMEngine, tied: bool) -> None:
    with pytest.raises(WeightMismatch, match="Cause: wrong from the start"):
        PushRun(vllm_engine, tiny_llama(tied)).push(DAMAGING_CHANGES["query"])


def test_decoding_that_is_not_the_forward_pass(
    vllm_engine: VLLMEngine, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixed sequences agree; only decoded completions differ."""
    run, take = PushRun(vllm_engine, tiny_llama(tied)), VLLMEngine._append_output

    def off_by_a_little(engine: VLLMEngine, output: Any, version: str) -> None:
        group, index = engine._running[output.request_id]
        take(engine, output, version)
        group.completions[index].log_probs[-1] -= 0.01

    monkeypatch.setattr(VLLMEngine, "_append_output", off_by_a_little)
    with pytest.raises(WeightMismatch, match=r"completions decoded at the start: .*not this model's forward pass"):
        run.push()


def test_a_new_engine_without_the_last_push(run: PushRun, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.check.check_interval = 100
    run.step_and_push()
    assert run.check.version == 0
    monkeypatch.setattr(VLLMEngine, "engine_pids", (1,))
    with pytest.raises(WeightMismatch, match="Cause: old weights: an engine was replaced"):
        run.step_and_push(lambda tensors: {name: 1.02 * tensor for name, tensor in first.items()})


def test_fixed_sequences_are_scored_at_the_check_interval(run: PushRun) -> None:
    run.check.check_interval = 3
    compared = [bool(run.step_and_push()) for _ in range(6)]
    assert compared == [False, False, True] * 2
    assert run.weights.check() == {}, "these weights of these engines were compared"
    run.step_and_push()
    assert run.weights.check(), "before an evaluation they are"
    run.learner.optimizer_steps += 1
    run.step_and_push()
    run.learner.optimizer_steps += 1
    assert run.weights.check() == {}, "the learner has moved on"


def test_a_tied_head_that_is_missing(started_engines: dict[bool, VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own reload keeps the packed head; a head written in place follows the embeddings."""
    engine, model = started_engines[True], tiny_llama(True)
    engine.load(model.state_dict().items(), version=0)
    run = make_pushed_run(engine, model)
    run.step_and_push(without_head)
    monkeypatch.setattr(vllm_weight_receiver, "_is_plain", lambda model, config: False)
    with pytest.raises(WeightMismatch, match="Cause: "):
        run.step_and_push(without_head)


def test_an_adapter_that_is_never_applied(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new adapter is in its folder, but the engine continues with the old one."""
    from peft import LoraConfig, get_peft_model

    from torchgrpo.rollout.engines.vllm_settings import AdapterShape
    from torchgrpo.training.published_weights import adapter_weights

    policy = get_peft_model(tiny_llama(False), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    run = PushRun(start_engine(adapter=AdapterShape(4, 8.0, ("q_proj",))), policy)  # type: ignore[arg-type]
    run.learner._tensor_source = adapter_weights

    def move() -> None:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))

    run.push()
    move()
    run.push()
    monkeypatch.setattr(run.engine._llm, "add_lora", lambda request: True)
    move()
    with pytest.raises(WeightMismatch, match="Cause: old weights"):
        run.push()


@pytest.fixture(scope="module")
def half_engines(start_engine: StartEngine) -> dict[str, VLLMEngine]:
    return {dtype: start_engine(dtype=dtype) for dtype in ("bfloat16", "float16")}


@pytest.fixture(params=["bfloat16", "float16"])
def half(request: pytest.FixtureRequest, half_engines: dict[str, VLLMEngine]) -> PushRun:
    """Run of an engine in half precision under a float32 learner."""
    return make_pushed_run(half_engines[request.param], tiny_llama(False))


def test_an_engine_in_half_precision_keeps_far_from_its_bounds(half: PushRun) -> None:
    for _ in range(3):
        found = half.step_and_push()
        assert found["weight_check/mean"] < half.check.plan.bounds.mean / 5
        assert found["weight_check/max"] < half.check.plan.bounds.largest / 5


def test_bounds_grow_with_the_size_of_log_probs(half: PushRun) -> None:
    """Training makes a model more certain; the bounds are relative to 1 + |log-prob|."""
    with torch.no_grad():
        half.model.lm_head.weight.mul_(30)
    half.push()


@pytest.mark.parametrize("scale", [0.05, 0.02, 3e-3])
def test_half_precision_shows_a_push_that_is_lost(half: PushRun, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(half.engine, "_load_full_weights", lambda weights: None)
    with pytest.raises(WeightMismatch, match="Cause: old weights"):
        half.step_and_push(scale=scale)


@pytest.mark.parametrize("scale", [0.05, 1e-4])
def test_half_precision_shows_a_prefix_cache_that_outlives_a_push(
    half: PushRun, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(half.engine._llm, "reset_prefix_cache", lambda **how: True)
    with pytest.raises(WeightMismatch, match="Cause: prefix cache"):
        half.step_and_push(scale=scale)
    monkeypatch.undo()
    half.engine._llm.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize(
    "change",
    [*DAMAGING_CHANGES.values(), not_a_number, raise_temperature],
    ids=[*DAMAGING_CHANGES, "not finite", "hotter"],
)
def test_half_precision_hides_no_fault(half: PushRun, change: Callable[[Tensors], Tensors]) -> None:
    causes = r"Cause: (.*cut, permuted|another temperature|the engine's log-probs|rounding)"
    with pytest.raises(WeightMismatch, match=causes):
        half.step_and_push(change)


class ConstantScorer:
    """Fake engines and learner with constant scores."""

    vocab_size, optimizer_steps, ranks = VOCAB, 0, None
    engine_pids: tuple[int, ...] = (1,)

    def __init__(self, *engines: str) -> None:
        self.engines = engines

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> dict[str, SequenceScores]:
        return {name: SequenceScores([[-1.0] * (len(ids) - 1) for ids in sequences]) for name in self.engines}


def sampled_check(*engines: str) -> WeightCheck:
    check = WeightCheck(check_plan("float32"), ConstantScorer(*engines), ConstantScorer())  # type: ignore[arg-type]
    check.engine_pids, check.version = (1,), 3
    check._engines_before = {name: torch.zeros(1) for name in engines}
    return check


def test_sampled_tokens_show_which_engine_is_wrong() -> None:
    check, right = sampled_check("a", "b"), torch.full((64,), -1.0)
    check.compare_sampled(3, {"a": (right, right), "b": (right, right + 1e-5)})
    with pytest.raises(WeightMismatch, match="the learner's own log-probs are not finite"):
        check.compare_sampled(3, {"a": (right, right * torch.nan)})
    with pytest.raises(WeightMismatch, match=r"64 tokens sampled with policy version 3: b differs .*old weights"):
        check.compare_sampled(3, {"a": (right, right), "b": (right, right + 0.01)})
    check.compare_sampled(3, {"b": (right[:63], right[:63] + 0.01)})
    check.engines.engine_pids = (2,)  # type: ignore[misc]
    with pytest.raises(WeightMismatch, match="replaced a lost engine"):
        check.compare_sampled(3, {"b": (right, right + 0.01)})


@pytest.mark.parametrize(("times", "cause"), [(1.5, "rounding"), (3.0, "old weights in some tensors")])
def test_a_little_beyond_the_bound_is_rounding(times: float, cause: str) -> None:
    """The differences have no direction, so the cause is no temperature."""
    bound, learner = BOUNDS["bfloat16"].mean, torch.full((477,), -1.0, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(239)[:477]
    check = WeightCheck(check_plan("bfloat16"), ConstantScorer("a"), LocalPolicy(tiny_llama(False), named_weights))
    found = check._cause([[3, 4]], learner + 2 * times * bound * signs, learner, is_first=False, engine_replaced=False)
    assert found.startswith(cause)


@pytest.mark.parametrize(
    ("temperature", "rest", "cause"),
    [
        (0.25, 0.0, "another temperature: the engine samples at temperature 0.25"),
        (1.3, 0.1, "another temperature"),
        (1.3, 0.3, "old weights in some tensors"),
        (4.0, 0.0, "another temperature: the engine samples at temperature 4"),
    ],
)
def test_a_temperature_is_the_cause_of_nearly_all_of_a_difference(temperature: float, rest: float, cause: str) -> None:
    learner, sequences = LocalPolicy(tiny_llama(False), named_weights), random_sequences(VOCAB, [40] * 4)
    cold, hot = (torch.tensor(learner.score(sequences, at), dtype=torch.float64).flatten() for at in (1.0, temperature))
    noise = torch.randn(len(hot), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise *= rest * (hot - cold).norm() / noise.norm()
    check = WeightCheck(check_plan("float32"), ConstantScorer("a"), learner)
    found = check._cause(sequences, hot + noise, cold, is_first=False, engine_replaced=False)
    assert found.startswith(cause)


def test_few_sampled_tokens_are_not_compared() -> None:
    check = sampled_check("a", "b")
    assert not check.needs_more_tokens({"a": 64, "b": 80})
    assert (
        check.needs_more_tokens({"a": 64, "b": 63})
        and check.needs_more_tokens({"a": 64})
        and check.needs_more_tokens({})
    )


def test_what_the_engine_samples_is_within_the_bounds_of_sampled_tokens(half: PushRun) -> None:
    prompts = random_sequences(VOCAB, [20] * 4)
    requests = [Request(i, tuple(ids), 4, Sampling(max_tokens=16), seed=i) for i, ids in enumerate(prompts)]
    pairs = [
        (torch.tensor(one.log_probs), half.learner.score([[*request.prompt, *one.token_ids]])[0])
        for request, response in zip(requests, generate(half.engine, requests), strict=True)
        for one in response.completions
    ]
    engine = torch.cat([mine for mine, _ in pairs])
    learner = torch.cat([torch.tensor(theirs[-len(mine) :]) for mine, theirs in pairs])
    assert len(engine) >= 64 and float(log_prob_gap(engine, learner).mean()) < half.check.plan.bounds.sampled_mean / 5
    half.check._engines_before = {SINGLE_ENGINE_NAME: torch.zeros(1)}
    half.check.compare_sampled(0, {SINGLE_ENGINE_NAME: (engine, learner)})
