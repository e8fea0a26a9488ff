"""The TorchRL environment: TorchRL's own check, transforms and collector, and grpo.py's rollouts, bit for bit."""

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
from tests.generating import assert_same
from tests.scripts import configured
from torchgrpo.batches.batch import Batch, collate, completion_tensors
from torchgrpo.batches.rollout import Rollout
from torchgrpo.rollout.env import EnginePolicy, GroupEnv, collect
from torchgrpo.run.build import build
from torchgrpo.run.lockstep import Lockstep

SMALL = ("env.num_envs=3", "env.repeats=4", "train.optim_batch_size=12")
TURNS = ("env.max_steps=2", "env.reasoning=true", "env.reasoning_prompt='?'", "inference_model.max_tokens=16")
TEACHER = ("policy.kl_coef=0", "policy.distill_coef=1", "policy.teacher_prompt='{answer} {prompt}'")
REPLACED = ("policy.filter_range=[0,1]", "policy.dynamic_batching=true", "policy.filter_attempts=3")
OVERSAMPLED = ("env.oversample=8",)


@contextmanager
def lockstep(run_dir: Path, *overrides: str) -> Iterator[Lockstep]:
    """The run of grpo.py, its engine on the learner's weights."""
    run_dir.mkdir(exist_ok=True)
    run = build(configured(*SMALL, *overrides), run_dir, Lockstep)
    try:
        run.push_weights()
        yield run
    finally:
        run.close("finished")


def environment(run: Lockstep, num_groups: int = 3) -> GroupEnv:
    collector = run.collector
    return GroupEnv(collector.loop, collector.generation, collector.prompts, num_groups)


def records(groups: list[Group]) -> list[object]:
    """Groups without their seconds."""
    return [
        (
            *(group.group_id, group.example, group.prompt, group.prompt_text, group.sampling),
            list(group.attempts()),
            [(one.token_ids, one.log_probs, one.policy_versions, one.shown) for one in group.completions],
            [(one.token_ids, one.verdict and one.verdict.score) for one in group.left_out],
            [one.group_id for one in group.chain()],
        )
        for group in groups
    ]


def by_coroutine(run: Lockstep, num_groups: int = 3) -> list[Group]:
    """Groups as the stream of grpo_async.py makes them, `run_group` for each, with dynamic sampling in rounds."""
    collector = run.collector

    def make(count: int) -> list[Group]:
        begun = collector.prompts.begin(count)
        generation = collector.generation
        groups = collector.loop.run_all([generation.run_group(example, number) for number, example in begun])
        generation.lowest.settle(groups)
        for group in groups:
            collector.prompts.observe(group.example, group.success_rate)
        return groups

    groups, places = make(num_groups), list(range(num_groups))
    for _ in range(run.config.policy.filter_attempts):
        places = [place for place in places if not run.keep_group(groups[place])]
        if not places:
            break
        for place, group in zip(places, make(len(places)), strict=True):
            group.in_place_of, groups[place] = groups[place], group
    return groups


def test_the_specs_are_what_the_environment_does(tmp_path: Path) -> None:
    with lockstep(tmp_path, *TEACHER) as run:
        check_env_specs(environment(run))
        check_env_specs(environment(run, num_groups=1), break_when_any_done="both")
    with lockstep(tmp_path / "oversampled", *OVERSAMPLED) as run:
        check_env_specs(environment(run))


@pytest.mark.parametrize(
    "settings",
    [(), TURNS, TEACHER, REPLACED, OVERSAMPLED, (*REPLACED, *OVERSAMPLED, "policy.filter_range=[0,0.3]")],
    ids=["one turn", "two turns", "teacher's prompt", "replaced", "oversampled", "replaced and oversampled"],
)
def test_the_environment_makes_what_run_group_makes(settings: tuple[str, ...], tmp_path: Path) -> None:
    """Two iterations, each trained on and pushed, so that the second also tells of the first."""
    made: list[tuple[list[Group], Batch]] = []
    with lockstep(tmp_path / "coroutine", *settings) as run:
        for _ in range(2):
            rollout = Rollout.of(by_coroutine(run))
            uncredited = rollout.batch.clone()
            run.advantage(rollout)
            made.append((rollout.groups, uncredited))
            run.learn(rollout)
            run.push_weights()
    replaced = 0
    with lockstep(tmp_path / "environment", *settings) as run:
        for groups, batch in made:
            rollout = run.collect()
            assert_same(rollout.batch, batch)
            assert records(rollout.groups) == records(groups)
            replaced += sum(len(list(group.chain())) - 1 for group in groups)
            run.advantage(rollout)
            run.learn(rollout)
            run.push_weights()
        assert rollout.batch.policy_version.max() == 1
        assert (batch.tokens.loss_mask != batch.tokens.response_mask).any() == (settings == TURNS)
        assert (batch.teacher_tokens is not None) == (settings == TEACHER)
        assert (replaced > 0) == ("policy.dynamic_batching=true" in settings)


def test_a_group_is_judged_while_others_are_sampled(tmp_path: Path) -> None:
    """The engine answers the second request when the first group is judged."""
    with lockstep(tmp_path) as run:
        env = environment(run, num_groups=2)
        env.reset()
        generation, judge = env.generation, env.generation.judge
        first_judged: list[bool] = []
        sample = generation.generate

        async def judged(completions: object, examples: object) -> object:
            verdicts = await judge(completions, examples)  # type: ignore[arg-type]
            first_judged.append(True)
            return verdicts

        async def second_waits(request: object) -> list[SampledCompletion]:
            completions = await sample(request)  # type: ignore[arg-type]
            if request.request_id == env.slots[1].group_id:  # type: ignore[attr-defined]
                while not first_judged:
                    await run_a_turn()
            return completions

        generation.judge = judged  # type: ignore[assignment]
        generation.generate = second_waits  # type: ignore[method-assign]
        rollout = collect(env, EnginePolicy(env))
        assert len(rollout.groups) == 2 and len(first_judged) == 2


async def run_a_turn() -> None:
    import asyncio

    await asyncio.sleep(0)


def test_the_script_trains_on_rollouts_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on a second path beside it: every step of grpo.py is one of the environment."""
    steps: list[int] = []
    step = GroupEnv._step
    monkeypatch.setattr(GroupEnv, "_step", lambda env, given: steps.append(len(given)) or step(env, given))
    run = build(configured(*SMALL, "train.total_dialog_turns=36"), tmp_path, Lockstep)
    grpo.train(run)
    run.close("finished")
    assert steps == [12, 12, 12]


def test_the_collector_of_torchrl_collects_the_same(tmp_path: Path) -> None:
    with lockstep(tmp_path / "script") as run:
        collected = [run.collect().batch for _ in range(3)]
    with lockstep(tmp_path / "torchrl") as run:
        env = environment(run)
        frames = Collector(
            env,
            EnginePolicy(env),
            frames_per_batch=12,
            total_frames=36,
            auto_register_policy_transforms=False,
        )
        batches = []
        for frame in frames:
            rollout = env.rollout_of(frame[:, 0])
            batches.append(rollout.batch)
            assert_same(rollout.batch, collate(rollout.groups))
    assert len(batches) == 3
    for batch, expected in zip(batches, collected, strict=True):
        assert_same(batch, expected)


def test_transforms_of_torchrl_go_around_it(tmp_path: Path) -> None:
    with lockstep(tmp_path) as run:
        env = environment(run)
        around = TransformedEnv(env, RewardScaling(loc=0.0, scale=10.0))
        around.append_transform(StepCounter())
        check_env_specs(TransformedEnv(environment(run), StepCounter()))
        rollout = around.rollout(1, EnginePolicy(env))[:, 0]
        scores = torch.tensor([verdict.score for group in env.groups for verdict in group.verdicts])
        assert torch.equal(rollout["next", "reward"][:, 0], 10 * scores) and scores.any()
        assert (rollout["next", "step_count"] == 1).all()
        assert torch.equal(Batch.of(rollout).next.reward[:, 0], 10 * scores)


def test_any_policy_is_judged_by_the_tokens_that_it_writes(tmp_path: Path) -> None:
    """One that knows the answers to the first group, and repeats the first answer for the others."""
    with lockstep(tmp_path) as run:
        env = environment(run)
        prompts = env.reset()
        tokenizer = run.collector.generation.encoder.tokenizer
        prompt = tokenizer.decode(prompts["tokens", "prompt"][0][prompts["tokens", "prompt_mask"][0]])
        (summands,) = re.findall(r"(\d+)\+(\d+)=", prompt)
        answer = tokenizer.encode(str(sum(map(int, summands))), add_special_tokens=False)
        ids = [*answer, tokenizer.eos_token_id]
        completions = [SampledCompletion(ids, [0.0] * len(ids), [0] * len(ids), "stop")] * 12

        def knows(prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
            written = completion_tensors(completions, [1.0] * len(prompt))
            return tuple(written[key] for key in keys)

        keys = sorted(EnginePolicy(env).out_keys, key=str)
        policy = TensorDictModule(knows, in_keys=[("tokens", "prompt")], out_keys=keys)
        stepped: TensorDictBase = env.step(policy(prompts))
        assert stepped["next", "reward"].view(3, 4).tolist()[0] == [1.0] * 4
        assert stepped["next", "done"].all() and stepped["next", "terminated"].all()


def test_a_part_of_the_rows_cannot_be_reset(tmp_path: Path) -> None:
    with lockstep(tmp_path) as run:
        env = environment(run)
        rows = env.reset()
        rows["_reset"] = torch.zeros(12, 1, dtype=torch.bool)
        rows["_reset"][:4] = True
        with pytest.raises(
            ValueError, match=r"a part of the rows .*collect with torchgrpo\.rollout\.env\.collect"
        ):
            env.reset(rows)
