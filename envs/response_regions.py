"""Splits a response into thoughts, calls and content by a response template of transformers.

transformers parses a whole response or none of it. Here each call is parsed by itself, so that a malformed call spoils
no other call.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from envs.call_texts import MalformedCallError, check_call, read_calls

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALL_FIELDS = ("tool_calls", "malformed_calls")


@dataclass(frozen=True)
class Region:
    """Part of a response that belongs to a field of the template.

    text: with the marks around it. body: without them. is_closed: whether the mark at its end was written.
    """

    field: ResponseTemplateField
    text: str
    body: str
    is_closed: bool


class ResponseForm:
    """Form in which a model writes thoughts, calls and content.

    Args:
        template: a response template as transformers reads it.

    Raises:
        ValueError: the template is not a response template.
    """

    def __init__(self, template: dict[str, Any]) -> None:
        self.template: ResponseTemplate = load_response_template(template)
        fields = self.template.fields
        self.reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
        self.has_content_field = "content" in fields and fields["content"].open_re is not None
        self.closing = [field.close_re for field in fields.values() if field.open_re is not None and field.close_re]

    def split(self, text: str) -> list[Region | str]:
        """Splits a response into regions, and the text between them."""
        parts: list[Region | str] = []
        explicit = [field for field in self.template.fields.values() if field.open_re is not None]
        while text:
            found = [(match, field) for field in explicit if (match := field.open_re.search(text)) is not None]
            if not found:
                break
            opening, field = min(found, key=lambda pair: (pair[0].start(), pair[0].start() - pair[0].end()))
            closing = field.close_re.search(text, opening.end()) if field.close_re is not None else None
            stop, end = (closing.start(), closing.end()) if closing else (len(text), len(text))
            if end == opening.start():
                break  # an empty region would be found for ever
            parts += [text[: opening.start()]] if opening.start() else []
            body = text[opening.end() : stop]
            parts.append(Region(field, text[opening.start() : end], body, closing is not None))
            text = text[end:]
        return parts + ([text] if text else [])

    def open_thought(self, prompt_text: str, control: re.Pattern[str]) -> str:
        """Returns the beginning of a thought at the end of a prompt, if any.

        control: pattern of the control tokens, which do not occur in a thought.
        """
        if self.reasoning is None or self.reasoning.open_re is None:
            return ""
        last = next(iter(list(self.reasoning.open_re.finditer(prompt_text))[-1:]), None)
        if last is None:
            return ""
        thought = prompt_text[last.end() :]
        is_over = control.search(thought) or (self.reasoning.close_re and self.reasoning.close_re.search(thought))
        return "" if is_over else prompt_text[last.start() :]

    def with_opened_thought(self, text: str) -> str:
        """Opens the thought of a response that only ends one."""
        field = self.reasoning
        if field is None or field.open_re is None or field.close_re is None or not field.open_literals:
            return text
        closing, opening = field.close_re.search(text), field.open_re.search(text)
        is_open = closing is not None and (opening is None or closing.start() < opening.start())
        return field.open_literals[0] + text if is_open else text

    def read_region(self, region: Region, tools: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Reads the calls in a region, and returns them with the text behind them.

        Raises:
            MalformedCallError: a call cannot be read.
        """
        if region.field.name == "malformed_calls":
            raise MalformedCallError("the call does not have the form of the calls in the prompt")
        if region.field.content == "text" and region.field.transform is None:
            calls, rest = read_calls(region.body)
            return [check_call(call) for call in calls], rest
        is_tagged = region.field.content == "xml-inline"
        if is_tagged:
            self._check_tags(region)
        casts: list[Any] | None = list(tools) if is_tagged else None  # a value in tags has no type of its own
        try:
            message = parse_response(region.text, self.template, prefix="", tools=casts)
        except MalformedCallError:
            raise
        except (
            Exception
        ) as error:  # the template may be a stranger's, and each of its parsers has exceptions of its own
            reason = str(error).splitlines()[-1].removeprefix("Error: ") if str(error) else type(error).__name__
            raise MalformedCallError(f"the call cannot be read: {reason}") from error
        calls = message.get("tool_calls") or []
        if not calls:
            raise MalformedCallError("the call is empty")
        return [check_call(call) for call in (calls if isinstance(calls, list) else [calls])], ""

    def _check_tags(self, region: Region) -> None:
        if not region.is_closed:
            raise MalformedCallError("the call is cut off before its end")
        pattern = region.field.content_args.get("tag_pattern", "")
        other = re.sub(pattern, "", region.body, flags=re.DOTALL).strip()
        if other:
            raise MalformedCallError(f"the call has text outside of its parameters: {other[:80]!r}")
