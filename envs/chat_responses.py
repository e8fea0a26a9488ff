"""Parses the model's responses into messages: thoughts, content and function calls."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from envs.call_texts import MalformedCallError, check_call
from envs.chat_template import template_renders_tools, template_text
from envs.control_tokens import control_tokens
from envs.example import Message
from envs.response_regions import CALL_FIELDS, REASONING_FIELDS, Region, ResponseForm
from envs.vllm_parsers import VllmParser

FORMS_FILE = Path(__file__).parent / "response_templates" / "forms.json"
PLAIN = "plain"
"""Form without calls, for a chat template that names none of the known forms."""
VLLM_PREFIX = "vllm:"


@dataclass(frozen=True)
class ParsedResponse:
    """A response as a message.

    Args:
        message: the assistant's message: `content`, and `reasoning_content` and `tool_calls` where it has them. The
            arguments of a call are an object. `content` keeps the text of malformed calls.
        malformed: one text for each malformed call, for the model to read.
    """

    message: Message
    malformed: tuple[str, ...] = ()


class ResponseParser:
    """Parser of responses, made once for a tokenizer and `env.tool_parser`.

    Args:
        name: `auto`: the tokenizer's own response template, else the form whose marks the chat template contains;
            a form of response_templates/forms.json; `vllm:TOOL_PARSER` or `vllm:TOOL_PARSER+REASONING_PARSER`.

    Attributes:
        form: name of the form; `tokenizer` for the tokenizer's own response template.

    Raises:
        ConfigError: there is no such form or parser, or vLLM is missing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "auto") -> None:
        self.tokenizer, self.name = tokenizer, name
        self.control = control_tokens(tokenizer)
        texts = sorted(self.control.texts.values(), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._vllm: VllmParser | None = None
        if name.startswith(VLLM_PREFIX):
            self._vllm = VllmParser(tokenizer, name.removeprefix(VLLM_PREFIX))
            self.form, self._response_form = name, ResponseForm(forms()[PLAIN]["response_template"])
        else:
            self.form, self._response_form = _choose_form(tokenizer, name)

    def check_tools(self, remedy: str = "") -> None:
        """Checks that the model can be given tools.

        remedy: a setting that needs no native tools, before the others in the message.

        Raises:
            ConfigError: the chat template writes no tools, or the form of the model's calls is unknown.
        """
        place = f"model.name={self.tokenizer.name_or_path}"
        if not template_renders_tools(self.tokenizer):
            raise ConfigError(
                f"{place}: the chat template does not write tools into the prompt; set {remedy}"
                "model.chat_template=FILE to a template with tools, or model.name to a model that calls tools "
                "(models/quickstart_tools is one)"
            )
        if self.form == PLAIN:
            raise ConfigError(
                f"env.tool_parser={self.name}: the chat template of {place} has calls of no known form; set "
                f"env.tool_parser to one of {', '.join(_form_names())}, or vllm:NAME"
            )

    def parse(
        self, token_ids: Sequence[int], prompt_text: str, tools: Sequence[dict[str, Any]] = (), prefill: str = ""
    ) -> ParsedResponse:
        """Parses a response; any text gives a message.

        Args:
            token_ids: sampled tokens. Control tokens at the end are dropped.
            prompt_text: text of the prompt, which may open the model's thoughts.
            tools: function schemas, from which arguments without a type of their own get their types.
            prefill: beginning of the response at the end of the prompt.
        """
        form = self._response_form
        text = prefill + self.control.decode_with_control_tokens(self._without_end(token_ids))
        text = form.open_thought(prompt_text.removesuffix(prefill), self._control_pattern) + text
        identity = hashlib.sha256(prompt_text.encode("utf-8", "replace"))
        if self._vllm is not None:
            thoughts, content, calls, malformed = self._parse_with_vllm(text, tools)
        else:
            thoughts, content, calls, malformed = self._parse_regions(form.with_opened_thought(text), tools)
        message: Message = {"role": "assistant", "content": content}
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [_as_tool_call(call, index, identity) for index, call in enumerate(calls)]
        return ParsedResponse(message, tuple(malformed))

    def _parse_regions(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str | None, str, list[dict[str, Any]], list[str]]:
        form, thoughts, content = self._response_form, [], []
        calls: list[dict[str, Any]] = []
        malformed: list[str] = []
        parts = form.split(text)
        for part in parts:
            if not isinstance(part, Region):
                content += [] if form.has_content_field else [part]
            elif part.field.name in REASONING_FIELDS:
                thoughts.append(part.body.strip())
            elif part.field.name in CALL_FIELDS:
                try:
                    found, rest = form.read_region(part, tools)
                except MalformedCallError as error:
                    malformed.append(f"call {len(calls) + len(malformed) + 1}: {error}")
                    content.append(part.text)
                else:
                    calls += found
                    content.append(rest)
            elif part.field.name == "content":
                content.append(part.body)
        is_plain = len(parts) < 2 and not any(isinstance(part, Region) for part in parts)
        joined = "".join(content)
        return "\n".join(thoughts) if thoughts else None, joined if is_plain else joined.strip(), calls, malformed

    def _parse_with_vllm(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str | None, str, list[dict[str, Any]], list[str]]:
        assert self._vllm is not None
        if self._vllm.has_reasoning_parser:
            thoughts, answer = self._vllm.split_thoughts(text, tools)
        else:
            thoughts, answer, _, _ = self._parse_regions(self._response_form.with_opened_thought(text), tools)
        content, found = self._vllm.find_calls(answer, tools)
        calls: list[dict[str, Any]] = []
        malformed: list[str] = []
        for index, call in enumerate(found):
            try:
                calls.append(check_call(call))
            except MalformedCallError as error:
                malformed.append(f"call {index + 1}: {error}")
        return thoughts, answer if malformed else content, calls, malformed

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        """Drops control tokens at the end, except marks of a call or thought."""
        ids = list(token_ids)
        while ids and ids[-1] in self.control.ids:
            text = self.control.texts.get(ids[-1], "")
            if self._vllm is None and any(closing.search(text) for closing in self._response_form.closing):
                break
            ids.pop()
        return ids


@lru_cache(maxsize=1)
def forms() -> dict[str, dict[str, Any]]:
    """Returns the known forms of responses: name -> markers and response template.

    markers: patterns in a chat template whose model writes this form; the first form that fits is taken.
    """
    loaded: dict[str, dict[str, Any]] = json.loads(FORMS_FILE.read_text(encoding="utf-8"))
    return loaded


def _choose_form(tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[str, ResponseForm]:
    own = tokenizer.response_template
    if name == "auto" and own is not None:
        try:
            return "tokenizer", ResponseForm(own)
        except ValueError as error:
            raise ConfigError(
                f"model.name={tokenizer.name_or_path}: the tokenizer's response template cannot be read ({error}); "
                f"set env.tool_parser to one of {', '.join(_form_names())}"
            ) from error
    if name == "auto":
        text = template_text(tokenizer)
        found = (key for key, form in forms().items() if any(re.search(mark, text) for mark in form["markers"]))
        name = next(found, PLAIN)
    if name not in forms():
        raise ConfigError(
            f"env.tool_parser={name}: no such form of calls; choose from auto, {', '.join(_form_names())}, or vllm:NAME"
        )
    return name, ResponseForm(forms()[name]["response_template"])


def _form_names() -> list[str]:
    return sorted(forms())


def _as_tool_call(call: dict[str, Any], index: int, identity: "hashlib._Hash") -> dict[str, Any]:
    """Returns a call as chat templates take it.

    A call without an id gets nine letters and digits as its id, the same in every run.
    """
    name, arguments = call["name"], call["arguments"]
    made = identity.copy()
    made.update(f" {index}".encode())
    return {
        "id": call.get("id") or made.hexdigest()[:9],
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
