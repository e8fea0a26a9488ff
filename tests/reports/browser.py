"""Headless Chromium for the tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING_TOOLS = [
    *([] if CHROMIUM else ["a Chromium (Debian: apt-get install chromium)"]),
    *([] if find_spec("playwright") else ["playwright (pip install playwright)"]),
]
needs_browser = pytest.mark.skipif(bool(MISSING_TOOLS), reason=f"to test pages install {' and '.join(MISSING_TOOLS)}")


@contextmanager
def start_browser() -> Iterator[Any]:
    """Starts a browser that ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
