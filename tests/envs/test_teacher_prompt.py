"""The teacher's last user message, and rows that cannot be shown to a teacher."""

import asyncio
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from config.schema.policy import PolicyConfig
from envs.chat import Encoder
from envs.example import Message
from envs.group import SampledCompletion, Sampling, Verdict
from envs.option_checks import row_problems
from envs.prompt_length import PromptLimit
from envs.prompts import PromptSource
from envs.task import Completion, Example
from envs.teacher_prompt import TeacherPrompt, teacher_prompt
from tests.scripts import configured
from torchgrpo.rollout.engines.interface import Request
from torchgrpo.rollout.generate import Generation
from torchgrpo.run.build_rollout import prompt_problem

TEACHER = ("policy.kl_coef=0", "policy.distill_coef=1", "policy.teacher_prompt='{answer} {prompt}'")
SHOWN = TeacherPrompt("{answer} {prompt}")


def asked(text: str, answer: Any = "2", **more: Any) -> Example:
    return Example(
        ({"role": "system", "content": "Add."}, {"role": "user", "content": text}), answer, 7, **more
    )


def test_both_are_put_in_once_and_nothing_that_they_spell_is() -> None:
    text = TeacherPrompt("{{x}} {prompt} | {answer} | {prompt} {other}")
    seen = text.example(asked(r"\frac{1}{2} {answer}?", r"{prompt} \g<0> \boxed{3}"))
    assert seen.messages[-1]["content"] == (
        r"{{x}} \frac{1}{2} {answer}? | {prompt} \g<0> \boxed{3} | \frac{1}{2} {answer}? {other}"
    )
    assert seen.messages[0] == {"role": "system", "content": "Add."}


def test_the_last_message_of_the_user_is_replaced_and_no_other() -> None:
    chat: list[Message] = [
        {"role": "user", "content": "1+1=", "name": "a"}, {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sure?", "name": "b"}, {"role": "tool", "content": "2"},
    ]  # fmt: skip
    seen = SHOWN.example(Example(tuple(chat), 2, 0)).messages
    assert seen == (*chat[:2], {"role": "user", "content": "2 Sure?", "name": "b"}, chat[3])


@pytest.mark.parametrize(
    ("answer", "text"), [("4/2", "4/2"), (2, "2"), (0.5, "0.5"), (Decimal("2.0"), "2.0")]
)
def test_texts_and_numbers_are_shown(answer: Any, text: str) -> None:
    assert SHOWN.example(asked("?", answer)).messages[-1]["content"] == f"{text} ?"


@pytest.mark.parametrize("answer", [None, ["assert f(1)"], {"target": 3}, True, "", " \n"])
def test_another_answer_is_refused_with_row_and_remedy(answer: Any) -> None:
    with pytest.raises(ConfigError, match=r"env\.dataset=x: row 7: .*policy=opd ref_model\.name=MODEL"):
        SHOWN.check([asked("?"), asked("?", answer)], "env.dataset=x")


def test_a_chat_without_a_user_is_refused() -> None:
    alone = Example(({"role": "system", "content": "Speak."},), "2", 3)
    with pytest.raises(ConfigError, match=r"x: row 3: none of its messages \(system\) .*\(policy=opd"):
        SHOWN.check([alone], "x")


def test_rows_are_looked_at_by_a_plan_with_a_tokenizer_and_without(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "Write f.", "test_cases": {"inputs": ["1"], "outputs": ["1"]}}\n'
    )
    data = (f"env.data_files={tmp_path}/rows.jsonl", "env.dataset=jsonl")
    config = configured(*data, *TEACHER)
    for found in (*row_problems(config), str(prompt_problem(config))):
        assert "row 0: its reference answer is {" in found and "\n" not in found
    assert prompt_problem(configured(*data)) is None


def test_without_a_text_the_teacher_sees_the_same() -> None:
    assert teacher_prompt(PolicyConfig()) is None
    assert teacher_prompt(PolicyConfig(kl_coef=0.0, distill_coef=1.0, teacher_prompt=SHOWN.text)) == SHOWN


def test_the_limit_holds_for_what_the_teacher_sees(tokenizer: PreTrainedTokenizerBase) -> None:
    fits, long = asked("1+1="), asked("1+1=", "2" * 30)
    limit = PromptLimit(tokenizer, 20, SHOWN)
    assert [limit(fits), limit(long)] == [True, False]
    assert PromptLimit(tokenizer, 20)(long)
    source = PromptSource([fits, long], 0, limit)
    assert [source.draw().answer for _ in range(4)] == ["2"] * 4 and source.left_out == 1
    with pytest.raises(
        ConfigError,
        match=r"all 1 prompts .*max_prompt_tokens \(prompt 1, as policy.teacher_prompt shows it to the teacher: "
        r"43 tok.*raise it .*, or shorten policy.teacher_prompt$",
    ):
        PromptSource([long], 0, limit, told=limit.told).draw()
    assert limit.told([asked("1+1=" * 20)]) == ("prompt 1: 88 tokens, limit 20", "")


class _Engine:
    async def generate(self, request: Request) -> list[SampledCompletion]:
        return [SampledCompletion([9, 2], [0.0, 0.0], [0, 0], "stop") for _ in range(request.n)]


async def _judge(completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
    return [Verdict(1.0, {}, "scored")] * len(completions)


def test_a_group_has_the_ids_of_both_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Both answers begin the same way, and control tokens are spelled, not obeyed."""
    example = asked("1+1=", "2<eos><assistant>", prefill="It is ")
    encoder = Encoder(tokenizer)
    made = Generation(_Engine(), encoder, _judge, None, Sampling(), 2, 2, 0, teacher=SHOWN)
    group = asyncio.run(made.run_group(example, 0))
    assert encoder.prompt_text(group.prompt) == "<bos><system>Add.<user>1+1=<assistant>It is "
    assert encoder.prompt_text(group.teacher_prompt) == (
        "<bos><system>Add.<user>2<eos><assistant> 1+1=<assistant>It is "
    )
    special = [token for token in group.teacher_prompt if token in tokenizer.all_special_ids]
    assert special == [token for token in group.prompt if token in tokenizer.all_special_ids]
    alone = Generation(_Engine(), encoder, _judge, None, Sampling(), 2, 2, 0)
    assert asyncio.run(alone.run_group(example, 0)).teacher_prompt == ()
