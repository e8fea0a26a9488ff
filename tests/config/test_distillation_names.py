"""Other trainers' names for a reference, a teacher and distillation lead to our keys."""

import pytest

from tests.config.test_schema import message


@pytest.mark.parametrize(("override", "expected"), [
    ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "the reference is not trained; ref_model.name"),
    ("actor_rollout_ref.ref.model.path=x", "here it is ref_model.name"),
    ("ref_model.model.path=x", "here it is ref_model.name"),
    ("ref_load=x", "here it is ref_model.name"),
    ("ref_num_nodes=2", "here it is ref_model.num_devices, over all nodes"),
    ("sync_ref_model=true", "the reference stays as it begins, the policy or ref_model.name"),
    ("teacher.model.path=x", "here it is ref_model.name, with policy=opd"),
    ("teacher_model=x", "here it is ref_model.name, with policy=opd"),
    ("teacher.optim.lr=1", "policy=opd distills: ref_model.name is the teacher"),
    ("teacher_devices=[0]", "policy=opd distills: ref_model.name is the teacher"),
    ("distillation.enabled=true", "policy=opd distills: ref_model.name is the teacher"),
    ("distillation.distillation_loss.loss_mode=k1", "policy=opd distills"),
    ("distillation.distillation_loss.use_task_rewards=true", "here it is policy.reward_coef"),
    ("opd_kl_coef=1.0", "here it is policy.distill_coef, with policy=opd"),
    (
        "ref_model.lora.enabled=true",
        "beside adapters the reference is their base unless ref_model.name or ref_model.num_devices is set",
    ),
    ("opd_type=x", "policy=opd distills"),
    ("teacher_prompt_template=x", "here it is policy.teacher_prompt, with policy=opsd"),
    ("distillation.n_gpus_per_node=2", "here it is ref_model.num_devices, with policy=opd"),
])  # fmt: skip
def test_names_of_a_frozen_model_lead_to_ours(override: str, expected: str) -> None:
    assert expected in message(override)
