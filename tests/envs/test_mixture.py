"""Tests of mixtures and held-out rows: sampling by weight, rewards, settings and errors."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, is_held_out
from envs.prompts import PromptSource
from envs.reward_workers.service import RewardService
from envs.task import Completion, Example, make_task
from tests.group_collection import next_examples
from tests.tiny_models import numbered_examples


def rows(path: Path, count: int) -> str:
    lines = [json.dumps({"prompt": f"question {n % 37} of {count}", "answer": str(n)}) for n in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


def mixture(tmp_path: Path) -> EnvConfig:
    file = rows(tmp_path / "mine.jsonl", 5)
    return EnvConfig(
        dataset="mixture", mixture={"arithmetic": 3, "mine": {"dataset": "jsonl", "data_files": file, "weight": 1}}
    )


def always(example: Example) -> bool:
    return True


def test_a_member_has_the_system_prompt_of_the_mixture_unless_it_has_its_own(tmp_path: Path) -> None:
    env = replace(mixture(tmp_path), system_prompt="Think.")
    env.mixture["own"] = {"dataset": "arithmetic", "system_prompt": "Add."}
    examples = make_task(env).examples("train")
    prompts = {example.source: example.messages[0]["content"] for example in examples}
    assert prompts == {"arithmetic": "Think.", "mine": "Think.", "own": "Add."}


def test_members_are_sampled_by_weight_each_row_once_an_epoch(tmp_path: Path) -> None:
    examples = make_task(mixture(tmp_path)).examples("train")
    samples = next_examples(PromptSource(examples, 0, always), 40)
    for start in range(0, 40, 4):
        counts = Counter(example.source for example in samples[start : start + 4])
        assert counts == {"arithmetic": 3, "mine": 1}
    mine = [example.row for example in samples if example.source == "mine"]
    assert sorted(mine[:5]) == sorted(mine[5:]) == list(range(5))


def test_a_restored_mixture_continues_where_it_was(tmp_path: Path) -> None:
    examples = make_task(mixture(tmp_path)).examples("train")
    original, restored = PromptSource(examples, 1, always), PromptSource(examples, 1, always)
    original.observe(next_examples(original, 9)[0], 0.5)
    restored.load_state_dict(original.state_dict())
    assert next_examples(restored, 30) == next_examples(original, 30)
    with pytest.raises(ConfigError, match=r"env\.mixture: the checkpoint was made with arithmetic, mine"):
        PromptSource(numbered_examples(3), 1, always).load_state_dict(original.state_dict())


def test_every_member_is_scored_by_its_own_reward(tmp_path: Path) -> None:
    env = mixture(tmp_path)
    task = make_task(env)
    samples = next_examples(PromptSource(task.examples("train"), 0, always), 8)
    with closing(RewardService(task, env)) as service:
        right = service.score([Completion(example.answer) for example in samples], samples)
        wrong = service.score([Completion("nothing")] * 8, samples)
    assert [verdict.score for verdict in right] == [1.0] * 8
    assert [verdict.score for verdict in wrong] == [0.0] * 8


def test_one_member_that_needs_a_deadline_gives_it_to_the_mixture(tmp_path: Path) -> None:
    file = rows(tmp_path / "mine.jsonl", 5)
    hostile = {"dataset": "jsonl", "data_files": file, "reward": "tests.envs.hostile_rewards:bomb"}
    members = {"arithmetic": 1, "hostile": hostile}
    env = EnvConfig(dataset="mixture", mixture=members, reward_timeout_s=5.0, reward_workers=1)
    task = make_task(env)
    examples = task.examples("train")
    completions = [Completion(examples[0].answer), Completion("sleep")]
    with closing(RewardService(task, env)) as service:
        verdicts = service.score(completions, [examples[0], examples[-1]])
    assert [verdict.outcome for verdict in verdicts] == ["scored", "invalid"]


@pytest.mark.parametrize(("members", "message"), [
    ({}, r"set env\.mixture"),
    ({"arithmetic": 0}, r"env\.mixture\.arithmetic: weight 0"),
    ({"nothing": 1}, "'nothing': no such task"),
    ({"arithmetic": {"wieght": 2}}, r"env\.mixture\.arithmetic\.wieght"),
    ({"arithmetic": float("inf")}, r"env\.mixture\.arithmetic: weight inf"),
    ({"arithmetic": {"options": 3}}, r"env\.mixture\.arithmetic\.options: .*int"),
    ({"arithmetic": {"holdout": "half"}}, r"env\.mixture\.arithmetic\.holdout: Value 'half'"),
    ({"arithmetic": {"dataset": [1]}}, r"env\.mixture\.arithmetic\.dataset: "),
    ({"a": {"dataset": "mixture"}}, "a mixture cannot be a member of a mixture"),
])  # fmt: skip
def test_bad_mixtures_are_named(members: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(EnvConfig(dataset="mixture", mixture=members))


def test_a_held_out_prompt_is_the_same_in_any_order_of_its_keys() -> None:
    for number in range(20):
        message = {"role": "user", "content": f"{number}+1="}
        one, other = ({"prompt": [each]} for each in (message, dict(reversed(message.items()))))
        assert len({is_held_out(Row(each, "rows.jsonl:1", 0), 0.5) for each in (one, other)}) == 1


def test_held_out_rows_are_disjoint_and_equal_prompts_stay_together(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", 400)
    sides = {
        split: make_task(EnvConfig(dataset="jsonl", data_files=file, holdout=0.25, split=split)).examples(split)
        for split in ("train", "test")
    }
    prompts = {split: {e.messages[-1]["content"] for e in examples} for split, examples in sides.items()}
    assert not prompts["train"] & prompts["test"]
    assert len(prompts["train"] | prompts["test"]) == 37
    assert len(sides["train"]) + len(sides["test"]) == 400
    assert 40 < len(sides["test"]) < 160


def test_each_split_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = {split: rows(tmp_path / f"{split}.jsonl", count) for split, count in (("train", 4), ("test", 2))}
    sizes = {
        split: len(make_task(EnvConfig(dataset="jsonl", data_files=files, split=split)).examples(split))
        for split in files
    }
    assert sizes == {"train": 4, "test": 2}
    with pytest.raises(ConfigError, match=r"no file for env\.split=dev"):
        make_task(EnvConfig(dataset="jsonl", data_files=files, split="dev")).examples("dev")


def test_a_line_separator_inside_a_text_does_not_split_the_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "one\u2028two", "answer": "3"}, ensure_ascii=False) + "\n")
    assert len(make_task(EnvConfig(dataset="jsonl", data_files=str(file))).examples("train")) == 1
