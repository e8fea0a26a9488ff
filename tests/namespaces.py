"""Commands that enter the network, processes or mounts of another process."""

import os
from collections.abc import Sequence

from tests.scripts import ROOT

USER = ["--user", "--map-root-user"] if os.geteuid() else []
"""Of `unshare`: whoever is not root needs a namespace of users as well."""


def nsenter(pid: int, kinds: Sequence[str]) -> list[str]:
    """The words before a command that shall run in these namespaces of `pid`; the working folder is the checkout."""
    user = ["--user", "--preserve-credentials"] if USER else []
    return ["nsenter", "--target", str(pid), *user, *(f"--{kind}" for kind in kinds), f"--wd={ROOT}"]
