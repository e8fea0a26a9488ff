"""Tests of the TorchRL environment: its specs, transforms, collector and rollouts.

The rollouts equal those of the coroutine path (`run_group`) bit for bit.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import RewardScaling, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

import grpo
from envs.group import Group, SampledCompletion
from tests.group_collection import assert_same
from tests.script_runner import compose_run_config
from torchgrpo.batches.batch import Batch, collate, completion_tensors
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.group_env import EnginePolicy, GroupEnv, collect_rollout
from torchgrpo.run.build_run import build_run
from torchgrpo.run.lockstep_run import LockstepRun

SMALL = ("env.num_envs=3", "env.repeats=4", "train.optim_batch_size=12")
TURNS = ("env.max_steps=2", "env.reasoning=true", "env.reasoning_prompt='?'", "inference_model.max_tokens=16")
EPISODES = (
    "env.environment=tests.run_environments:WaitingSums",
    "env.max_steps=3",
    "inference_model.max_tokens=32",
)
WINDOWS = (*EPISODES, "env.environment_options.window=true")
TEACHER = ("policy.kl_coef=0", "policy.distill_coef=1", "policy.teacher_prompt='{answer} {prompt}'")
DYNAMIC_SAMPLING = ("policy.filter_range=[0,1]", "policy.dynamic_batching=true", "policy.filter_attempts=3")
OVERSAMPLING = ("env.oversample=8",)


@contextmanager
def open_lockstep_run(run_dir: Path, *overrides: str) -> Iterator[LockstepRun]:
    """Opens a run of grpo.py whose engine has the learner's weights."""
    run_dir.mkdir(exist_ok=True)
    run = build_run(compose_run_config(*SMALL, *overrides), run_dir, LockstepRun)
    try:
        run.push_weights()
        yield run
    finally:
        run.close("finished")


def make_env(run: LockstepRun, num_groups: int = 3) -> GroupEnv:
    rollout_components = run.rollout_components
    return GroupEnv(rollout_components.loop, rollout_components.group_rollout, rollout_components.prompts, num_groups)


def comparable_groups(groups: list[Group]) -> list[object]:
    """Returns the fields of groups that do not depend on the time, without log-probs."""
    return [
        (
            *(group.group_id, group.example, group.prompt, group.prompt_text, group.sampling),
            list(group.attempts()),
            [(one.token_ids, one.policy_versions, one.sequence_starts, one.reward_input) for one in group.completions],
            [(one.token_ids, one.verdict and one.verdict.score) for one in group.unselected_candidates],
            [one.group_id for one in group.replacement_chain()],
        )
        for group in groups
    ]


def collect_by_coroutine(run: LockstepRun, num_groups: int = 3) -> list[Group]:
    """Collects groups by `run_group`, as the stream of grpo_async.py does, with dynamic sampling."""
    rollout_components = run.rollout_components

    def make(count: int) -> list[Group]:
        prompts = rollout_components.prompts.next_prompts(count)
        group_rollout = rollout_components.group_rollout
        groups = rollout_components.loop.run_all(
            [group_rollout.run_group(example, number) for number, example in prompts]
        )
        group_rollout.lowest_scores.record_and_lower(groups)
        for group in groups:
            rollout_components.prompts.observe(group.example, group.success_rate)
        return groups

    groups, indices = make(num_groups), list(range(num_groups))
    for _ in range(run.config.policy.filter_attempts):
        indices = [index for index in indices if not run.keep_group(groups[index])]
        if not indices:
            break
        for index, group in zip(indices, make(len(indices)), strict=True):
            group.replaces, groups[index] = groups[index], group
    return groups


def test_the_environment_matches_its_specs(tmp_path: Path) -> None:
    with open_lockstep_run(tmp_path, *TEACHER) as run:
        check_env_specs(make_env(run))
        check_env_specs(make_env(run, num_groups=1), break_when_any_done="both")
    with open_lockstep_run(tmp_path / "oversampled", *OVERSAMPLING) as run:
        check_env_specs(make_env(run))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        TURNS,
        EPISODES,
        WINDOWS,
        TEACHER,
        DYNAMIC_SAMPLING,
        OVERSAMPLING,
        (*DYNAMIC_SAMPLING, *OVERSAMPLING, "policy.filter_range=[0,0.3]"),
    ],
    ids=[
        "one turn",
        "two turns",
        "episodes",
        "several sequences",
        "teacher's prompt",
        "replaced",
        "oversampled",
        "replaced and oversampled",
    ],
)
def test_the_environment_collects_the_groups_of_run_group(settings: tuple[str, ...], tmp_path: Path) -> None:
    """The groups of two iterations are the same.

    The run trains on the first iteration and pushes weights, on which the second one depends. Turns of episodes share
    engine steps as they come, so log-probs differ by rounding, and only the first iteration is compared.
    """
    has_episodes = settings in (TURNS, EPISODES, WINDOWS)
    iterations = 1 if has_episodes else 2
    collected: list[tuple[list[Group], Batch]] = []
    with open_lockstep_run(tmp_path / "coroutine", *settings) as run:
        for _ in range(iterations):
            rollout = Rollout.from_groups(collect_by_coroutine(run))
            batch_without_advantages = rollout.batch.clone()
            run.advantage(rollout)
            collected.append((rollout.groups, batch_without_advantages))
            run.learn(rollout)
            run.push_weights()
    num_replaced = 0
    with open_lockstep_run(tmp_path / "environment", *settings) as run:
        for groups, batch in collected:
            rollout = run.collect()
            assert comparable_groups(rollout.groups) == comparable_groups(groups)
            if has_episodes:
                log_prob = rollout.batch.sample_log_prob
                torch.testing.assert_close(log_prob, batch.sample_log_prob, atol=1e-5, rtol=0)
                rollout.batch.sample_log_prob = batch.sample_log_prob
            assert_same(rollout.batch, batch)
            num_replaced += sum(len(list(group.replacement_chain())) - 1 for group in groups)
            run.advantage(rollout)
            run.learn(rollout)
            run.push_weights()
        assert rollout.batch.policy_version.max() == iterations - 1
        assert (batch.tokens.loss_mask != batch.tokens.response_mask).any() == (settings in (TURNS, EPISODES))
        assert (batch.episode is not None) == (settings == WINDOWS)
        assert (batch.teacher_tokens is not None) == (settings == TEACHER)
        assert (num_replaced > 0) == ("policy.dynamic_batching=true" in settings)


def test_a_group_is_scored_while_others_are_sampled(tmp_path: Path) -> None:
    """The engine completes the second request after the first group is scored."""
    with open_lockstep_run(tmp_path) as run:
        env = make_env(run, num_groups=2)
        env.reset()
        group_rollout, score = env.group_rollout, env.group_rollout.score_completions
        scored_groups: list[bool] = []
        generate = group_rollout.generate

        async def score_and_count(completions: object, examples: object) -> object:
            verdicts = await score(completions, examples)  # type: ignore[arg-type]
            scored_groups.append(True)
            return verdicts

        async def generate_second_request_last(request: object, example: object) -> list[SampledCompletion]:
            completions = await generate(request, example)  # type: ignore[arg-type]
            if request.request_id == env.slots[1].group_id:  # type: ignore[attr-defined]
                while not scored_groups:
                    await yield_to_loop()
            return completions

        group_rollout.score_completions = score_and_count  # type: ignore[assignment]
        group_rollout.generate = generate_second_request_last  # type: ignore[method-assign]
        rollout = collect_rollout(env, EnginePolicy(env))
        assert len(rollout.groups) == 2 and len(scored_groups) == 2


async def yield_to_loop() -> None:
    import asyncio

    await asyncio.sleep(0)


def test_the_script_trains_on_rollouts_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of grpo.py is a step of the environment."""
    steps: list[int] = []
    step = GroupEnv._step
    monkeypatch.setattr(
        GroupEnv, "_step", lambda env, tensordict: steps.append(len(tensordict)) or step(env, tensordict)
    )
    run = build_run(compose_run_config(*SMALL, "train.total_dialog_turns=36"), tmp_path, LockstepRun)
    grpo.train(run)
    run.close("finished")
    assert steps == [12, 12, 12]


def test_the_collector_of_torchrl_collects_the_same(tmp_path: Path) -> None:
    with open_lockstep_run(tmp_path / "script") as run:
        collected = [run.collect().batch for _ in range(3)]
    with open_lockstep_run(tmp_path / "torchrl") as run:
        env = make_env(run)
        frames = Collector(
            env, EnginePolicy(env), frames_per_batch=12, total_frames=36, auto_register_policy_transforms=False
        )
        batches = []
        for frame in frames:
            rollout = env.make_rollout(frame[:, 0])
            batches.append(rollout.batch)
            assert_same(rollout.batch, collate(rollout.groups))
    assert len(batches) == 3
    for batch, expected in zip(batches, collected, strict=True):
        assert_same(batch, expected)


def test_transforms_of_torchrl_wrap_the_environment(tmp_path: Path) -> None:
    with open_lockstep_run(tmp_path) as run:
        env = make_env(run)
        transformed = TransformedEnv(env, RewardScaling(loc=0.0, scale=10.0))
        transformed.append_transform(StepCounter())
        check_env_specs(TransformedEnv(make_env(run), StepCounter()))
        rollout = transformed.rollout(1, EnginePolicy(env))[:, 0]
        scores = torch.tensor([verdict.score for group in env.groups for verdict in group.verdicts])
        assert torch.equal(rollout["next", "reward"][:, 0], 10 * scores) and scores.any()
        assert (rollout["next", "step_count"] == 1).all()
        assert torch.equal(Batch.from_tensors(rollout).next.reward[:, 0], 10 * scores)


def test_any_policy_is_scored_by_its_tokens(tmp_path: Path) -> None:
    """The policy repeats the correct answer of the first group for all groups."""
    with open_lockstep_run(tmp_path) as run:
        env = make_env(run)
        prompts = env.reset()
        tokenizer = run.rollout_components.group_rollout.encoder.tokenizer
        prompt = tokenizer.decode(prompts["tokens", "prompt"][0][prompts["tokens", "prompt_mask"][0]])
        (summands,) = re.findall(r"(\d+)\+(\d+)=", prompt)
        answer = tokenizer.encode(str(sum(map(int, summands))), add_special_tokens=False)
        ids = [*answer, tokenizer.eos_token_id]
        completions = [SampledCompletion(ids, [0.0] * len(ids), [0] * len(ids), "stop")] * 12

        def policy_outputs(prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tensors = completion_tensors(completions, [1.0] * len(prompt))
            return tuple(tensors[key] for key in keys)

        keys = sorted(EnginePolicy(env).out_keys, key=str)
        policy = TensorDictModule(policy_outputs, in_keys=[("tokens", "prompt")], out_keys=keys)
        stepped: TensorDictBase = env.step(policy(prompts))
        assert stepped["next", "reward"].view(3, 4).tolist()[0] == [1.0] * 4
        assert stepped["next", "done"].all() and stepped["next", "terminated"].all()


def test_a_reset_of_some_rows_is_refused(tmp_path: Path) -> None:
    with open_lockstep_run(tmp_path) as run:
        env = make_env(run)
        rows = env.reset()
        rows["_reset"] = torch.zeros(12, 1, dtype=torch.bool)
        rows["_reset"][:4] = True
        with pytest.raises(
            ValueError, match=r"reset of some rows only.*collect with torchgrpo\.rollout\.group_env\.collect_rollout"
        ):
            env.reset(rows)
