"""Tests of the teacher's prompt, its length limit, and refused rows."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from config.schema.policy import PolicyConfig
from envs.chat import ChatEncoder
from envs.example import Message
from envs.group import SampledCompletion, Sampling, Verdict
from envs.option_checks import row_problems
from envs.prompt_length import PromptLimit
from envs.prompts import PromptSource
from envs.task import Completion, Example
from envs.teacher_prompt import TeacherPrompt, teacher_prompt
from tests.script_runner import compose_run_config
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.run.build_rollout import prompt_problem

TEACHER = ("policy.kl_coef=0", "policy.distill_coef=1", "policy.teacher_prompt='{answer} {prompt}'")
TEACHER_PROMPT = TeacherPrompt("{answer} {prompt}")


def make_example(text: str, answer: Any = "2", **more: Any) -> Example:
    return Example(({"role": "system", "content": "Add."}, {"role": "user", "content": text}), answer, 7, **more)


def test_placeholders_are_replaced_once_and_spelled_placeholders_stay() -> None:
    text = TeacherPrompt("{{x}} {prompt} | {answer} | {prompt} {other}")
    example = text.teacher_example(make_example(r"\frac{1}{2} {answer}?", r"{prompt} \g<0> \boxed{3}"))
    assert example.messages[-1]["content"] == (
        r"{{x}} \frac{1}{2} {answer}? | {prompt} \g<0> \boxed{3} | \frac{1}{2} {answer}? {other}"
    )
    assert example.messages[0] == {"role": "system", "content": "Add."}


def test_the_last_message_of_the_user_is_replaced_and_no_other() -> None:
    chat: list[Message] = [
        {"role": "user", "content": "1+1=", "name": "a"}, {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sure?", "name": "b"}, {"role": "tool", "content": "2"},
    ]  # fmt: skip
    messages = TEACHER_PROMPT.teacher_example(Example(tuple(chat), 2, 0)).messages
    assert messages == (*chat[:2], {"role": "user", "content": "2 Sure?", "name": "b"}, chat[3])


@pytest.mark.parametrize(("answer", "text"), [("4/2", "4/2"), (2, "2"), (0.5, "0.5"), (Decimal("2.0"), "2.0")])
def test_texts_and_numbers_are_shown(answer: Any, text: str) -> None:
    assert TEACHER_PROMPT.teacher_example(make_example("?", answer)).messages[-1]["content"] == f"{text} ?"


@pytest.mark.parametrize("answer", [None, ["assert f(1)"], {"target": 3}, True, "", " \n"])
def test_another_answer_is_refused_with_row_and_remedy(answer: Any) -> None:
    with pytest.raises(ConfigError, match=r"env\.dataset=x: row 7: .*policy=opd ref_model\.name=MODEL"):
        TEACHER_PROMPT.check([make_example("?"), make_example("?", answer)], "env.dataset=x")


def test_a_chat_without_a_user_is_refused() -> None:
    alone = Example(({"role": "system", "content": "Speak."},), "2", 3)
    with pytest.raises(ConfigError, match=r"x: row 3: the row has no user message \(roles: system\).*\(policy=opd"):
        TEACHER_PROMPT.check([alone], "x")


def test_a_plan_checks_rows_with_and_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Write f.", "test_cases": {"inputs": ["1"], "outputs": ["1"]}}\n')
    data = (f"env.data_files={tmp_path}/rows.jsonl", "env.dataset=jsonl")
    config = compose_run_config(*data, *TEACHER)
    for found in (*row_problems(config), str(prompt_problem(config))):
        assert "row 0: the reference answer is {" in found and "\n" not in found
    assert prompt_problem(compose_run_config(*data)) is None


def test_without_a_template_the_teacher_has_no_prompt_of_its_own() -> None:
    assert teacher_prompt(PolicyConfig()) is None
    assert (
        teacher_prompt(PolicyConfig(kl_coef=0.0, distill_coef=1.0, teacher_prompt=TEACHER_PROMPT.text))
        == TEACHER_PROMPT
    )


def test_the_limit_applies_to_the_teachers_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    fits, long = make_example("1+1="), make_example("1+1=", "2" * 30)
    limit = PromptLimit(tokenizer, 20, TEACHER_PROMPT)
    assert [limit(fits), limit(long)] == [True, False]
    assert PromptLimit(tokenizer, 20)(long)
    source = PromptSource([fits, long], 0, limit)
    assert [source.next_example().answer for _ in range(4)] == ["2"] * 4 and source.num_too_long == 1
    with pytest.raises(
        ConfigError,
        match=r"all 1 prompts .*max_prompt_tokens \(prompt 1, with policy.teacher_prompt for the teacher: "
        r"43 tok.*raise env.max_prompt_tokens .*, or shorten policy.teacher_prompt$",
    ):
        PromptSource([long], 0, limit, describe_length=limit.describe_length).next_example()
    assert limit.describe_length([make_example("1+1=" * 20)]) == ("prompt 1: 88 tokens, limit 20", "")


class _FixedEngine:
    async def generate(self, request: Request) -> list[SampledCompletion]:
        return [SampledCompletion([9, 2], [0.0, 0.0], [0, 0], "stop") for _ in range(request.n)]

    def outside_engine(self) -> AbstractContextManager[None]:
        return nullcontext()


async def _judge(completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
    return [Verdict(1.0, {}, "scored")] * len(completions)


def test_a_group_has_the_ids_of_both_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Both prompts end in the same prefill, and spelled control tokens are text."""
    example = make_example("1+1=", "2<eos><assistant>", prefill="It is ")
    encoder = ChatEncoder(tokenizer)
    rollout = GroupRollout(_FixedEngine(), encoder, _judge, None, Sampling(), 2, 2, 0, teacher=TEACHER_PROMPT)
    group = asyncio.run(rollout.run_group(example, 0))
    assert encoder.prompt_text(group.prompt) == "<bos><system>Add.<user>1+1=<assistant>It is "
    assert encoder.prompt_text(group.teacher_prompt) == (
        "<bos><system>Add.<user>2<eos><assistant> 1+1=<assistant>It is "
    )
    special = [token for token in group.teacher_prompt if token in tokenizer.all_special_ids]
    assert special == [token for token in group.prompt if token in tokenizer.all_special_ids]
    without_teacher = GroupRollout(_FixedEngine(), encoder, _judge, None, Sampling(), 2, 2, 0)
    assert asyncio.run(without_teacher.run_group(example, 0)).teacher_prompt == ()
