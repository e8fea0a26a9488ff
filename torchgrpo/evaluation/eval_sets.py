"""Loads tasks and distinct problems of `eval.sets`, and warns of prompts shared with training."""

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
from envs.environments.episode_environments import EpisodeEnvironments, with_tools
from envs.example import SYSTEM_ROLES
from envs.option_checks import check_any_rows
from envs.prompt_checks import check_prompts
from envs.prompt_length import PromptLimit
from envs.task import Example, Task, make_task

log = logging.getLogger("grpo")


@dataclass(frozen=True)
class SelectedProblems:
    """Problems of a set, and the numbers of rows that were left out.

    examples: the problems. num_duplicates: rows with the prompt of an earlier row. num_too_long: prompts over the
    length limit.
    """

    examples: list[Example]
    num_duplicates: int
    num_too_long: int


def select_problems(
    examples: Sequence[Example], limit: int | None, fits: Callable[[Example], bool]
) -> SelectedProblems:
    """Selects at most `limit` distinct problems of a set, in the data's order.

    The selection is random with a fixed seed, so the same in every run. fits: whether an example is short enough.
    """
    order = list(range(len(examples)))
    if limit is not None:
        random.Random(0).shuffle(order)
    prompts: set[str] = set()
    chosen: list[int] = []
    num_duplicates = num_too_long = 0
    for index in order:
        if len(chosen) == limit:
            break
        example = examples[index]
        messages = [message | {"content": message["content"].strip()} for message in example.messages]
        prompt = json.dumps([messages, example.tools, example.prefill, example.problem_id], sort_keys=True, default=str)
        if prompt in prompts:
            num_duplicates += 1
        elif not fits(example):
            num_too_long += 1
        else:
            prompts.add(prompt)
            chosen.append(index)
    return SelectedProblems([examples[index] for index in sorted(chosen)], num_duplicates, num_too_long)


@dataclass(frozen=True)
class EvalSet:
    """Evaluation set: one entry of `eval.sets`, with its task and problems."""

    name: str
    settings: EvalSetConfig
    env: EnvConfig
    task: Task
    problems: SelectedProblems


def load_eval_sets(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    environments: EpisodeEnvironments | None,
    train_examples: Sequence[Example] = (),
) -> list[EvalSet]:
    """Loads the sets of `eval.sets`, and warns where a set shares prompts with training.

    environments: of the episodes, whose tools the prompts show. train_examples: the examples of training.

    Raises:
        ConfigError: data cannot be read, or a set has no prompt that fits; the message names the set.
    """
    sets, limit = [], PromptLimit(tokenizer, config.env.max_prompt_tokens)
    trained_prompts = {_prompt_texts(example) for example in train_examples} if config.eval.sets else set()
    for name, settings in config.eval.sets.items():
        key = f"eval.sets.{name}"
        env = settings.env(key, config.env)
        try:
            task = make_task(env)
            examples = with_tools(distinct_examples(task, env.split), env, environments)
            check_prompts(tokenizer, examples, key)
        except ConfigError as error:  # its message names keys of `env`, which are here those of the set
            raise ConfigError(f"{key}: {error}") from error
        check_any_rows(key, examples)
        problems = select_problems(examples, settings.limit, limit)
        if not problems.examples:
            length, helps = limit.describe_length(examples)
            raise ConfigError(
                f"{key}: all {problems.num_too_long} prompts are longer than "
                f"env.max_prompt_tokens={limit.limit} ({length}); raise env.max_prompt_tokens{helps}"
            )
        shared = sum(_prompt_texts(example) in trained_prompts for example in problems.examples)
        if shared and (env.dataset, env.split) != (config.env.dataset, config.env.split):
            log.warning(
                "%s: %d of the %d prompts are trained on, so the scores are not those of held-out prompts; "
                "set other data_files, or env.holdout", key, shared, len(problems.examples),
            )  # fmt: skip
        sets.append(EvalSet(name, settings, env, task, problems))
    return sets


def _prompt_texts(example: Example) -> tuple[str, ...]:
    """Returns the problem's id and the texts without system prompts, with white space normalised."""
    messages = [message for message in example.messages if message["role"] not in SYSTEM_ROLES]
    return (example.problem_id, *(" ".join(message["content"].split()) for message in messages))
