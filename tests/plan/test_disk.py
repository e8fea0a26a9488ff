"""Tests the estimated disk space of checkpoints and exported models."""

from tests.plan.test_plan import config_of, gpu_plan
from torchgrpo.plan.disk import exported_model_bytes, max_stored_checkpoints

SMALL = "model.name=Qwen/Qwen2.5-0.5B-Instruct"


def test_checkpoints_on_disk() -> None:
    config = config_of("grpo_quickstart", "train.checkpoint_frequency=10", "train.keep_checkpoints=2")
    assert max_stored_checkpoints(config) == 3
    config = config_of("grpo_quickstart", "train.checkpoint_frequency=10", "train.keep_checkpoints=0")
    assert max_stored_checkpoints(config) == 13
    config = config_of("grpo_quickstart", "train.checkpoint_frequency=0")
    assert max_stored_checkpoints(config) == 1


def test_models_of_checkpoints_take_the_weights_in_their_dtype() -> None:
    def size(*overrides: str) -> float:
        plan = gpu_plan(SMALL, *overrides)
        assert plan.shape is not None
        return exported_model_bytes(plan.config, plan.shape) / plan.shape.parameters

    assert size("model.dtype=bfloat16") == 2 and size("model.dtype=float32") == 4
    assert 4 < size("model.dtype=float32", "train_model.lora.enabled=true") < 4.1
    assert size("train.export=false") == 0
    best_config = config_of("grpo_quickstart", "train.checkpoint_frequency=10", "train.keep_checkpoints=2")
    best_config.train.keep_best = "eval/SET/pass@1"
    assert max_stored_checkpoints(best_config) == 4
