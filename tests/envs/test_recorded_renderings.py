"""Tests that chats with tools render as recorded, with chat templates of TRL."""

import copy
import hashlib
import json
import re
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from envs.chat_template import render_chat
from envs.template_arguments import set_template_arguments
from tests.envs.test_control_tokens import byte_level
from tests.script_runner import ROOT

GOLDEN = ROOT.parent / "shared" / "golden"
RAISES_TYPE_ERROR = "deepseek-v3"
"""Family whose template takes arguments as text only. The recording has its error; the chat is rendered with text."""


def recorded_renderings() -> list[dict[str, Any]]:
    path = GOLDEN / "tool_formats.json"
    return json.loads(path.read_text())["renderings"] if path.exists() else []


def rendering_id(rendering: dict[str, Any]) -> str:
    return f"{rendering['family']}-{rendering['conversation']}-{rendering['tools']}"


def template_text(rendering: dict[str, Any]) -> str:
    """Returns the template of a rendering, or skips the test."""
    spec, name = find_spec("trl"), rendering["template_source"].rpartition("/")[2]
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for path in (Path(folder) / "chat_templates" / name for folder in folders):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == rendering["template_sha256"]:
            return path.read_text(encoding="utf-8")
    pytest.skip(f"the template {rendering['template_source']} is not installed")


def conversation(conversations: dict[str, Any], rendering: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a rendering in their variant."""
    if rendering["conversation"] == "no_tools":
        messages = conversations["single"]["messages"]
        return [each for each in messages if each["role"] != "tool" and "tool_calls" not in each]
    messages = copy.deepcopy(conversations[rendering["conversation"]]["messages"])
    if "variant" in rendering:  # content None where empty, arguments as JSON strings
        for message in messages:
            message["content"] = message["content"] or None
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("rendering", recorded_renderings(), ids=rendering_id)
def test_recorded_renderings(rendering: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 15)))
    golden = json.loads((GOLDEN / "tool_formats.json").read_text())
    families = json.loads((GOLDEN / "special_tokens.json").read_text())["families"]
    special = next(each for each in families if each["family"] == rendering["family"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(tuple(special["control_tokens"])), chat_template=template_text(rendering)
    )
    tokenizer.bos_token, tokenizer.eos_token = special["bos_token"] or None, special["eos_token"] or None
    if "date_string" in tokenizer.chat_template:
        set_template_arguments(tokenizer, {"date_string": "26 Jul 2024"})
    messages = conversation(golden["conversations"], rendering)
    tools = golden["tools"] if rendering["tools"] else ()

    def render() -> str:
        return render_chat(tokenizer, messages, tools, rendering["add_generation_prompt"])

    if "error" not in rendering:
        assert render() == rendering["rendered"]
    elif rendering["family"] == RAISES_TYPE_ERROR:
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        assert calls and all(json.dumps(call["arguments"], ensure_ascii=False) in render() for call in calls)
    else:
        with pytest.raises(Exception, match=re.escape(rendering["error"].partition(": ")[2])):
            render()
