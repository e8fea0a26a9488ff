"""Builds a self-contained HTML page with data, code and styles, without network access."""

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import Any

import orjson

SCRIPTS = (
    "dom", "format", "theme", "tables", "view", "charts", "curves", "histograms", "timeline", "evaluations", "settings",
    "tokens", "chats", "completions", "rollouts", "comparison", "main",
)  # fmt: skip
STYLES = ("base", "sections")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report needs JavaScript, which is disabled.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>{code}</script>
</body>
</html>
"""


def _content_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_page(title: str, data: dict[str, Any]) -> bytes:
    """Returns the page for `data` in UTF-8.

    page/main.js lists the kinds of pages. The content security policy allows only this script and this style,
    regardless of the text of a completion. Each `<` in the data is escaped, so no text can end the script block.
    """
    sources = files("torchgrpo.reports") / "page"
    style = "\n".join((sources / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    scripts = "\n".join((sources / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    code = f'(() => {{\n"use strict";\n{scripts}\nshowPage();\n}})();\n'
    policy = (
        f"default-src 'none'; script-src {_content_hash(code)}; style-src {_content_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    json_data = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS).decode().replace("<", "\\u003c")
    return _PAGE.format(policy=policy, title=escape(title), style=style, data=json_data, code=code).encode()
