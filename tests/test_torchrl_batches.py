"""Tests of batches under TorchRL's keys: loss, replay buffer, conversion back."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLLoss

from config.schema.policy import load_policy
from tests.group_collection import assert_same
from tests.groups import make_completion, make_group, sample_tiny_groups
from tests.tiny_models import tiny_llama
from tests.training.tiny_learners import REPEATS, make_scorer
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.grpo_loss import GRPOLoss


class PadToken:
    """Tokenizer stub with the attributes that TransformersWrapper needs for token input."""

    pad_token_id = 0
    eos_token_id = 1
    padding_side = "left"
    pad_token = eos_token = "<pad>"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.pad_token_id]}


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Returns sampled groups of unequal lengths, with ratios other than 1."""
    rollout = Rollout.from_groups(sample_tiny_groups(num_groups=6, repeats=REPEATS))
    rollout.batch.sample_log_prob += 0.3 * torch.randn(
        rollout.batch.sample_log_prob.shape, generator=torch.Generator().manual_seed(0)
    )
    return rollout


def test_torchrls_loss_on_our_rollout(rollout: Rollout) -> None:
    """TorchRL's objective, gradient and ESS equal ours.

    They are computed with TorchRL's wrapper of the model, which pads by itself.
    """
    policy = load_policy("compat_torchrl", kl_coef=0.0, kl_inference_coef=0.0, entropy_coef=0.0)
    batch, model = assign_credit(policy, rollout, max_tokens=9).batch, tiny_llama()
    actor = TransformersWrapper(
        model, tokenizer=PadToken(), input_mode="tokens", generate=False, pad_output=False, return_log_probs=True
    )
    theirs = TorchRLLoss(actor, masking_strategy="sft", entropy_bonus=False)(batch.to_torchrl())
    ours = GRPOLoss(make_scorer(model, True), policy)(batch)
    assert ours["loss_objective"].item() == pytest.approx(theirs.loss_objective.item(), rel=1e-4, abs=1e-6)
    assert ours["ESS"].item() == pytest.approx(theirs.ESS.item(), rel=1e-5)
    assert 0.1 < ours["ESS"].item() < 0.99 and ours["loss_objective"].item() != 0
    gradients = []
    for loss in (ours["loss_objective"], theirs.loss_objective):
        model.zero_grad()
        loss.backward()
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[1].norm()


def test_a_replay_buffer_of_torchrl_keeps_rows_of_any_width(rollout: Rollout) -> None:
    rows = rollout.batch.to_torchrl()
    assert len({len(row["tokens", "full"]) for row in rows.unbind(0)}) > 3
    buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=8)
    buffer.extend(rows[:10])
    buffer.extend(rows[10:])
    assert len(buffer) == len(rollout.batch)
    sampled = Batch.from_torchrl(buffer.sample())
    assert len(sampled) == 8
    known = {tuple(row["tokens", "full"].tolist()): float(row["next", "reward"]) for row in rows.unbind(0)}
    for row in sampled.to_torchrl().unbind(0):
        assert known[tuple(row["tokens", "full"].tolist())] == float(row["next", "reward"])
    assert_same(Batch.from_torchrl(buffer[:]), Batch.from_torchrl(rows))


def test_conversion_to_torchrl_and_back() -> None:
    """Conversion keeps all shared fields, environment tokens, errors and reference log-probs."""
    groups = [
        make_group(4, [make_completion(3, 1.0, versions=[0, 1, 1]), make_completion(5, -0.5, outcome="invalid")]),
        make_group(
            7,
            [
                make_completion([9, 8, 7], 0.25, sampled_mask=[True, False, True], finish_reason="length"),
                make_completion(1, 0.0, outcome="error"),
            ],
            prompt=(3, 4, 5),
            temperature=0.7,
        ),
    ]
    batch = Rollout.from_groups(groups).batch
    assert_same(Batch.from_torchrl(batch.to_torchrl()), batch)
    batch.ref_log_prob = (batch.sample_log_prob - 1.0) * batch.tokens.response_mask
    batch.advantage = torch.arange(4.0)[:, None]
    assert_same(Batch.from_torchrl(batch.to_torchrl()), batch)


def test_torchrl_rows_need_no_project_keys() -> None:
    row = TensorDict(
        {
            "tokens": {"prompt": torch.tensor([5, 6]), "response": torch.tensor([7, 8, 1])},
            "log_probs": {"response": torch.tensor([-0.5, -1.0, -2.0])},
            "next": {"reward": torch.tensor([[0.5]])},
            "group_id": torch.tensor([3]),
        }
    )
    batch = Batch.from_torchrl(lazy_stack([row, row]))
    assert batch.tokens.loss_mask.all() and not batch.policy_version.any()
    assert batch.next.reward.tolist() == [[0.5]] * 2 and batch.temperature.tolist() == [[1.0]] * 2
    del row["group_id"]
    with pytest.raises(KeyError, match="group_id"):
        Batch.from_torchrl(lazy_stack([row]))
