"""Every line of docs/sandbox.md's table, attacked: by root's sandboxes and a user's, whatever Landlock there is."""

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
from tests.envs.sandboxes import NEEDS_LINUX, ROOT, WORKING

pytestmark = [NEEDS_LINUX, pytest.mark.long]
USER = 4242
NEWEST = 99
USERS = ("root", "user") if os.geteuid() == 0 else ("user",)
LANDLOCKS = [version for version in (0, 1, 2, 5, 7) if version <= landlock_version()]
CASES = [(level, NEWEST) for level in WORKING if level != "rlimits"]
CASES += [("rlimits", version) for version in LANDLOCKS if "rlimits" in WORKING]


MODULES = (
    "config/__init__.py", "config/schema/errors.py", "tests/__init__.py", "tests/envs/__init__.py",
    "envs/__init__.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def anybodys() -> Iterator[Path]:
    """A folder that every user can enter, with the modules that a grader needs and an interpreter."""
    made = Path(tempfile.mkdtemp(prefix="attacked-", dir="/var/tmp"))  # not /tmp, which sandboxes hide
    made.chmod(0o755)
    ours = [ROOT / path for path in MODULES]
    for path in [*ours, *(ROOT / "envs/sandbox").rglob("*.py"), ROOT / "tests/envs/sandbox_attacker.py"]:
        target = made / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    library = Path(os.__file__).parent
    left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "config-*")
    shutil.copytree(library, made / "lib" / library.name, ignore=left_out, symlinks=True)
    for shared in Path(sys.base_prefix, "lib").glob("libpython3*.so*"):
        shutil.copy(shared, made / "lib")
    (made / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), made / "bin" / "python3")
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("level", "landlock"), CASES)
def test_nothing_of_the_graders_is_reached(level: str, landlock: int, user: str, anybodys: Path) -> None:
    number = USER if user == "user" and os.geteuid() == 0 else None
    own = anybodys / f"{level}-{landlock}-{user}"
    own.mkdir()
    if number is not None:
        os.chown(own, number, number)
    ended = subprocess.run(
        [anybodys / "bin" / "python3", "-m", "tests.envs.sandbox_attacker", level, str(landlock), own],
        cwd=anybodys, env={"PATH": os.environ["PATH"], "SECRET": "x"}, user=number, group=number,
        extra_groups=None if number is None else [], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    managed, changed = json.loads(ended.stdout)
    assert managed == []
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
"""What the honest program had, as in `source-of-the-honest`."""


@pytest.mark.parametrize("level", WORKING)
def test_what_was_judged_before_is_in_no_memory(level: str) -> None:
    """The thief knows the words it looks for only with every byte one higher, so that it does not find its own."""
    words = [bytes(byte + 1 for byte in f"{kind}-of-the-honest".encode()) for kind in KINDS]
    thief = f"WORDS = {words!r}\n{THIEF}"
    with Sandbox(level) as sandbox:
        for _ in range(3):
            honest = sandbox.run(HONEST, b"of-the-honest \nstdin-of-the-honest" * 50)
            assert (honest.stdout, honest.stderr) == (b"output-of-the-honest \n", b"error-of-the-honest \n")
            called = sandbox.call("def f(a): return 'value' + a[8:]", "f", ["argument-of-the-honest"])
            assert called.value == b'"value-of-the-honest"'
        assert sandbox.run(thief).stdout == b"[]\n"
        assert sandbox.run(f"kept = 'source-of-the-' + str('honest')\n{thief}").stdout == b"[0]\n"
