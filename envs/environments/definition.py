"""Finds and checks the class or function of `env.environment`."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from config.schema.env import ENVIRONMENTS, EnvConfig
from config.schema.errors import ConfigError
from envs.environments.calls import CallRunner
from envs.environments.interface import Environment
from envs.environments.method_tools import MethodTools, make_method_checks, tool_names
from envs.environments.tool_environment import ToolEnvironment
from envs.environments.user_environment import (
    ClassEnvironment,
    FunctionEnvironment,
    MethodsEnvironment,
    ScoredEnvironment,
)
from envs.tools.tool_set import ToolChecks
from envs.user_code import is_user_code, load_user_object

ACCEPTED_FORMS = (
    "accepted forms are a class with reset(example) and step(turn), a class whose methods are tools, with reset, and a "
    "function (turns, example): docs/environments.md"
)


@dataclass(frozen=True)
class EnvironmentDefinition:
    """Class or function of `env.environment`, which is checked.

    name: value of `env.environment`. target: class or function. options: its keyword arguments. methods: those that are
    tools, whose results have at most `max_characters` characters.
    """

    name: str
    target: Callable[..., Any]
    options: dict[str, Any]
    methods: ToolChecks
    max_characters: int

    @property
    def make_instance(self) -> Callable[[], Any]:
        """Class or function with its options as arguments."""
        return functools.partial(self.target, **self.options)

    def make(self, runner: CallRunner) -> Environment:
        """Makes the environment of one episode, whose calls `runner` runs."""
        kind = self.target
        if not inspect.isclass(kind):
            return FunctionEnvironment(self.name, self.make_instance, runner)
        if "step" in dir(kind):
            instance = ClassEnvironment(self.name, kind, self.make_instance, runner)
            tools = MethodTools(self.methods, instance.call_method, self.max_characters)
            return ToolEnvironment(tools, instance) if self.methods.schemas else instance
        methods = MethodsEnvironment(self.name, kind, self.make_instance, runner)
        tools = MethodTools(self.methods, methods.call_method, self.max_characters)
        return ScoredEnvironment(ToolEnvironment(tools, methods), methods)


def find_environment(env: EnvConfig) -> EnvironmentDefinition | None:
    """Loads and checks the environment of `env.environment`; None if that is unset.

    Raises:
        ConfigError: there is no such environment, it has none of the accepted forms, or an option has a wrong name.
    """
    name = env.environment
    if name is None:
        return None
    place = f"env.environment={name}"
    found = load_user_object("env.environment", name) if is_user_code(name) else ENVIRONMENTS.load(name)
    if not callable(found):
        raise ConfigError(f"{place}: {found!r} is neither a class nor a function; {ACCEPTED_FORMS}")
    if inspect.isclass(found):
        _check_class(place, found)
        leading = 0
    else:
        signature = _signature(place, found)
        if len(_positional_names(signature)) < 2:
            raise ConfigError(f"{place}: the parameters are {signature}; change them to (turns, example)")
        leading = 2
    options = _checked_options(place, found, env, leading)
    methods = make_method_checks(place, found) if inspect.isclass(found) else ToolChecks(())
    return EnvironmentDefinition(name, found, options, methods, env.tool_result_characters)


def _check_class(place: str, kind: type[Any]) -> None:
    """Checks the methods of a class."""
    members = dir(kind)
    if "reset" not in members:
        remedy = "define reset(self, example)" if "step" in members else ACCEPTED_FORMS
        raise ConfigError(f"{place}: the class has no method reset; {remedy}")
    if "step" in members:
        signature = _signature(place, kind.step)
        try:
            signature.bind("self", "turn")
        except TypeError as error:
            raise ConfigError(
                f"{place}: the parameters of step are {signature}; change them to (self, turn)"
            ) from error
    elif not tool_names(kind):
        raise ConfigError(
            f"{place}: the class has no method step and no public method that is a tool; {ACCEPTED_FORMS}"
        )


def _checked_options(place: str, target: Callable[..., Any], env: EnvConfig, leading: int) -> dict[str, Any]:
    """Returns the keyword arguments; a parameter `env` gets the section.

    leading: number of parameters that are no options.
    """
    parameters = list(_signature(place, target).parameters.values())[leading:]
    options = dict(env.environment_options)
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if "env" in named and "env" not in options:
        options["env"] = env
    known = ", ".join(name for name in named if name != "env") or "none"
    for name in options:
        if name not in named and not takes_any:
            raise ConfigError(f"env.environment_options.{name}: {place} has no such parameter; parameters: {known}")
    for each in parameters:
        if each.name in named and each.default is each.empty and each.name not in options:
            raise ConfigError(
                f"{place}: the parameter {each.name} has no value; set env.environment_options.{each.name}"
            )
    return options


def _positional_names(signature: inspect.Signature) -> list[str]:
    """Returns the names of the parameters that take positional arguments."""
    names = []
    for each in signature.parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            names += [each.name, each.name]
        elif each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            names.append(each.name)
    return names


def _signature(place: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # some functions written in C have no signature
        raise ConfigError(f"{place}: {function!r} has no signature; wrap it in a def; {ACCEPTED_FORMS}") from error
