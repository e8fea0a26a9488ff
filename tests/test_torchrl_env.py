"""The TorchRL environment: TorchRL's own check, and the scripts' own batches, bit for bit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from envs.group import Group, SampledCompletion
from tests.scripts import configured
from torchgrpo.run.build import build
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.torchrl_env import EnginePolicy, GroupEnv, batch_of
from torchgrpo.training.batch import Batch, collate, completion_tensors

SMALL = ("env.num_envs=3", "env.repeats=4", "train.optim_batch_size=12")
TURNS = ("env.max_steps=2", "env.reasoning=true", "env.reasoning_prompt='?'", "inference_model.max_tokens=16")
TEACHER = ("policy.kl_coef=0", "policy.distill_coef=1", "policy.teacher_prompt='{answer} {prompt}'")


@contextmanager
def lockstep(run_dir: Path, *overrides: str) -> Iterator[Lockstep]:
    """The schedule of grpo.py, its engine on the learner's weights."""
    run_dir.mkdir(exist_ok=True)
    schedule = build(configured(*SMALL, *overrides), run_dir, Lockstep)
    try:
        schedule.push_weights()
        yield schedule
    finally:
        schedule.run.close("finished")


def environment(schedule: Lockstep, num_groups: int = 3) -> GroupEnv:
    run = schedule.run
    return GroupEnv(run.loop, run.generation, run.prompts, num_groups)


def engine_policy(schedule: Lockstep) -> EnginePolicy:
    return EnginePolicy(schedule.run.loop, schedule.run.generation)


def assert_same(batch: Batch, expected: Batch) -> None:
    """Every bit of every field."""
    ours, theirs = batch.to_tensordict(), expected.to_tensordict()
    keys = set(theirs.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    for key in keys:
        assert ours[key].dtype == theirs[key].dtype, key
        assert torch.equal(ours[key], theirs[key]), key


def records(groups: list[Group]) -> list[object]:
    """Groups without their seconds."""
    return [
        (
            group.group_id,
            group.example,
            group.prompt,
            group.prompt_text,
            group.sampling,
            list(group.attempts()),
            [(one.token_ids, one.log_probs, one.policy_versions, one.shown) for one in group.completions],
        )
        for group in groups
    ]


def test_the_specs_are_what_the_environment_does(tmp_path: Path) -> None:
    with lockstep(tmp_path, *TEACHER) as schedule:
        check_env_specs(environment(schedule))
        check_env_specs(environment(schedule, num_groups=1), break_when_any_done="both")


@pytest.mark.parametrize(
    "settings", [(), TURNS, TEACHER], ids=["one turn", "two turns", "a teacher's prompt"]
)
def test_a_rollout_is_what_the_script_trains_on(settings: tuple[str, ...], tmp_path: Path) -> None:
    """Two iterations, each trained on and pushed, so that the second also tells of the first."""
    collected: list[tuple[list[Group], Batch]] = []
    with lockstep(tmp_path / "script", *settings) as schedule:
        for _ in range(2):
            groups = schedule.collect()
            collected.append((groups, schedule.advantage(groups).clone()))
            schedule.learn(collected[-1][1])
            schedule.push_weights()
    with lockstep(tmp_path / "torchrl", *settings) as schedule:
        env, policy = environment(schedule), engine_policy(schedule)
        for groups, credited in collected:
            batch = batch_of(env.rollout(1, policy=policy))
            assert_same(batch, collate(groups))
            assert records(env.groups) == records(groups)
            again = schedule.advantage(env.groups)
            assert_same(again, credited)
            schedule.learn(again)
            schedule.push_weights()
        assert batch.policy_version.max() == 1
        assert (batch.tokens.loss_mask != batch.tokens.response_mask).any() == (settings == TURNS)
        assert (batch.teacher_tokens is not None) == (settings == TEACHER)


def test_the_collector_of_torchrl_collects_the_same(tmp_path: Path) -> None:
    with lockstep(tmp_path / "script") as schedule:
        collected = [collate(schedule.collect()) for _ in range(3)]
    with lockstep(tmp_path / "torchrl") as schedule:
        env = environment(schedule)
        frames = Collector(
            env,
            engine_policy(schedule),
            frames_per_batch=12,
            total_frames=36,
            auto_register_policy_transforms=False,
        )
        batches = []
        for frame in frames:
            batches.append(batch_of(frame))
            assert batches[-1].group_ids == [group.group_id for group in env.groups]
    assert len(batches) == 3
    for batch, expected in zip(batches, collected, strict=True):
        assert_same(batch, expected)


def test_any_policy_is_judged_by_the_tokens_that_it_writes(tmp_path: Path) -> None:
    """One that knows the answers to the first group, and repeats the first answer for the others."""
    with lockstep(tmp_path) as schedule:
        env = environment(schedule)
        asked = env.reset()
        tokenizer = schedule.run.generation.encoder.tokenizer
        asks = tokenizer.decode(asked["tokens", "prompt"][0][asked["tokens", "prompt_mask"][0]])
        (summands,) = re.findall(r"(\d+)\+(\d+)=", asks)
        answer = tokenizer.encode(str(sum(map(int, summands))), add_special_tokens=False)
        said = [*answer, tokenizer.eos_token_id]
        completions = [SampledCompletion(said, [0.0] * len(said), [0] * len(said), "stop")] * 12

        def knows(prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
            written = completion_tensors(completions, [1.0] * len(prompt))
            return tuple(written[key] for key in keys)

        keys = sorted(engine_policy(schedule).out_keys, key=str)
        policy = TensorDictModule(knows, in_keys=[("tokens", "prompt")], out_keys=keys)
        stepped: TensorDictBase = env.step(policy(asked))
        assert stepped["next", "reward"].view(3, 4).tolist()[0] == [1.0] * 4
        assert stepped["next", "done"].all() and stepped["next", "terminated"].all()


def test_candidates_that_a_step_would_have_to_leave_out_are_refused(tmp_path: Path) -> None:
    with (
        lockstep(tmp_path, "env.oversample=8") as schedule,
        pytest.raises(ValueError, match=r"candidates=8, repeats=4: .*env.oversample"),
    ):
        environment(schedule)
