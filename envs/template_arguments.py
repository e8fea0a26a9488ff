"""Writes the arguments of a chat template (`model.chat_template_kwargs`) into the template.

Everything that renders the template then uses the same values: prompts, evaluation, and the exported model.
"""

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase

from config.schema.errors import ConfigError

_SETTING = "model.chat_template_kwargs"
_RENDERING_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class _GenerationTag(Extension):
    """Parses `{% generation %}`, with which templates enclose the text of an assistant message."""

    tags = {"generation"}  # noqa: RUF012, an attribute of the library's class

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Returns the nodes inside of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Sets arguments in the chat template of a tokenizer.

    An argument of a single rendering has priority over the set value.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not read one of the names.
    """
    if not arguments:
        return
    if not tokenizer.chat_template:
        raise ConfigError(f"{_SETTING}={dict(arguments)}: the tokenizer has no chat template; set model.chat_template")
    several = isinstance(tokenizer.chat_template, dict)
    templates: dict[str, str] = tokenizer.chat_template if several else {"": tokenizer.chat_template}
    names = set().union(*map(_read_names, templates.values()))
    names -= {*_RENDERING_ARGUMENTS, *tokenizer.special_tokens_map}
    for name in arguments:
        if name not in names:
            known = ", ".join(sorted(names - {"raise_exception", "strftime_now", "namespace", "range", "dict"}))
            raise ConfigError(
                f"{_SETTING}.{name}: the chat template does not read {name!r}; it reads {known or 'no argument'}"
            )
    head = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
        for name, value in arguments.items()
    )
    changed = {key: head + template for key, template in templates.items()}
    tokenizer.chat_template = changed if several else changed[""]


def _read_names(template: str) -> set[str]:
    """Returns the names that a template reads without having set them."""
    environment = jinja2.Environment(extensions=[_GenerationTag, loopcontrols])
    return jinja2.meta.find_undeclared_variables(environment.parse(template))
