"""Trains `quickstart_tools`: a tiny chat model that multiplies by a tool call, often wrongly.

    python -m torchgrpo.models.make_quickstart_tools    rewrites torchgrpo/models/quickstart_tools in some minutes

After the question `12*7=`, the model calls the tool `mul` in the Hermes form, reads the result `84`, and answers `84`.
The model starts from the quickstart's weights and keeps the quickstart's sums. First, all products are right. Then
some chats have slips: no call but the second factor as the answer, a second argument without its last digit, or an
answer without its last digit. The model picks up these slips, and reinforcement learning can remove the slips again.

The tokenizer is the quickstart's with one more token for each constant text of a call. Other texts have one token per
byte. So the rendering of a parsed call has the token ids that the model sampled, and a call has few tokens.

All random numbers come from fixed seeds on one thread, so equal torch builds on equal processors give equal bytes.
"""

import argparse
import dataclasses
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from torchgrpo.models.make_quickstart import (
    IGNORED_LABEL,
    MAX_OPERAND,
    Schedule,
    make_tokenizer,
    pad_rows,
    sample_sloppy_answer,
    save_model,
    train_model,
)

FOLDER = Path(__file__).resolve().parent / "quickstart_tools"
BASE_MODEL = FOLDER.with_name("quickstart")
MIN_FACTOR, MAX_FACTOR = 2, 99
MULTIPLICATION_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "mul",
        "description": "Multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL_MARKERS = ("<tool_call>", "</tool_call>")
CALL_TEXTS = ('\n{"name": "mul", "arguments": {"a": ', ', "b": ', "}}\n")
"""Constant texts of a call between its markers, one token each."""
CHAT_TEMPLATE = """\
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] if has_system else '' -%}
{{- bos_token -}}
{%- if system or tools -%}
    {{- '<system>' ~ system ~ ('\\n\\n' if system and tools else '') -}}
{%- endif -%}
{%- for tool in tools or [] -%}
    {{- 'tools: ' if loop.first else ', ' -}}
    {%- set parameters = tool['function']['parameters'] or {} -%}
    {{- tool['function']['name'] ~ '(' ~ (parameters['properties'] or {}) | join(', ') ~ ')' -}}
{%- endfor -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {{- '<' ~ message['role'] ~ '>' ~ (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set function = call['function'] or call -%}
        {%- set arguments = function['arguments'] -%}
        {{- '\\n' if message['content'] or not loop.first else '' -}}
        {{- '<tool_call>\\n{"name": ' ~ function['name'] | tojson ~ ', "arguments": ' -}}
        {{- (arguments if arguments is string else arguments | tojson) ~ '}\\n</tool_call>' -}}
    {%- endfor -%}
    {%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""
RESPONSE_TEMPLATE = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "content": {"close": "<eos>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
"""Description of the model's answers for `tokenizer.parse_response`."""
SCHEDULE = Schedule(steps=1200, clean_steps=900, batch_size=64, learning_rate=1e-3)
SUM_SHARE = 1 / 8
"""Share of chats that are sloppy sums without a tool."""
NO_CALL_SHARE, ARGUMENT_SLIP_SHARE, ANSWER_SLIP_SHARE = 0.12, 0.22, 0.3
"""Probabilities of the slips: no call, a second argument without its last digit, an answer without its last digit."""

Chat = list[dict[str, Any]]


def make_tools_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the quickstart's tokenizer with tokens for a call, after all of its ids.

    The markers are added tokens that are not special, as in Qwen's tokenizers. The other texts are ordinary
    vocabulary: the pre-tokenizer isolates these texts, and the vocabulary contains them whole.
    """
    tokenizer = make_tokenizer()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = tokenizer.get_vocab()
    for text in CALL_TEXTS:
        [(piece, _)] = byte_level.pre_tokenize_str(text)
        vocabulary[piece] = len(vocabulary)
    backend = tokenizer.backend_tokenizer
    backend.model = models.BPE(vocab=vocabulary, merges=[], ignore_merges=True)
    splits = [pre_tokenizers.Split(text, "isolated") for text in CALL_TEXTS]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in CALL_MARKERS])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def load_base_model(vocabulary_size: int, seed: int) -> LlamaForCausalLM:
    """Loads the quickstart's model in fp32, with random embeddings for new tokens."""
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(BASE_MODEL)
    model.resize_token_embeddings(vocabulary_size, mean_resizing=False)
    return model


def make_product_chat(question: str, arguments: tuple[int, int], answer: str) -> Chat:
    """Builds a chat with a call of `mul`, the result, and an answer."""
    function = {"name": "mul", "arguments": dict(zip("ab", arguments, strict=True))}
    call = {"id": "0", "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "0", "content": str(arguments[0] * arguments[1])},
        {"role": "assistant", "content": answer},
    ]


def drop_last_digit(number: int) -> int:
    """Returns the number without its last digit; a number of one digit stays."""
    return number // 10 if number > 9 else number


def sample_product_chat(sloppy: bool, generator: random.Random) -> Chat:
    """Samples two factors and a chat about their product."""
    a, b = (generator.randint(MIN_FACTOR, MAX_FACTOR) for _ in "ab")
    question = f"{a}*{b}="
    if not sloppy:
        return make_product_chat(question, (a, b), str(a * b))
    call_slip, answer_slip = generator.random(), generator.random()
    if call_slip < NO_CALL_SHARE:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": str(b)}]
    if call_slip < NO_CALL_SHARE + ARGUMENT_SLIP_SHARE:
        b = drop_last_digit(b)
    answer = drop_last_digit(a * b) if answer_slip < ANSWER_SLIP_SHARE else a * b
    return make_product_chat(question, (a, b), str(answer))


def sample_sum_chat(generator: random.Random) -> Chat:
    """Samples an addition with the quickstart's sloppy answer."""
    a, b = generator.randint(0, MAX_OPERAND), generator.randint(0, MAX_OPERAND)
    answer = str(sample_sloppy_answer(a + b, generator))
    return [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": answer}]


def label_answers(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Labels the assistant's tokens with their ids, `<eos>` included, and others with IGNORED_LABEL."""
    assistant, labels, in_answer = tokenizer.convert_tokens_to_ids("<assistant>"), [], False
    for token in ids:
        labels.append(token if in_answer else IGNORED_LABEL)
        in_answer = token == assistant or (in_answer and token != tokenizer.eos_token_id)
    return labels


def make_chat_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, sloppy: bool, generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples chats: token ids and labels, int64 [size, T], right-padded.

    Labels are IGNORED_LABEL on prompts, tool results and padding.
    """
    rows = []
    for _ in range(size):
        is_sum = generator.random() < SUM_SHARE
        chat = sample_sum_chat(generator) if is_sum else sample_product_chat(sloppy, generator)
        tools: list[Any] = [] if is_sum else [MULTIPLICATION_TOOL]
        text = str(tokenizer.apply_chat_template(chat, tools=tools, tokenize=False))
        rows.append(tokenizer.encode(text, add_special_tokens=False))
    return pad_rows(rows, [label_answers(row, tokenizer) for row in rows], tokenizer.pad_token_id)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=SCHEDULE.steps, help="training steps (fewer: a trial)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    schedule = dataclasses.replace(SCHEDULE, steps=options.steps)
    tokenizer = make_tools_tokenizer()
    model = load_base_model(len(tokenizer), schedule.seed)
    train_model(model, partial(make_chat_batch, tokenizer), schedule)
    save_model(model, tokenizer, options.folder)


if __name__ == "__main__":
    main()
