"""Commands that enter the Linux namespaces of another process."""

import os
from collections.abc import Sequence

from tests.script_runner import ROOT

USER_OPTIONS = ["--user", "--map-root-user"] if os.geteuid() else []
"""Options of `unshare`: without root, other namespaces require a user namespace."""


def nsenter(pid: int, kinds: Sequence[str]) -> list[str]:
    """Returns the prefix of a command that runs in namespaces of process `pid`.

    kinds: names of the namespaces, such as "mount" or "net". The working folder is the checkout.
    """
    user_options = ["--user", "--preserve-credentials"] if USER_OPTIONS else []
    return ["nsenter", "--target", str(pid), *user_options, *(f"--{kind}" for kind in kinds), f"--wd={ROOT}"]
