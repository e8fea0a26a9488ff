"""Tests of the TorchRL loss module: keys, terms, agreement with TorchRL's GRPOLoss."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.objectives import LossModule
from torchrl.objectives.llm import GRPOLoss as TorchRLLoss

from config.schema.policy import PRESETS, PolicyConfig, load_policy
from envs.group import Group, Verdict
from tests.groups import sample_tiny_groups
from tests.tiny_models import tiny_llama
from tests.training.tiny_learners import REPEATS, make_learner, make_scorer
from torchgrpo.batches.batch import Batch, collate, environment_token_mask
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.aggregation import BatchTotals
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.grpo_loss import LOSS_KEYS, GRPOLoss
from torchgrpo.training.loss_metrics import finalize_metrics, merge_metrics
from torchgrpo.training.loss_terms import total_loss
from torchgrpo.training.microbatches import partition_rows

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
FULL = {"kl_coef": 0.1, "kl_inference_coef": 0.05, "entropy_coef": 0.01, "environment_coef": 0.1}


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    groups = sample_tiny_groups(num_groups=4, repeats=REPEATS)
    for group in groups:
        for place, completion in enumerate(group.completions):
            completion.verdict = Verdict(place / REPEATS, {}, "scored")
    return groups


def credit_groups(policy: PolicyConfig, groups: list[Group]) -> Batch:
    """Returns a batch with credit and all log-probs that a policy may need."""
    batch = collate(groups)
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(batch.sample_log_prob.shape, generator=generator)
    batch.sample_log_prob = batch.sample_log_prob + noise
    batch.ref_log_prob, batch.old_log_prob = (batch.sample_log_prob - noise.flip(0), batch.sample_log_prob + noise)
    return assign_credit(policy, Rollout(groups, batch), max_tokens=9).batch


def loss_of(policy: PolicyConfig) -> GRPOLoss:
    return GRPOLoss(make_scorer(tiny_llama(), True), policy)


def as_tensordict(batch: Batch) -> TensorDict:
    """Converts a batch to a TensorDict without classes of this project."""
    return TensorDict(batch.to_tensordict(retain_none=False).to_dict(), batch_size=batch.batch_size)


@pytest.mark.parametrize("preset", NAMES)
def test_terms_sum_to_the_objective(preset: str, groups: list[Group]) -> None:
    policy = load_policy(preset)
    loss, batch = loss_of(policy), credit_groups(policy, groups)
    out = loss(batch)
    scores = loss.scorer(batch.tokens, with_entropy=True)
    expected, metrics = total_loss(
        policy,
        scores.log_prob,
        batch.sample_log_prob,
        batch.old_log_prob,
        batch.ref_log_prob,
        batch.advantage,
        batch.mask,
        entropy=scores.entropy,
        environment=environment_token_mask(batch.tokens, batch.mask) if policy.environment_coef else None,
    )
    assert torch.equal(loss.total(out), expected)
    assert torch.equal(out["log_prob"], scores.log_prob.detach())
    assert finalize_metrics(dict(out["metrics"].items())) == finalize_metrics(metrics)
    assert out["ESS"].item() == pytest.approx(finalize_metrics(metrics)["ess"])


def test_input_and_output_keys(groups: list[Group]) -> None:
    policy = PolicyConfig(**FULL)
    loss, batch = loss_of(policy), credit_groups(policy, groups)
    assert isinstance(loss, LossModule)
    assert all(batch.get(key) is not None for key in loss.in_keys)
    out = loss(as_tensordict(batch))
    assert type(out) is TensorDict and out.batch_size == torch.Size([])
    known = {"log_prob", "entropy", "advantage"}
    assert set(out.keys()) == set(loss.out_keys) == {*LOSS_KEYS, "ESS", *known, "metrics"}
    assert all(out[name].shape == batch.mask.shape and not out[name].requires_grad for name in known)
    assert all(out[name].shape == () and out[name].requires_grad for name in LOSS_KEYS)
    sum(value for name, value in out.items() if name.startswith("loss_")).backward()  # as in TorchRL's trainers
    ours = [parameter.grad for parameter in loss.parameters()]
    other = loss_of(policy)
    other.total(other(batch)).backward()
    for one, expected in zip(ours, other.actor.parameters(), strict=True):
        torch.testing.assert_close(one, expected.grad)


def test_output_advantage_includes_the_teacher(groups: list[Group]) -> None:
    policy = load_policy("opd", reward_coef=0.5, distill_coef=0.25, distill_log_prob="old", distill_clamp=None)
    batch = credit_groups(policy, groups)
    out = loss_of(policy)(batch)
    expected = 0.5 * batch.advantage + 0.25 * (batch.ref_log_prob - batch.sample_log_prob)
    torch.testing.assert_close(out["advantage"][batch.mask], expected[batch.mask])


def test_a_term_that_the_policy_lacks_is_zero(groups: list[Group]) -> None:
    policy = PolicyConfig(kl_coef=0.0)
    out = loss_of(policy)(credit_groups(policy, groups))
    assert [out[name].item() for name in LOSS_KEYS[1:]] == [0.0] * 4


def test_keys_can_be_renamed(groups: list[Group]) -> None:
    policy = PolicyConfig(**FULL)
    loss, batch = loss_of(policy), credit_groups(policy, groups)
    expected = loss(batch)
    renamed = {
        "tokens": ("data", "ids"),
        "sample_log_prob": ("engine", "log_prob"),
        "old_log_prob": "before",
        "ref_log_prob": ("next", "reference"),
        "advantage": "adv",
        "mask": ("masks", "loss"),
    }
    other = TensorDict(batch_size=batch.batch_size)
    for name, key in renamed.items():
        other[key] = as_tensordict(batch)[name]
    loss.set_keys(**renamed)
    assert loss.tensor_keys.advantage == "adv" and "adv" in loss.in_keys
    out = loss(other)
    assert all(torch.equal(out[name], expected[name]) for name in (*LOSS_KEYS, "ESS"))
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(reward="r")
    loss.set_keys(advantage=None)
    assert loss.tensor_keys.advantage == "advantage"


def test_missing_keys_are_named(groups: list[Group]) -> None:
    batch = credit_groups(PolicyConfig(), groups)
    batch.ref_log_prob = batch.advantage = None
    with pytest.raises(KeyError, match=r"advantage.*ref_log_prob"):
        loss_of(PolicyConfig(kl_coef=0.1))(batch)


def test_a_moving_temperature_is_read_from_the_rows(groups: list[Group]) -> None:
    policy = PolicyConfig(kl_coef=0.0)
    batch = credit_groups(policy, groups)
    loss = GRPOLoss(make_scorer(tiny_llama(), True, temperature=None), policy)
    assert "temperature" in loss.in_keys
    fixed = GRPOLoss(make_scorer(tiny_llama(), True, temperature=0.5), policy)
    batch.temperature = torch.full_like(batch.temperature, 0.5)
    assert torch.equal(loss(batch)["log_prob"], fixed(batch)["log_prob"])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "padded_mean", "pass_mean"])
def test_microbatches_sum_to_the_batch(aggregation: str, groups: list[Group]) -> None:
    policy = PolicyConfig(**FULL, aggregation=aggregation, pass_size=REPEATS)
    batch = credit_groups(policy, groups)
    totals = BatchTotals.from_mask(policy, batch.mask)
    whole, split = loss_of(policy), loss_of(policy)
    expected = whole(batch)
    whole.total(expected).backward()
    outs = []
    (microbatches,) = partition_rows(batch, 1, len(batch) // REPEATS, None, packs=True)
    for microbatch in microbatches:
        outs.append(split(microbatch.batch, totals.select(microbatch.rows)))
        split.total(outs[-1]).backward()
    for name in LOSS_KEYS:
        assert sum(out[name].item() for out in outs) == pytest.approx(expected[name].item(), rel=1e-4, abs=1e-7)
    merged = finalize_metrics(merge_metrics([dict(out["metrics"].items()) for out in outs]))
    assert merged == pytest.approx(finalize_metrics(dict(expected["metrics"].items())), rel=1e-4, abs=1e-6)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)


def test_the_actors_parameters_stay_its_own() -> None:
    """The loss module copies no parameters and leaves the model unchanged."""
    model = tiny_llama()
    loss = GRPOLoss(make_scorer(model, True), PolicyConfig())
    assert [id(one) for one in loss.parameters()] == [id(one) for one in model.parameters()]
    assert not list(loss.buffers(recurse=False)) and not loss.functional
    assert len(loss.state_dict()) == len(model.state_dict())


def test_the_learner_calls_the_loss_once_per_microbatch(groups: list[Group], tmp_path: Path) -> None:
    learner, calls = make_learner(tmp_path, PolicyConfig(kl_coef=0.1), accumulation=2), []
    learner.worker.loss.register_forward_hook(lambda module, inputs, out: calls.append(out))
    report = learner.step(learner.credit(Rollout.from_groups(groups)).batch)
    assert len(calls) == 2
    expected = sum(out["loss_objective"].item() for out in calls)
    assert report.metrics["loss/objective"] == pytest.approx(expected)


def test_loss_agrees_with_torchrls_grpo_loss(groups: list[Group]) -> None:
    """Objective and ESS equal those of TorchRL's GRPOLoss.

    TorchRL's `loss_objective` and `ESS` are correct if its output is not padded. Its entropy and KL terms
    average over padding, so these are switched off. The actor here returns the logits of each response.
    """
    policy = load_policy("compat_torchrl", kl_inference_coef=0.0, entropy_coef=0.0)
    batch, model = credit_groups(policy, groups), tiny_llama()
    tokens = batch.tokens
    attention_mask = torch.cat([tokens.prompt_mask, tokens.response_mask], 1)

    class Actor(torch.nn.Module):
        in_keys = ()

        def get_dist(self, tensordict: TensorDict, logits_key: str) -> LLMMaskedCategorical:
            logits = model(
                torch.cat([tokens.prompt, tokens.response], 1), attention_mask.long(), attention_mask.cumsum(1) - 1
            ).logits
            logits = logits[:, -tokens.response.shape[1] - 1 : -1]
            return LLMMaskedCategorical(logits=logits, mask=batch.mask)

    theirs = TorchRLLoss(Actor(), masking_strategy="generic", entropy_bonus=False)(
        TensorDict(
            {
                ("tokens", "full"): batch.tokens.response,
                ("log_probs", "full"): batch.sample_log_prob,
                "advantage": batch.advantage[..., None].expand(*batch.mask.shape, 1),
            },
            batch_size=batch.batch_size,
        )
    )
    ours = GRPOLoss(make_scorer(model, True), policy)(batch)
    assert ours["loss_objective"].item() == pytest.approx(theirs.loss_objective.item(), rel=1e-4, abs=1e-6)
    assert ours["ESS"].item() == pytest.approx(theirs.ESS.item(), rel=1e-5)
    ours["loss_objective"].backward()
    gradient = torch.cat([one.grad.flatten() for one in model.parameters()])
    model.zero_grad()
    theirs.loss_objective.backward()
    expected = torch.cat([one.grad.flatten() for one in model.parameters()])
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
