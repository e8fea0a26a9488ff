"""A package that is installed and does not load, as one message: the package, what it says, and what helps.

Packages that import others where they find them fail with these: transformers with a torchvision of another torch.
"""

import importlib
import traceback
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder that `pip install` puts other packages into as well."""
OURS = {"config", "envs", "torchgrpo", "grpo", "grpo_async", "grpo_utils", "benchmarks", "tests"}
REMEDY = (
    "What is installed together must fit: `pip check` tells more, a torchvision or torchaudio has to be that of its "
    "torch, and an environment of its own, as README.md makes it, has nothing else in it"
)


def broken_package(error: BaseException) -> str | None:
    """What package does not load and why, if that is what the exception came from and not a fault of ours.

    A package that we import ourselves and that is not there is none: what asks for it says so.
    """
    if not isinstance(error, ImportError):
        return None
    root: BaseException = error
    while root.__cause__ is not None:  # not what was tried before: `except ImportError` is no fault
        root = root.__cause__
    pythons_import = ("<", importlib.__file__)
    frames = traceback.extract_tb(root.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(pythons_import)]
    if not places:
        return None
    file = Path(places[-1].filename)
    inside = file.resolve()
    if inside.is_relative_to(PROJECT) and inside.relative_to(PROJECT).parts[0].removesuffix(".py") in OURS:
        return None
    said = str(root) or type(root).__name__
    return f"a package does not load: {said} ({type(root).__name__} in {file}, line {places[-1].lineno}). {REMEDY}"
