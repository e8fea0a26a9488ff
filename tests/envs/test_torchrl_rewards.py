"""TorchRL's reward parsers as rewards: the same numbers as in TorchRL's own chat environment."""

import io
import json
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, Example, Reward
from envs.judging.service import RewardService
from envs.rewards import find_reward, find_rewards
from envs.task import make_task
from tests.scripts import ROOT, configured
from torchgrpo.run.jobs.rewards import run_rewards

DATA = ROOT / "tests" / "fixtures" / "data"
USER = ({"role": "user", "content": "Numbers: 2, 3, 4. Target: 14. Say it in <answer></answer>."},)
TEXTS = [
    "<think>3 * 4 is 12</think><answer>3*4+2</answer>", "<answer> 14.0 </answer> and more",
    "<answer>$1,200</answer>", "<answer>15</answer>", "<think>14</think>", "14", "",
]  # fmt: skip
PARSERS = "tests.envs.torchrl_parsers"


def in_chat_env(parser: str, columns: Mapping[str, str], text: str) -> TensorDictBase:
    """What the parser writes in a step of TorchRL's chat environment, whose data loader gives the columns."""
    from torchrl.data.llm import History
    from torchrl.envs import llm

    row = {"query": USER[0]["content"], **columns}
    loader: DataLoader[dict[str, str]] = DataLoader(
        [row], collate_fn=lambda batch: torch.stack([TensorDict.from_dict(each) for each in batch])
    )
    env = llm.ChatEnv.from_dataloader(
        dataloader=loader, batch_size=(1,), input_mode="history", data_key="query", system_prompt="Be brief."
    ).append_transform(getattr(llm, parser)())
    asked = env.reset()
    said = History.from_chats([[{"role": "assistant", "content": text}]])
    asked["history", "full"] = asked["history", "prompt"].extend(said, inplace=False, dim=-1)
    return env.step(asked)["next"]


def judged(name: str, example: Example, text: str) -> Reward:
    return find_reward(name).function(Completion(text), example, EnvConfig(dataset="x"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("parser", "column", "gold"), [
    ("GSM8KRewardParser", "2 + 12 = 14\n#### 14", "14"),
    ("GSM8KRewardParser", "#### 1,200", "1,200"),
    ("MATHRewardParser", r"So it is $\boxed{14}$.", None),
    ("CountdownRewardParser", "target=14, numbers=2,3,4", {"target": 14, "numbers": [2, 3, 4]}),
])  # fmt: skip
def test_score_and_parts_are_the_environments(parser: str, column: str, gold: object, text: str) -> None:
    wanted = in_chat_env(parser, {"answer": column}, text)
    examples = [Example(USER, "unused", 0, row_data={"answer": column})]
    if gold is not None:  # rows without such a column: the task's own gold
        examples.append(Example(USER, gold, 0))
    for example in examples:
        reward = judged(f"torchrl.envs.llm:{parser}", example, text)
        assert reward.score == wanted["reward"].item()
        assert reward.parts == {
            "accuracy": float(wanted["success"].item()),
            **{name: wanted[name].item() for name in ("reward_answer", "reward_think", "reward_right")},
        }


def test_a_parser_with_arguments_is_named_as_an_object_of_ones_own() -> None:
    from tests.envs.torchrl_parsers import generous

    example = Example(USER, "14", 0)
    assert judged(f"{PARSERS}:generous", example, "<answer>15</answer>").score == 0.5
    assert generous.parent is None  # what judges is a copy


OF_VLLM = "msgspec"
"""A library that vLLM's import loads, and TorchRL's does not."""


def loaded_by_fork_servers() -> set[str]:
    """Folders of the libraries that the processes of reward services below this one have loaded."""
    return {
        Path(library.path).parent.name
        for child in psutil.Process().children()
        if any("envs.judging.fork_server" in word for word in child.cmdline())
        for library in child.memory_maps()
    }


def test_a_parser_judges_in_workers_by_the_columns_of_the_row() -> None:
    reward = "torchrl.envs.llm:GSM8KRewardParser"
    env = EnvConfig(dataset="gsm8k", data_files=str(DATA / "gsm8k.jsonl"), reward=reward, reward_workers=1)
    task = make_task(env)
    with closing(RewardService(task, env)) as service:
        apples, bus = service.score(
            [Completion("<answer>7</answer>"), Completion("<answer>1</answer>")], task.examples("train")[:2]
        )
        loaded = loaded_by_fork_servers() if sys.platform == "linux" else {"tensordict"}
    assert (apples.score, apples.parts["accuracy"], apples.outcome) == (1.0, 1.0, "scored")
    assert (bus.score, bus.parts["accuracy"]) == (pytest.approx(0.1), 0.0)
    assert "tensordict" in loaded and OF_VLLM not in loaded


@pytest.mark.parametrize(("name", "message"), [
    ("torchrl.envs.llm:GSM8KEnv", "no Transform that writes a reward"),
    ("torchrl.envs:RewardSum", r"it writes \['episode_reward'\], and no 'reward'"),
    ("torchrl.envs:RewardScaling", "without arguments failed: TypeError.*env.reward=my_module:graded"),
    ("torchrl.envs.llm:Nothing", "has no 'Nothing'"),
])  # fmt: skip
def test_what_cannot_judge_gives_one_message(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"env.reward={name}: .*{message}"):
        find_reward(name)


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match=r"'reward' not found.*the columns of the row are hint"):
        judged(f"{PARSERS}:scaling", Example(USER, "14", 0, row_data={"hint": "?"}), "14")


def test_nested_scores_are_parts_and_columns_may_be_lists() -> None:
    example = Example(USER, "", 0, row_data={"instruction_id_list": ["no_comma", "json"], "reward": 9})
    assert judged(f"{PARSERS}:TwoScores", example, "x") == Reward(0.25, {"ifeval_score.strict": 0.5})


def test_the_commands_of_the_text_grade_with_every_part_and_name_both_rewards(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    found = re.findall(r"^python grpo\.py --config-name (\w+) (env\.reward=.*|'env\.reward=.*')$", text, re.M)
    grading, training = ((name, word.strip("'")) for name, word in found if "GSM8KRewardParser" in word)
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"row": 0, "completion": "<answer>7</answer>"}\n')
    files = (f"env.data_files={DATA / 'gsm8k.jsonl'}", f"env.samples={samples}")
    out = io.StringIO()
    assert run_rewards(configured(grading[1], *files, name=grading[0]).env, out, io.StringIO()) == 0
    graded = json.loads(out.getvalue())
    parts = {"accuracy": 1.0, "reward_answer": 1.0, "reward_right": 1.0, "reward_think": 0.0}
    assert (graded["score"], graded["parts"]) == (1.0, parts)
    rewards = find_rewards(configured(training[1], name=training[0]).env)
    assert [each.name for each in rewards] == ["exact", "torchrl.envs.llm:GSM8KRewardParser"]
