"""Adapts user reward functions, with arguments by parameter name and results converted to `Reward`.

    completion, example, env, step, total_steps, COLUMN      native       of one completion
    data_source, solution_str, ground_truth, extra_info      verl's       of one completion
    prompts, completions, completion_ids, COLUMN             TRL's        in lists of one
    queries, prompts, labels                                 OpenRLHF's   in lists of one

A COLUMN is a column of the row; `answer` is the reference answer if the row has no such column. This module does not
import torch.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, CompletionInRun, Example, Reward, as_completion_in_run

ACCEPTED_FORMS = (
    "accepted forms are (completion, example), (completion, example, env), verl's (data_source, "
    "solution_str, ground_truth, extra_info), TRL's (prompts, completions, **columns) and OpenRLHF's "
    "(queries, prompts, labels): docs/rewards.md"
)
NATIVE_NAMES = ("completion", "example", "env")
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
SINGLE_NAMES = (*NATIVE_NAMES, "solution_str")
"""Parameter names of functions of one completion."""
LIST_NAMES = ("prompts", "completions", "completion_ids", "queries", "labels")
"""Parameter names of functions of lists."""
PROGRESS_NAMES = ("step", "global_step", "total_steps", "trainer_state")
"""Parameter names of the training progress, which is never a list."""
BUILT_IN_NAMES = {
    False: {*SINGLE_NAMES, *PROGRESS_NAMES, "answer", "ground_truth", "extra_info"},
    True: {*LIST_NAMES, *TRL_NAMES, *PROGRESS_NAMES, "answer", "ground_truth", "extra_info"},
}
"""Parameter names with a value for every row, by whether the function takes lists."""
RUN_NAMES = (*PROGRESS_NAMES, "completion_ids")
"""Parameter names of the fields that only `CompletionInRun` has."""
NON_COLUMN_NAMES = ("prompt", "completion", "completion_ids")
"""Columns that TRL excludes from `**columns`."""
RewardFunction = Callable[[Completion, Example, EnvConfig], Reward]


class RewardNotApplicable(Exception):
    """Raised if a reward returns None because it does not apply to a row."""


@dataclass(frozen=True)
class TrainerState:
    """Subset of TRL's `trainer_state`: optimizer steps done, and of the whole run."""

    global_step: int
    max_steps: int


@dataclass(frozen=True)
class RewardSignature:
    """Parameters of a reward function, with the name of the value for each.

    setting: config key and value that name the function, for messages.
    positional_names: value names of positional-only parameters, in order.
    keyword_names: value names of the other parameters, by parameter.
    optional_parameters: parameters with a default. bound_parameters: parameters bound by functools.partial.
    takes_lists: the function takes lists of completions. takes_kwargs: the function takes `**kwargs`.
    """

    setting: str
    positional_names: tuple[str, ...]
    keyword_names: Mapping[str, str]
    optional_parameters: frozenset[str]
    bound_parameters: frozenset[str]
    takes_lists: bool
    takes_kwargs: bool

    @property
    def requested_names(self) -> tuple[str, ...]:
        """Value names of all parameters."""
        return (*self.positional_names, *self.keyword_names.values())

    @property
    def columns(self) -> list[str]:
        """Columns that every row must have."""
        required = [value for name, value in self.keyword_names.items() if name not in self.optional_parameters]
        names = (*self.positional_names, *required)
        return [name for name in names if name not in BUILT_IN_NAMES[self.takes_lists]]

    @property
    def reads_progress(self) -> bool:
        """Whether the function reads fields that only `CompletionInRun` has."""
        return (self.takes_lists and self.takes_kwargs) or any(name in RUN_NAMES for name in self.requested_names)

    def check(self, examples: Sequence[Example], dataset: str) -> None:
        """Raises ConfigError for a required column that no row has."""
        missing = [name for name in self.columns if not any(name in each.row_data for each in examples)]
        if missing:
            known = ", ".join({**examples[0].row_data, "answer": None})
            raise ConfigError(
                f"{self.setting}: the function takes {', '.join(missing)}, but the rows of "
                f"env.dataset={dataset} have no such column (columns: {known}); {ACCEPTED_FORMS}"
            )


def read_signature(setting: str, function: Callable[..., Any]) -> RewardSignature:
    """Reads the parameters of a function. Raises ConfigError for unknown forms."""
    try:
        parameters = list(_effective_signature(function).parameters.values())
    except ValueError as error:  # some functions written in C have no signature
        raise ConfigError(f"{setting}: {function!r} has no signature; wrap it in a def; {ACCEPTED_FORMS}") from error
    kinds = {parameter.kind for parameter in parameters}
    has_args, has_kwargs = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    positional, keywords, bound = list[str](), dict[str, str](), _bound_parameters(function)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in bound:
            continue
        required = parameter.default is parameter.empty
        value_name = _requested_name(parameter.name, len(positional) + len(keywords), required)
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            keywords[parameter.name] = value_name
        elif required:
            positional.append(value_name)
    # A local function may be the wrapper of a decorator, which may pass its arguments to any form.
    is_local = "<locals>" in getattr(function, "__qualname__", "")
    if has_args and not (positional or keywords or has_kwargs) and not is_local:
        positional = list(NATIVE_NAMES)
    optional = frozenset(each.name for each in parameters if each.default is not each.empty)
    takes_lists = any(value_name in LIST_NAMES for value_name in (*positional, *keywords.values()))
    names = (setting, tuple(positional), keywords, optional, frozenset(bound))
    signature = RewardSignature(*names, takes_lists, has_kwargs)
    _check_names(signature, f"({', '.join(map(str, parameters))})")
    return signature


def _effective_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a call: of the decorator's wrapper, or of the decorated function.

    A wrapper of `*args, **kwargs` alone has the signature of the decorated function.
    """
    try:
        outer = inspect.signature(function, follow_wrapped=False)
    except ValueError:
        return inspect.signature(function)
    variadic_kinds = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    has_names = any(parameter.kind not in variadic_kinds for parameter in outer.parameters.values())
    return outer if has_names else inspect.signature(function)


def _bound_parameters(function: Any) -> set[str]:
    """Returns the parameters bound by functools.partial, also inside decorators."""
    names: set[str] = set()
    while function is not None:
        if isinstance(function, functools.partial):
            names.update(function.keywords)
            names.update(list(inspect.signature(function.func).parameters)[: len(function.args)])
            function = function.func
        else:
            function = getattr(function, "__wrapped__", None)
    return names


def _requested_name(name: str, position: int, required: bool) -> str:
    """Returns the value name of a parameter.

    A leading `_` marks an unused parameter. `_NAME` has the value NAME if that name is known. Another required `_NAME`
    has the value at its position in (completion, example, env).
    """
    bare = name.lstrip("_")
    if name == bare or bare in BUILT_IN_NAMES[False] | BUILT_IN_NAMES[True]:
        return bare
    return NATIVE_NAMES[position] if required and position < len(NATIVE_NAMES) else name


def _check_names(signature: RewardSignature, parameters: str) -> None:
    """Raises ConfigError for a signature that mixes forms or has no completion."""
    single_names = [name for name in signature.requested_names if name in SINGLE_NAMES]
    if signature.takes_lists and single_names:
        list_name = next(name for name in signature.requested_names if name in LIST_NAMES)
        raise ConfigError(
            f"{signature.setting}: the function takes both {list_name}, a list, and {single_names[0]}, a "
            f"value of one completion; use the parameter names of one form; {ACCEPTED_FORMS}"
        )
    if not signature.requested_names:
        raise ConfigError(
            f"{signature.setting}: {parameters} has no named parameters; name the parameters, or use "
            f"functools.wraps in the decorator; {ACCEPTED_FORMS}"
        )
    if not signature.takes_lists and not {"completion", "solution_str"} & {*single_names}:
        raise ConfigError(
            f"{signature.setting}: {parameters} takes no completion by a known name; rename the parameters; "
            f"{ACCEPTED_FORMS}"
        )


def make_reward_function(signature: RewardSignature, function: Callable[..., Any]) -> RewardFunction:
    """Adapts a user function to the form (completion, example, env) -> Reward."""
    setting = signature.setting

    def call(completion: Completion, example: Example, env: EnvConfig) -> Reward:
        arguments = _CallArguments(signature, as_completion_in_run(completion), example, env, {})
        result = function(*map(arguments.value, signature.positional_names), **arguments.keywords())
        if inspect.isawaitable(result):
            result = asyncio.run(_await_result(result))
        reward, metrics = _parse_result(setting, result, signature.takes_lists), arguments.metrics
        return Reward(reward.score, {**reward.components, **metrics}, reward.outcome) if metrics else reward

    return call


async def _await_result(result: Awaitable[Any]) -> Any:
    return await result


@dataclass(frozen=True)
class _CallArguments:
    """Argument values of one call of a user function.

    metrics: reward components that the function logs by `log_metric`.
    """

    signature: RewardSignature
    completion: CompletionInRun
    example: Example
    env: EnvConfig
    metrics: dict[str, float]

    def keywords(self) -> dict[str, Any]:
        """Returns the keyword arguments of the call."""
        signature, row = self.signature, self.example.row_data
        value_names = {}
        for name, value_name in signature.keyword_names.items():
            required = self._is_known(value_name) or name not in signature.optional_parameters
            if required or (signature.takes_lists and value_name in row):
                value_names[name] = value_name
        if signature.takes_kwargs:
            trl_names = [
                *TRL_NAMES, *(name for name in {**row, "answer": None} if name not in NON_COLUMN_NAMES)
            ]  # fmt: skip
            extra_names = trl_names if signature.takes_lists else list(filter(self._is_known, VERL_NAMES))
            value_names |= {
                name: name
                for name in extra_names
                if name not in {*signature.keyword_names, *signature.bound_parameters}
            }
        return {name: self.value(value_name) for name, value_name in value_names.items()}

    def _is_known(self, name: str) -> bool:
        """Whether every row has a value of this name, or verl passes this name."""
        return name in BUILT_IN_NAMES[self.signature.takes_lists] or (
            name in VERL_NAMES and name in self.example.row_data
        )

    def value(self, name: str) -> Any:
        """Returns the value of a value name; a list of one for functions of lists."""
        step, total = self.completion.step, self.completion.total_steps
        progress = {"step": step, "global_step": step, "total_steps": total}
        if name in PROGRESS_NAMES:
            return TrainerState(step, total) if name == "trainer_state" else progress[name]
        if not self.signature.takes_lists:
            values = {"completion": self.completion, "example": self.example, "env": self.env}
            values |= {"solution_str": self.completion.text}
            return values[name] if name in values else self._column_value(name)
        if name == "log_metric":
            return self._log_metric
        return _ignore_log_extra if name == "log_extra" else [self._list_element(name)]

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def _list_element(self, name: str) -> Any:
        """Returns the value of a name in a list of one completion."""
        row, chosen, requested_names = (
            self.example.row_data,
            self.env.options.get("prompt"),
            self.signature.requested_names,
        )
        columns = ("messages", "prompt") if chosen is None else (chosen,)
        prompt = next((row[column] for column in columns if row.get(column) is not None), None)
        is_chat = isinstance(prompt, list | dict)
        # OpenRLHF's prompts are texts even for chats.
        passes_messages = (
            is_chat
            and "queries" not in requested_names
            and ("labels" not in requested_names or "completions" in requested_names)
        )
        text = self.completion.text
        if name == "completions":
            return [{"role": "assistant", "content": text}] if passes_messages else text
        if name == "prompts":
            return list(self.example.messages) if passes_messages else _prompt_text(self.example, is_chat)
        if name == "queries":
            return _prompt_text(self.example, is_chat) + self.completion.full_text
        return list(self.completion.token_ids) if name == "completion_ids" else self._column_value(name)

    def _column_value(self, name: str) -> Any:
        """Returns the value of a column; "answer", "labels" and "ground_truth" default to the answer."""
        row, answer = self.example.row_data, self.example.answer
        if name == "extra_info":
            return row.get(name) or {}
        if name == "ground_truth" and "answer" in self.env.options:
            return answer
        if name == "ground_truth":
            reward_model = row.get("reward_model")
            verl_fields = reward_model if isinstance(reward_model, Mapping) else {}
            return verl_fields.get(name, row.get(name, answer))
        return row.get(name, answer if name in ("answer", "labels") else None)


def _ignore_log_extra(column: str, values: Any) -> None:
    """Ignores TRL's `log_extra`: the ledger takes the place of TRL's table of completions."""


def _prompt_text(example: Example, is_chat: bool) -> str:
    """Returns the prompt as one text, of a plain prompt without the system prompt."""
    contents = [str(message["content"]) for message in example.messages]
    return "\n".join(contents if is_chat else contents[-1:])


def _parse_result(setting: str, result: Any, takes_lists: bool) -> Reward:
    """Converts the result of a user function to a Reward.

    The result of a function of lists may be a list of one.

    Raises:
        RewardNotApplicable: a function of lists returned None.
        TypeError: the result has another type.
    """
    value = _unwrap_single(result) if takes_lists else result
    if isinstance(value, Reward):
        return value
    if isinstance(value, Mapping) and ("score" in value or "rewards" in value):
        return _parse_mapping(setting, value)
    if takes_lists and value is None:
        raise RewardNotApplicable(f"{setting} returned None: no reward scores this row")
    if _is_number(value):
        return Reward(float(value))
    raise TypeError(
        f'{setting} returned {result!r}; a number or a Reward is needed, or a mapping with "score" or "rewards"'
    )


def _parse_mapping(setting: str, mapping: Mapping[str, Any]) -> Reward:
    """Converts the mapping of a user function to a Reward.

    verl's mapping is {"score", ...}, OpenRLHF's {"rewards", "scores", "extra_logs"}. Other numbers become reward
    components. Raises TypeError if the score is no number.
    """
    values = {name: _unwrap_single(value) for name, value in mapping.items()}
    logs = values.pop("extra_logs", None)
    values |= {name: _unwrap_single(value) for name, value in logs.items()} if isinstance(logs, Mapping) else {}
    score = values.pop("score" if "score" in values else "rewards")
    if not _is_number(score):
        raise TypeError(f"{setting} returned {dict(mapping)!r}, whose score is not a number")
    for other in ("acc", "scores"):
        if other in values:
            values.setdefault("accuracy", values.pop(other))
    return Reward(float(score), {name: float(each) for name, each in values.items() if _is_number(each)})


def _is_number(value: Any) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, str)


def _unwrap_single(value: Any) -> Any:
    """Returns the only element of a list, array or tensor; any other value unchanged."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain[0] if isinstance(plain, list | tuple) and len(plain) == 1 else plain


def declared_min_score(setting: str, function: Any) -> float | None:
    """Returns the `min_score` of a function, callable object or partial, or None.

    Raises:
        ConfigError: `min_score` is not a finite number.
    """
    minimum = getattr(function, "min_score", None)
    if minimum is None and isinstance(function, functools.partial):
        return declared_min_score(setting, function.func)
    if minimum is not None and not (_is_number(minimum) and math.isfinite(minimum)):
        raise ConfigError(
            f"{setting}: min_score is {minimum!r}; set min_score to the lowest score of the reward, a finite number"
        )
    return None if minimum is None else float(minimum)
