"""Tests of TorchRL's reward parsers as rewards, compared with TorchRL's chat environment."""

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
from envs.reward_workers.service import RewardService
from envs.rewards import find_reward, find_rewards
from envs.task import make_task
from tests.script_runner import ROOT, compose_run_config
from torchgrpo.run.jobs.rewards import score_completions

DATA = ROOT / "tests" / "fixtures" / "data"
USER = ({"role": "user", "content": "Numbers: 2, 3, 4. Target: 14. Say it in <answer></answer>."},)
TEXTS = [
    "<think>3 * 4 is 12</think><answer>3*4+2</answer>", "<answer> 14.0 </answer> and more",
    "<answer>$1,200</answer>", "<answer>15</answer>", "<think>14</think>", "14", "",
]  # fmt: skip
PARSERS = "tests.envs.torchrl_parsers"


def chat_env_outputs(parser: str, columns: Mapping[str, str], text: str) -> TensorDictBase:
    """Returns a parser's outputs in a step of TorchRL's chat environment."""
    from torchrl.data.llm import History
    from torchrl.envs import llm

    row = {"query": USER[0]["content"], **columns}
    loader: DataLoader[dict[str, str]] = DataLoader(
        [row], collate_fn=lambda batch: torch.stack([TensorDict.from_dict(each) for each in batch])
    )
    env = llm.ChatEnv.from_dataloader(
        dataloader=loader, batch_size=(1,), input_mode="history", data_key="query", system_prompt="Be brief."
    ).append_transform(getattr(llm, parser)())
    state = env.reset()
    answer = History.from_chats([[{"role": "assistant", "content": text}]])
    state["history", "full"] = state["history", "prompt"].extend(answer, inplace=False, dim=-1)
    return env.step(state)["next"]


def score_text(name: str, example: Example, text: str) -> Reward:
    return find_reward(name).function(Completion(text), example, EnvConfig(dataset="x"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("parser", "column", "reference"), [
    ("GSM8KRewardParser", "2 + 12 = 14\n#### 14", "14"),
    ("GSM8KRewardParser", "#### 1,200", "1,200"),
    ("MATHRewardParser", r"So it is $\boxed{14}$.", None),
    ("CountdownRewardParser", "target=14, numbers=2,3,4", {"target": 14, "numbers": [2, 3, 4]}),
])  # fmt: skip
def test_score_and_parts_are_the_environments(parser: str, column: str, reference: object, text: str) -> None:
    expected = chat_env_outputs(parser, {"answer": column}, text)
    examples = [Example(USER, "unused", 0, row_data={"answer": column})]
    if reference is not None:  # rows without such a column: the task's reference answer
        examples.append(Example(USER, reference, 0))
    for example in examples:
        reward = score_text(f"torchrl.envs.llm:{parser}", example, text)
        assert reward.score == expected["reward"].item()
        assert reward.components == {
            "accuracy": float(expected["success"].item()),
            **{name: expected[name].item() for name in ("reward_answer", "reward_think", "reward_right")},
        }


def test_a_parser_with_arguments_is_named_as_a_user_object() -> None:
    from tests.envs.torchrl_parsers import generous

    example = Example(USER, "14", 0)
    assert score_text(f"{PARSERS}:generous", example, "<answer>15</answer>").score == 0.5
    assert generous.parent is None  # the reward uses a copy


VLLM_LIBRARY = "msgspec"
"""Library that is loaded by the import of vLLM, but not of TorchRL."""


def fork_server_libraries() -> set[str]:
    """Returns the folders of libraries loaded by the fork servers below this process."""
    return {
        Path(library.path).parent.name
        for child in psutil.Process().children()
        if any("envs.reward_workers.fork_server" in word for word in child.cmdline())
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
        libraries = fork_server_libraries() if sys.platform == "linux" else {"tensordict"}
    assert (apples.score, apples.components["accuracy"], apples.outcome) == (1.0, 1.0, "scored")
    assert (bus.score, bus.components["accuracy"]) == (pytest.approx(0.1), 0.0)
    assert "tensordict" in libraries and VLLM_LIBRARY not in libraries


@pytest.mark.parametrize(("name", "message"), [
    ("torchrl.envs.llm:GSM8KEnv", "not a Transform that writes a reward"),
    ("torchrl.envs:RewardSum", r"the parser writes \['episode_reward'\], but no 'reward'"),
    ("torchrl.envs:RewardScaling", "without arguments failed: TypeError.*env.reward=my_module:graded"),
    ("torchrl.envs.llm:Nothing", "has no 'Nothing'"),
])  # fmt: skip
def test_an_object_that_is_no_reward_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"env.reward={name}: .*{message}"):
        find_reward(name)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(LookupError, match=r"'reward' not found.*the columns of the row are hint"):
        score_text(f"{PARSERS}:scaling", Example(USER, "14", 0, row_data={"hint": "?"}), "14")


def test_nested_scores_are_components_and_columns_may_be_lists() -> None:
    example = Example(USER, "", 0, row_data={"instruction_id_list": ["no_comma", "json"], "reward": 9})
    assert score_text(f"{PARSERS}:TwoScores", example, "x") == Reward(0.25, {"ifeval_score.strict": 0.5})


def test_the_commands_of_the_docs_score_with_all_components(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    found = re.findall(r"^python grpo\.py --config-name (\w+) (env\.reward=.*|'env\.reward=.*')$", text, re.M)
    grading, training = ((name, word.strip("'")) for name, word in found if "GSM8KRewardParser" in word)
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"row": 0, "completion": "<answer>7</answer>"}\n')
    files = (f"env.data_files={DATA / 'gsm8k.jsonl'}", f"rewards.completions={samples}")
    out = io.StringIO()
    config = compose_run_config(grading[1], *files, name=grading[0])
    assert score_completions(config.env, config.rewards, out, io.StringIO()) == 0
    graded = json.loads(out.getvalue())
    parts = {"accuracy": 1.0, "reward_answer": 1.0, "reward_right": 1.0, "reward_think": 0.0}
    assert (graded["score"], graded["components"]) == (1.0, parts)
    rewards = find_rewards(compose_run_config(training[1], name=training[0]).env)
    assert [each.name for each in rewards] == ["exact", "torchrl.envs.llm:GSM8KRewardParser"]
