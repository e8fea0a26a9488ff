"""Calls vLLM's parsers of thoughts and calls by their names.

vLLM is imported only for `env.tool_parser=vllm:NAME`.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError


class VllmParser:
    """vLLM's tool parser, with its reasoning parser if one is named.

    Args:
        name: TOOL_PARSER or TOOL_PARSER+REASONING_PARSER, such as `hermes+qwen3`.

    Raises:
        ConfigError: vLLM is not installed, has no such parser, or the parser does not take the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.tokenizer, self.place = tokenizer, f"env.tool_parser=vllm:{name}"
        try:
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"{self.place}: vLLM cannot be imported ({error}); install it (pip install torchgrpo[vllm]), or set "
                "env.tool_parser=auto"
            ) from error
        tool_name, _, reasoning_name = name.partition("+")
        self._tool_parser = self._find(ToolParserManager.get_tool_parser, ToolParserManager, tool_name)
        self._reasoning_parser: Any = None
        if reasoning_name:
            get_parser = ReasoningParserManager.get_reasoning_parser
            self._reasoning_parser = self._find(get_parser, ReasoningParserManager, reasoning_name)
        try:
            self._tool_parser(tokenizer, [])
            if self._reasoning_parser is not None:
                self._reasoning_parser(tokenizer)
        except Exception as error:  # a parser raises what it likes for a tokenizer without its tokens
            raise ConfigError(
                f"{self.place}: the parser does not take the tokenizer of model.name={tokenizer.name_or_path}: {error}"
            ) from error

    @property
    def has_reasoning_parser(self) -> bool:
        """Whether a reasoning parser is named."""
        return self._reasoning_parser is not None

    def split_thoughts(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str | None, str]:
        """Returns the thoughts, if any, and the rest of a response."""
        try:
            thoughts, content = self._reasoning_parser(self.tokenizer).extract_reasoning(text, self._request(tools))
        except Exception:  # a parser raises what it likes for a strange text
            return None, text
        return thoughts, content or ""

    def find_calls(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text around the calls, and the calls as objects for `check_call`."""
        try:
            request = self._request(tools)
            found = self._tool_parser(self.tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # a parser raises what it likes for a strange text
            return text, []
        calls = [{**call.function.model_dump(), "id": call.id} for call in found.tool_calls]
        for call in calls:  # vLLM makes ids at random where the model wrote none
            call["id"] = call["id"] if call["id"] in text else None
        return (found.content or "" if calls else text), calls

    def _find(self, get_parser: Any, manager: Any, name: str) -> Any:
        try:
            return get_parser(name)
        except KeyError as error:
            names = ", ".join(manager.list_registered())
            raise ConfigError(f"{self.place}: vLLM has no parser {name!r}; choose from {names}") from error
        except Exception as error:  # vLLM imports a parser here, and some need packages of their own
            raise ConfigError(f"{self.place}: vLLM cannot load the parser {name!r}: {error}") from error

    @staticmethod
    def _request(tools: Sequence[dict[str, Any]]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        fields: dict[str, Any] = {"messages": [{"role": "user", "content": "question"}], "model": "policy"}
        if tools:
            fields["tools"] = list(tools)
        return ChatCompletionRequest(**fields)
