"""A run that goes on keeps its frozen model, and may give it other devices."""

from dataclasses import asdict
from pathlib import Path

import pytest

from config.errors import ConfigError
from run.lockstep import Lockstep
from run.resume import NO_PART_OF_IT, changed_settings, under
from tests.scripts import configured
from training.checkpoint import Saved


def saved_by(*overrides: str) -> Saved:
    return Saved(Path("checkpoint_000002"), {"config": asdict(configured(*overrides)), "iteration": 2})


def test_another_frozen_model_is_refused() -> None:
    saved = saved_by("ref_model.name=models/quickstart")
    assert changed_settings(saved, configured("ref_model.name=models/quickstart"), Lockstep) == []
    with pytest.raises(
        ConfigError, match=r"ref_model.name: models/quickstart -> None. Give these as they were"
    ):
        changed_settings(saved, configured(), Lockstep)
    with pytest.raises(ConfigError, match=r"ref_model.dtype: None -> bfloat16"):
        changed_settings(saved_by(), configured("ref_model.dtype=bfloat16"), Lockstep)


def test_devices_of_the_frozen_model_may_change() -> None:
    now = configured("ref_model.num_devices=2", "ref_model.shard_size=2")
    assert changed_settings(saved_by("ref_model.num_devices=4"), now, Lockstep) == [
        "ref_model.num_devices: 4 -> 2 applied",
        "ref_model.shard_size: None -> 2 applied",
    ]
    apart = [key for key in vars(now.ref_model) if not under(f"ref_model.{key}", NO_PART_OF_IT)]
    assert apart == ["name", "dtype"], "another run to train.resume=auto"


def test_a_checkpoint_from_before_there_were_names_is_as_one_without() -> None:
    saved = saved_by()
    del saved.state["config"]["ref_model"]["name"]
    changed_settings(saved, configured(), Lockstep)
    with pytest.raises(ConfigError, match=r"ref_model.name: absent -> models/quickstart"):
        changed_settings(saved, configured("ref_model.name=models/quickstart"), Lockstep)
