"""Builds the message about an installed package that fails to import, with a remedy.

A package with optional imports fails with a broken one: transformers with the torchvision of another torch.
"""

import importlib
import traceback
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]
"""The checkout, or the site-packages folder, which holds other packages too."""
PROJECT_PACKAGES = {"config", "envs", "torchgrpo", "grpo", "grpo_async", "grpo_utils", "benchmarks", "tests"}
REMEDY = (
    "Installed packages must match: run `pip check`, install the torchvision and torchaudio of this torch "
    "version, or make a separate environment as in README.md"
)


def broken_package_message(error: BaseException) -> str | None:
    """Returns the message about a package that fails to import; None for any other error.

    An error in the project's own code is no such error. Neither is a missing package that the project imports:
    the code that needs it raises its own error.
    """
    if not isinstance(error, ImportError):
        return None
    root: BaseException = error
    while root.__cause__ is not None:  # not `__context__`: an import that failed in `try` is no error
        root = root.__cause__
    pythons_import = ("<", importlib.__file__)
    frames = traceback.extract_tb(root.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(pythons_import)]
    if not places:
        return None
    file = Path(places[-1].filename)
    inside = file.resolve()
    if (
        inside.is_relative_to(PROJECT_DIR)
        and inside.relative_to(PROJECT_DIR).parts[0].removesuffix(".py") in PROJECT_PACKAGES
    ):
        return None
    text = str(root) or type(root).__name__
    place = f"{file}, line {places[-1].lineno}"
    return f"a package does not load: {text} ({type(root).__name__} in {place}). {REMEDY}"
