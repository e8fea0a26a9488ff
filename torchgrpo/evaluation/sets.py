"""The sets of an evaluation, `eval.sets`: distinct prompts, the same in every run."""

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.evaluation import EvalSetConfig
from envs.duplicates import distinct_examples
from envs.example import SYSTEM_ROLES
from envs.option_checks import check_any_rows
from envs.prompt_checks import check_prompts
from envs.prompt_length import PromptLimit
from envs.task import Example, Task, make_task
from envs.turns import with_instructions

log = logging.getLogger("grpo")


@dataclass(frozen=True)
class Problems:
    """examples: what is evaluated. repeated: rows with a prompt that was there before. too_long: prompts over
    the limit. Neither is evaluated."""

    examples: list[Example]
    repeated: int
    too_long: int


def choose_problems(
    examples: Sequence[Example], limit: int | None, fits: Callable[[Example], bool]
) -> Problems:
    """Choose at most `limit` problems of a set, every prompt once, in the data's order; always the same choice."""
    order = list(range(len(examples)))
    if limit is not None:
        random.Random(0).shuffle(order)
    seen: set[str] = set()
    chosen: list[int] = []
    repeated = too_long = 0
    for index in order:
        if len(chosen) == limit:
            break
        example = examples[index]
        messages = [message | {"content": message["content"].strip()} for message in example.messages]
        prompt = json.dumps([messages, example.tools, example.prefill], sort_keys=True, default=str)
        if prompt in seen:
            repeated += 1
        elif not fits(example):
            too_long += 1
        else:
            seen.add(prompt)
            chosen.append(index)
    return Problems([examples[index] for index in sorted(chosen)], repeated, too_long)


@dataclass(frozen=True)
class EvalSet:
    """One of `eval.sets`, with its prompts."""

    name: str
    settings: EvalSetConfig
    env: EnvConfig
    task: Task
    problems: Problems


def load_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, trained: Sequence[Example] = ()
) -> list[EvalSet]:
    """The sets of `eval.sets`; a warning where prompts of one are among `trained`, the examples of training.

    Raises:
        ConfigError: data cannot be read, or a set has no prompt that fits; the message names the set.
    """
    sets, limit = [], PromptLimit(tokenizer, config.env.max_prompt_tokens)
    asked = {_asked(example) for example in trained} if config.eval.sets else set()
    for name, settings in config.eval.sets.items():
        place = f"eval.sets.{name}"
        env = settings.env(place, config.env)
        try:
            task = make_task(env)
            examples = with_instructions(distinct_examples(task, env.split), env)
            check_prompts(tokenizer, examples, place)
        except ConfigError as error:  # it speaks of `env`, which is that of this set
            raise ConfigError(f"{place}: {error}") from error
        check_any_rows(place, examples)
        problems = choose_problems(examples, settings.limit, limit)
        if not problems.examples:
            length, helps = limit.told(examples)
            raise ConfigError(
                f"{place}: all {problems.too_long} prompts are longer than env.max_prompt_tokens={limit.limit} "
                f"({length}); raise it{helps}"
            )
        shared = sum(_asked(example) in asked for example in problems.examples)
        if shared and (env.dataset, env.split) != (config.env.dataset, config.env.split):
            log.warning(
                "%s: %d of its %d prompts are trained on, so its scores are not those of held-out prompts; set other "
                "data_files, or env.holdout", place, shared, len(problems.examples),
            )  # fmt: skip
        sets.append(EvalSet(name, settings, env, task, problems))
    return sets


def _asked(example: Example) -> tuple[str, ...]:
    """Texts of a prompt but system prompts; white space counts for nothing."""
    messages = [message for message in example.messages if message["role"] not in SYSTEM_ROLES]
    return tuple(" ".join(message["content"].split()) for message in messages)
