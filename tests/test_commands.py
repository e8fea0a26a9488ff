"""Commands that messages and docs tell people to type do exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPOKEN = ["*.md", "docs/*.md", "*.py"] + [
    f"{room}/**/*.py"
    for room in (
        "config",
        "plan",
        "cluster",
        "envs",
        "rollout",
        "training",
        "evaluation",
        "monitoring",
        "run",
    )
]


def test_every_make_target_that_is_named_is_one() -> None:
    texts = [path for pattern in SPOKEN for path in ROOT.glob(pattern)]
    named = {
        target for path in texts for target in re.findall(r"(?:`|^)make (\w[\w-]*)", path.read_text(), re.M)
    }
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert {"run", "vllm", "test"} <= named
    assert named <= targets
