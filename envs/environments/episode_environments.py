"""Makes the environment of each episode from `env.environment`, `env.tools` and `env.reasoning`.

turn with a tool call ─▶ the tools of env.tools, native or by tags
other turn            ─▶ env.environment, or env.reasoning; without them the episode ends
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.environments.definition import find_environment
from envs.environments.interface import Environment, EpisodeError
from envs.environments.make import EnvironmentFactory
from envs.environments.tool_environment import ReflectionEnvironment, TagsEnvironment, ToolEnvironment
from envs.example import SYSTEM_ROLES, Example, MixedExamples
from envs.tool_calls import make_tools, tool_instructions
from envs.tools.tool_set import ToolSetFactory
from envs.tools.tool_sources import ToolStartError


class EpisodeEnvironments:
    """Maker of the environments of a run, one for each episode.

    Attributes:
        schemas: of all tools that the chat template writes into the prompt.
        sends_user_messages: whether all replies are user messages: results of tools called by tags, or the request to
            think again.

    Raises:
        ConfigError: the environment or a tool does not exist, has a wrong form, or does not start.
    """

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        has_native_tools = bool(env.tools) and env.tool_format == "native"
        definition = find_environment(env)
        own_schemas = () if definition is None else definition.methods.schemas
        if own_schemas and env.tools:
            names = ", ".join(schema["function"]["name"] for schema in own_schemas)
            raise ConfigError(
                f"env.tools={env.tools} with env.environment={env.environment}, which has tools of its own ({names}); "
                "leave env.tools empty"
            )
        self._text_tools = make_tools(env) if env.tools and not has_native_tools else []
        self.tools = ToolSetFactory(env) if has_native_tools else None
        self.user_environments = None if definition is None else EnvironmentFactory(env, definition)
        self.schemas: tuple[dict[str, Any], ...] = own_schemas if self.tools is None else self.tools.schemas
        self.sends_user_messages = self.user_environments is None and self.tools is None

    async def make(self) -> Environment:
        """Makes the environment of an episode.

        Raises:
            EpisodeError: a tool does not start.
        """
        inner: Environment | None = None
        if self.user_environments is not None:
            inner = self.user_environments.make()
        elif self.env.reasoning:
            inner = ReflectionEnvironment(self.env.reasoning_prompt, self.env.turn_limit - 1)
        if self.tools is not None:
            try:
                return ToolEnvironment(await self.tools.make(), inner)
            except ToolStartError as error:
                raise EpisodeError(str(error)) from error
        if self._text_tools:
            return TagsEnvironment(self._text_tools, inner)
        assert inner is not None
        return inner

    async def close(self) -> None:
        """Ends all threads and processes, after the environments are closed."""
        if self.user_environments is not None:
            await self.user_environments.close()
        if self.tools is not None:
            await self.tools.close()
        for tool in self._text_tools:
            tool.close()


def make_episode_environments(env: EnvConfig) -> EpisodeEnvironments | None:
    """Makes the environments of a run.

    None if every completion has one turn, or an agent plays the episodes.
    """
    return EpisodeEnvironments(env) if env.plays_episodes and env.agent is None else None


def with_tools(
    examples: Sequence[Example], env: EnvConfig, environments: EpisodeEnvironments | None
) -> Sequence[Example]:
    """Returns examples with schemas of native tools, or instructions of tools by tags.

    Without tools the examples are returned unchanged. A mixture stays a mixture with the same weights.
    """
    if env.tools and env.tool_format == "tags":
        instructions = tool_instructions(env)
        new_examples = [_with_instructions(example, instructions) for example in examples]
    elif environments is not None and environments.schemas:
        new_examples = [replace(example, tools=(*example.tools, *environments.schemas)) for example in examples]
    else:
        return examples
    if not isinstance(examples, MixedExamples):
        return new_examples
    return MixedExamples(
        {name: new_examples[slice(*bounds)] for name, bounds in examples.bounds.items()}, examples.weights
    )


def _with_instructions(example: Example, instructions: str) -> Example:
    head, *rest = example.messages
    messages = ({"role": "system", "content": instructions}, head, *rest)
    if head["role"] in SYSTEM_ROLES:
        messages = ({**head, "content": f"{head['content']}\n\n{instructions}"}, *rest)
    return replace(example, messages=messages)
