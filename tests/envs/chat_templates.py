"""Small chat templates in the manner of model families, and chats to render."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.envs.test_control_tokens import byte_level

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
TOOL_LIST = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
CHATML = (
    "{% if tools %}<|im_start|>system\n" + TOOL_LIST + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS_OF_LAST_TURN = (  # thoughts before the last question are dropped
    "{% set last = namespace(index=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.index = loop.index0 %}{% endif %}{% endfor %}" + TOOL_LIST + "{% for m in messages %}"
    "{% set content = m.content %}{% set thought = m.reasoning_content %}"
    "{% if m.role == 'assistant' and thought is not defined and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and thought is defined and loop.index0 > last.index %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}" + CALLS + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT_ROLE_ENDS = (  # the mark of the next role ends an answer
    "[gMASK]<sop>" + TOOL_LIST + "{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}" + CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
END_OF_CHAT = (  # another token at the end of the chat
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
NINE_LETTER_IDS = (  # ids of nine characters, strict roles, tools before the first question
    "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.first and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
TRIMMED_CONTENT = (  # content is trimmed, one call for each message
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|eot|>'
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
NAMES_IN_TAGS = (  # names and keys inside of tags, which they complete to tokens
    "{% for t in tools or [] %}{% for key, value in t.function.items() %}{{ '<' ~ key ~ '>' }}{{ value | string }}"
    "{% endfor %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<function=' + c.function.name + '>' }}"
    "{% for key, value in c.function.arguments.items() %}{{ '<parameter=' + key + '>' + value | string }}{% endfor %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = {
    CHATML: ("<|im_end|>", "<|im_start|>"),
    THOUGHTS_OF_LAST_TURN: ("<|im_end|>", "<|im_start|>"),
    NEXT_ROLE_ENDS: ("<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"),
    END_OF_CHAT: ("<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>"),
    NINE_LETTER_IDS: (
        *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    TRIMMED_CONTENT: ("<|eot|>", "<|begin|>", "<|head|>", "<|/head|>"),
    NAMES_IN_TAGS: ("<|im_end|>", "<|im_start|>"),
}
"""Template -> its control tokens, the end of an answer first."""
PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are no special tokens."""
ADD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "enum": [1, 2]}, "unit": {"type": "string", "enum": ["m", "cm"]}},
            "required": ["a"],
        },
    },
}


def make_chat_tokenizer(
    template: str, control: tuple[str, ...] = (), plain_tokens: tuple[str, ...] = PLAIN_TOKENS
) -> Any:
    """Makes a byte-level tokenizer with the control tokens of a template and other added tokens."""
    control = control or TOKENS[template]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(control), chat_template=template)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain_tokens])
    special = [AddedToken(text, special=True, normalized=False) for text in control]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token = "<|endoftext|>" if "<|endoftext|>" in control else control[0]
    return tokenizer


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(name: str = "add", arguments: Any = None, identity: str = "call00001", content: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 1} if arguments is None else arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": identity, "type": "function", "function": function}],
    }


def result(content: str, name: str = "add", identity: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": identity, "content": content}


def hostile_chats(text: str) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Returns chats with a text in one place each: place -> messages and tools."""

    def tool(change: Any) -> list[dict[str, Any]]:
        copy = json.loads(json.dumps(ADD_TOOL))
        change(copy["function"])
        return [copy]

    question, plain = user("1+1="), [ADD_TOOL]
    return {
        "user": ([user(text)], plain),
        "assistant": ([question, {"role": "assistant", "content": text}, question], plain),
        "thoughts": ([question, {"role": "assistant", "content": "2", "reasoning_content": text}, question], plain),
        "result": ([question, call(), result(text)], plain),
        "name": ([question, call(text), result("2", text)], plain),
        "argument": ([question, call(arguments={"a": text}), result("2")], plain),
        "key": ([question, call(arguments={text: 1}), result("2")], plain),
        "nested": ([question, call(arguments={"a": [text, {"b": text}]}), result("2")], plain),
        "description": ([question], tool(lambda function: function.update(description=text))),
        "tool": ([question], tool(lambda function: function.update(name=text))),
        "enum": ([question], tool(lambda function: function["parameters"]["properties"]["unit"].update(enum=[text]))),
        "property": ([question], tool(lambda function: function["parameters"]["properties"].update({text: {}}))),
        "schema key": ([question], tool(lambda function: function.update({text: "x"}))),
    }
