"""Signatures of a user's rewards: parameters are given what they name. No torch here.

    completion, example, env, step, total_steps, COLUMN      ours         of one completion
    data_source, solution_str, ground_truth, extra_info      verl's       of one completion
    prompts, completions, completion_ids, COLUMN             TRL's        in lists of one
    queries, prompts, labels                                 OpenRLHF's   in lists of one

A COLUMN is one of the row; `answer` is the gold where the row has none of that name.
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
from envs.example import Completion, CompletionInRun, Example, Reward, in_run

FORMS = (
    "accepted are (completion, example), (completion, example, env), verl's (data_source, solution_str, ground_truth, "
    "extra_info), TRL's (prompts, completions, **columns) and OpenRLHF's (queries, prompts, labels): docs/rewards.md"
)
OURS = ("completion", "example", "env")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
OF_ONE = (*OURS, "solution_str")
"""Names that only functions of one completion have."""
OF_LISTS = ("prompts", "completions", "completion_ids", "queries", "labels")
"""Names that make a function one of lists."""
OF_PROGRESS = ("step", "global_step", "total_steps", "trainer_state")
"""Names of the progress of training, which is no list in any form."""
GIVEN = {
    False: {*OF_ONE, *OF_PROGRESS, "answer", "ground_truth", "extra_info"},
    True: {*OF_LISTS, *TRL, *OF_PROGRESS, "answer", "ground_truth", "extra_info"},
}
"""Names that mean something whatever the row holds, by whether the function is one of lists."""
OF_RUN = (*OF_PROGRESS, "completion_ids")
"""Names of what only `CompletionInRun` has."""
NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL keeps from `**columns`."""
RewardFunction = Callable[[Completion, Example, EnvConfig], Reward]


class NotApplicable(Exception):
    """A reward has returned None: it does not apply to this row."""


@dataclass(frozen=True)
class TrainerState:
    """TRL's `trainer_state`, as far as known: optimizer steps done, and of the run."""

    global_step: int
    max_steps: int


@dataclass(frozen=True)
class Signature:
    """Names of what a function asks for.

    place: the setting that names the function, for messages.
    positional: asked for by position alone, in order. named: the others, by their parameters.
    optional: parameters that have a value of their own. bound: those that functools.partial has given one.
    lists: it takes lists. rest: it takes `**kwargs`.
    """

    place: str
    positional: tuple[str, ...]
    named: Mapping[str, str]
    optional: frozenset[str]
    bound: frozenset[str]
    lists: bool
    rest: bool

    @property
    def asked(self) -> tuple[str, ...]:
        return (*self.positional, *self.named.values())

    @property
    def columns(self) -> list[str]:
        """Columns that every row must have."""
        required = [asked for name, asked in self.named.items() if name not in self.optional]
        return [name for name in (*self.positional, *required) if name not in GIVEN[self.lists]]

    @property
    def reads_progress(self) -> bool:
        """Whether it asks for what only `CompletionInRun` has."""
        return (self.lists and self.rest) or any(name in OF_RUN for name in self.asked)

    def check(self, examples: Sequence[Example], dataset: str) -> None:
        """Raises ConfigError for a column that no row has."""
        missing = [name for name in self.columns if not any(name in each.row_data for each in examples)]
        if missing:
            known = ", ".join({**examples[0].row_data, "answer": None})
            raise ConfigError(
                f"{self.place}: it asks for {', '.join(missing)}, and the rows of env.dataset={dataset} have no such "
                f"column; they have {known}; {FORMS}"
            )


def signature_of(place: str, function: Callable[..., Any]) -> Signature:
    """Reads the parameters of a function. Raises ConfigError where they do not say what it takes."""
    try:
        parameters = list(_own_signature(function).parameters.values())
    except ValueError as error:  # some that are written in C have none
        raise ConfigError(
            f"{place}: {function!r} does not say what it takes; wrap it in a def; {FORMS}"
        ) from error
    kinds = {parameter.kind for parameter in parameters}
    many, rest = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    positional, named, bound = list[str](), dict[str, str](), _bound(function)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in bound:
            continue
        required = parameter.default is parameter.empty
        asked = _asked(parameter.name, len(positional) + len(named), required)
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            named[parameter.name] = asked
        elif required:
            positional.append(asked)
    # Inside another function it is a decorator's, which may pass its arguments on to any form.
    if many and not (positional or named or rest) and "<locals>" not in getattr(function, "__qualname__", ""):
        positional = list(OURS)
    optional = frozenset(each.name for each in parameters if each.default is not each.empty)
    lists = any(asked in OF_LISTS for asked in (*positional, *named.values()))
    found = Signature(place, tuple(positional), named, optional, frozenset(bound), lists, rest)
    _check_names(found, f"({', '.join(map(str, parameters))})")
    return found


def _own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a call: a decorator's own, else those of the decorated function."""
    try:
        outer = inspect.signature(function, follow_wrapped=False)
    except ValueError:
        return inspect.signature(function)
    passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names_some = any(parameter.kind not in passes_on for parameter in outer.parameters.values())
    return outer if names_some else inspect.signature(function)


def _bound(function: Any) -> set[str]:
    """Names of the parameters that functools.partial has given values to, through decorators."""
    names: set[str] = set()
    while function is not None:
        if isinstance(function, functools.partial):
            names.update(function.keywords)
            names.update(list(inspect.signature(function.func).parameters)[: len(function.args)])
            function = function.func
        else:
            function = getattr(function, "__wrapped__", None)
    return names


def _asked(name: str, place: int, required: bool) -> str:
    """The name that a parameter asks for; one that begins with `_` may be unread.

    `_NAME` asks for NAME where that is known, and any other for what stands at its place in our own form.
    """
    bare = name.lstrip("_")
    if name == bare or bare in GIVEN[False] | GIVEN[True]:
        return bare
    return OURS[place] if required and place < len(OURS) else name


def _check_names(signature: Signature, parameters: str) -> None:
    of_one = [name for name in signature.asked if name in OF_ONE]
    if signature.lists and of_one:
        of_lists = next(name for name in signature.asked if name in OF_LISTS)
        raise ConfigError(
            f"{signature.place}: it asks for {of_lists}, a list, and for {of_one[0]}, which is of one completion; take "
            f"the names of one form; {FORMS}"
        )
    if not signature.asked:
        raise ConfigError(
            f"{signature.place}: {parameters} does not say what it takes; name its parameters, or put functools.wraps "
            f"into its decorator; {FORMS}"
        )
    if not signature.lists and not {"completion", "solution_str"} & {*of_one}:
        raise ConfigError(
            f"{signature.place}: {parameters} asks for no completion by a known name; rename its parameters; {FORMS}"
        )


def reward_function(signature: Signature, function: Callable[..., Any]) -> RewardFunction:
    """The function as one of (completion, example, env)."""
    place = signature.place

    def call(completion: Completion, example: Example, env: EnvConfig) -> Reward:
        verification = _Verification(signature, in_run(completion), example, env, {})
        result = function(*map(verification.value, signature.positional), **verification.keywords())
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        reward, logged = _reward(place, result, signature.lists), verification.logged
        return Reward(reward.score, {**reward.parts, **logged}, reward.outcome) if logged else reward

    return call


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


@dataclass(frozen=True)
class _Verification:
    """Values for the names of one call. logged: parts that the function gives to `log_metric`."""

    signature: Signature
    completion: CompletionInRun
    example: Example
    env: EnvConfig
    logged: dict[str, float]

    def keywords(self) -> dict[str, Any]:
        signature, row = self.signature, self.example.row_data
        asked = {}
        for name, what in signature.named.items():
            required = self._is_known(what) or name not in signature.optional
            if required or (signature.lists and what in row):
                asked[name] = what
        if signature.rest:
            of_trl = [*TRL, *(name for name in {**row, "answer": None} if name not in NO_COLUMNS)]
            rest = of_trl if signature.lists else list(filter(self._is_known, VERL))
            asked |= {name: name for name in rest if name not in {*signature.named, *signature.bound}}
        return {name: self.value(what) for name, what in asked.items()}

    def _is_known(self, name: str) -> bool:
        """Whether every row has a value by that name, or verl would give it."""
        return name in GIVEN[self.signature.lists] or (name in VERL and name in self.example.row_data)

    def value(self, name: str) -> Any:
        step, total = self.completion.step, self.completion.total_steps
        progress = {"step": step, "global_step": step, "total_steps": total}
        if name in OF_PROGRESS:
            return TrainerState(step, total) if name == "trainer_state" else progress[name]
        if not self.signature.lists:
            ours = {"completion": self.completion, "example": self.example, "env": self.env}
            ours |= {"solution_str": self.completion.text}
            return ours[name] if name in ours else self._column(name)
        if name == "log_metric":
            return self._log_metric
        return _log_nothing if name == "log_extra" else [self._in_list(name)]

    def _log_metric(self, name: str, value: float) -> None:
        self.logged[name] = value

    def _in_list(self, name: str) -> Any:
        row, chosen, asked = self.example.row_data, self.env.options.get("prompt"), self.signature.asked
        columns = ("messages", "prompt") if chosen is None else (chosen,)
        prompt = next((row[column] for column in columns if row.get(column) is not None), None)
        is_chat = isinstance(prompt, list | dict)  # then the row is conversational
        # OpenRLHF's prompts are texts even there.
        chat = is_chat and "queries" not in asked and ("labels" not in asked or "completions" in asked)
        text = self.completion.text
        if name == "completions":
            return [{"role": "assistant", "content": text}] if chat else text
        if name == "prompts":
            return list(self.example.messages) if chat else _prompt(self.example, is_chat)
        if name == "queries":
            return _prompt(self.example, is_chat) + self.completion.full_text
        return list(self.completion.token_ids) if name == "completion_ids" else self._column(name)

    def _column(self, name: str) -> Any:
        row, answer = self.example.row_data, self.example.answer
        if name == "extra_info":
            return row.get(name) or {}
        if name == "ground_truth" and "answer" in self.env.options:
            return answer
        if name == "ground_truth":
            graded = row.get("reward_model")
            of_verl = graded if isinstance(graded, Mapping) else {}
            return of_verl.get(name, row.get(name, answer))
        return row.get(name, answer if name in ("answer", "labels") else None)


def _log_nothing(column: str, values: Any) -> None:
    """TRL's `log_extra`: its table of completions is the ledger here."""


def _prompt(example: Example, is_chat: bool) -> str:
    """The prompt as one text; of a plain text without the system prompt."""
    contents = [str(message["content"]) for message in example.messages]
    return "\n".join(contents if is_chat else contents[-1:])


def _reward(place: str, result: Any, lists: bool) -> Reward:
    """A reward from what a function returned; of lists also from a list of one.

    Raises:
        NotApplicable: None, of a function of lists.
        TypeError: anything else.
    """
    found = _only(result) if lists else result
    if isinstance(found, Reward):
        return found
    if isinstance(found, Mapping) and ("score" in found or "rewards" in found):
        return _of_mapping(place, found)
    if lists and found is None:
        raise NotApplicable(f"{place} returned None: neither it nor another reward judges this row")
    if _is_number(found):
        return Reward(float(found))
    raise TypeError(
        f'{place} returned {result!r}; a number or a Reward is needed, or a mapping with "score" or "rewards"'
    )


def _of_mapping(place: str, found: Mapping[str, Any]) -> Reward:
    """Reads verl's {"score", ...} or OpenRLHF's {"rewards", "scores", "extra_logs"}: other numbers are parts."""
    values = {name: _only(value) for name, value in found.items()}
    logs = values.pop("extra_logs", None)
    values |= {name: _only(value) for name, value in logs.items()} if isinstance(logs, Mapping) else {}
    score = values.pop("score" if "score" in values else "rewards")
    if not _is_number(score):
        raise TypeError(f"{place} returned {dict(found)!r}, whose score is no number")
    for other in ("acc", "scores"):
        if other in values:
            values.setdefault("accuracy", values.pop(other))
    return Reward(float(score), {name: float(each) for name, each in values.items() if _is_number(each)})


def _is_number(value: Any) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, str)


def _only(value: Any) -> Any:
    """The only element of a list, array or tensor; anything else unchanged."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain[0] if isinstance(plain, list | tuple) and len(plain) == 1 else plain


def declared_minimum(place: str, function: Any) -> float | None:
    """The `min_score` of a function, a callable object or a partial; None without one.

    Raises:
        ConfigError: it is no finite number.
    """
    least = getattr(function, "min_score", None)
    if least is None and isinstance(function, functools.partial):
        return declared_minimum(place, function.func)
    if least is not None and not (_is_number(least) and math.isfinite(least)):
        raise ConfigError(f"{place}: its min_score is {least!r}; set the least score that it gives, a number")
    return None if least is None else float(least)
