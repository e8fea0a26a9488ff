"""Headless Chromium for the tests of pages, or why there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    *([] if CHROMIUM else ["a Chromium (Debian: apt-get install chromium)"]),
    *([] if find_spec("playwright") else ["playwright (pip install playwright)"]),
]
needs_browser = pytest.mark.skipif(bool(MISSING), reason=f"to test pages install {' and '.join(MISSING)}")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser that ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
