"""Installs NLTK's sentence data for a test, also if NLTK is already imported."""

import shutil
from pathlib import Path

import pytest

from envs.verifiers import sentences
from tests.script_runner import ROOT

OWN_PUNKT = ROOT / "tests" / "fixtures" / "punkt_tab"


def use_punkt(folder: Path, data: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes NLTK find `folder` (with a subfolder `english`) as its sentence data."""
    shutil.copytree(folder, data / "tokenizers" / "punkt_tab")
    patch.setattr("nltk.data.path", [str(data)])
    sentences.load_punkt.cache_clear()
