"""Tests of hostile programs against each protection in docs/sandbox.md's table.

They run as root and as a user, with different versions of Landlock.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.sandbox.isolation import landlock_version
from envs.sandbox.sandbox import Sandbox
from tests.envs.sandbox_helpers import NEEDS_LINUX, ROOT, WORKING_LEVELS

pytestmark = [NEEDS_LINUX, pytest.mark.long]
USER = 4242
NEWEST = 99
USERS = ("root", "user") if os.geteuid() == 0 else ("user",)
LANDLOCKS = [version for version in (0, 1, 2, 5, 7) if version <= landlock_version()]
CASES = [(level, NEWEST) for level in WORKING_LEVELS if level != "rlimits"]
CASES += [("rlimits", version) for version in LANDLOCKS if "rlimits" in WORKING_LEVELS]


MODULES = (
    "config/__init__.py", "config/schema/errors.py", "tests/__init__.py", "tests/envs/__init__.py",
    "envs/__init__.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def public_folder() -> Iterator[Path]:
    """Creates a folder that every user can enter, with a grader's modules and an interpreter."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/var/tmp"))  # not /tmp, which sandboxes hide
    folder.chmod(0o755)
    ours = [ROOT / path for path in MODULES]
    for path in [*ours, *(ROOT / "envs/sandbox").rglob("*.py"), ROOT / "tests/envs/sandbox_attacker.py"]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    library = Path(os.__file__).parent
    left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "config-*")
    shutil.copytree(library, folder / "lib" / library.name, ignore=left_out, symlinks=True)
    for shared in Path(sys.base_prefix, "lib").glob("libpython3*.so*"):
        shutil.copy(shared, folder / "lib")
    (folder / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), folder / "bin" / "python3")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("level", "landlock"), CASES)
def test_nothing_of_the_graders_is_reached(level: str, landlock: int, user: str, public_folder: Path) -> None:
    number = USER if user == "user" and os.geteuid() == 0 else None
    own_folder = public_folder / f"{level}-{landlock}-{user}"
    own_folder.mkdir()
    if number is not None:
        os.chown(own_folder, number, number)
    process = subprocess.run(
        [public_folder / "bin" / "python3", "-m", "tests.envs.sandbox_attacker", level, str(landlock), own_folder],
        cwd=public_folder, env={"PATH": os.environ["PATH"], "SECRET": "x"}, user=number, group=number,
        extra_groups=None if number is None else [], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    successes, changed = json.loads(process.stdout)
    assert successes == []
    assert changed == []


THIEF = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
read, write = os.pipe()
os.set_blocking(write, False)
PAGE = 4096
NEXT = bytes((value + 1) % 256 for value in range(256))
stolen = set()
def look(start, end):
    text = b""
    for at in range(start & -PAGE, end, PAGE):
        if libc.write(write, ctypes.c_void_p(at), 1) == 1:
            os.read(read, 1)
            page = ctypes.string_at(at, PAGE).translate(NEXT)
            joined = text[-100:] + page
            stolen.update(place for place, word in enumerate(WORDS) if word in joined)
            text = page
        else:
            text = b""
look(libc.sbrk(0) - (64 << 20), libc.sbrk(0))
big = ctypes.create_string_buffer(1 << 20)
for at in {id(value) & -(1 << 24) for value in (object(), [], b"x" * 100, big, bytearray(1000))}:
    look(at - (16 << 20), at + (32 << 20))
look(ctypes.addressof(big) - (64 << 20), ctypes.addressof(big) + (64 << 20))
print(sorted(stolen))
"""
HONEST = """
given = open(0).read()
hidden = "source-of-the-honest"
with open("file-of-the-honest", "w") as file:
    file.write("x")
import sys
print("output-" + given[:14])
print("error-" + given[:14], file=sys.stderr)
"""
KINDS = ("source", "stdin", "output", "error", "file", "argument", "value")
"""Secrets of the honest program, as in `source-of-the-honest`."""


@pytest.mark.parametrize("level", WORKING_LEVELS)
def test_what_was_judged_before_is_in_no_memory(level: str) -> None:
    """The thief's search words have every byte increased by one, to hide its own copy."""
    words = [bytes(byte + 1 for byte in f"{kind}-of-the-honest".encode()) for kind in KINDS]
    thief = f"WORDS = {words!r}\n{THIEF}"
    with Sandbox(level) as sandbox:
        for _ in range(3):
            honest = sandbox.run(HONEST, b"of-the-honest \nstdin-of-the-honest" * 50)
            assert (honest.stdout, honest.stderr) == (b"output-of-the-honest \n", b"error-of-the-honest \n")
            called = sandbox.call_function("def f(a): return 'value' + a[8:]", "f", ["argument-of-the-honest"])
            assert called.value == b'"value-of-the-honest"'
        assert sandbox.run(thief).stdout == b"[]\n"
        assert sandbox.run(f"kept = 'source-of-the-' + str('honest')\n{thief}").stdout == b"[0]\n"
