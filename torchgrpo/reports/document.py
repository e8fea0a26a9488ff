"""The file that a browser opens: one page with its data, its code and its style, which asks the network for nothing."""

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import Any

import orjson

SCRIPTS = (
    "dom", "format", "theme", "tables", "view", "charts", "curves", "histograms", "timeline", "evaluations", "settings",
    "tokens", "completions", "rollouts", "comparison", "main",
)  # fmt: skip
STYLES = ("base", "parts")

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
<noscript>This report draws itself with JavaScript, which is off here.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>{code}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def document(title: str, data: dict[str, Any]) -> bytes:
    """The page that shows `data` (page/main.js says which kinds there are), in UTF-8.

    The policy lets this script and this style run and nothing else, whatever a completion holds; in the data every `<`
    is written as its escape, so that no text can end the block that it stands in.
    """
    sources = files("torchgrpo.reports") / "page"
    style = "\n".join((sources / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    scripts = "\n".join((sources / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    code = f'(() => {{\n"use strict";\n{scripts}\nshowPage();\n}})();\n'  # in a scope of its own
    policy = (
        f"default-src 'none'; script-src {_digest(code)}; style-src {_digest(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    packed = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS).decode().replace("<", "\\u003c")
    return _PAGE.format(policy=policy, title=escape(title), style=style, data=packed, code=code).encode()
