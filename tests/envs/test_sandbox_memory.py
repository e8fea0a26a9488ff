"""What was judged before a program is nowhere in that program's memory."""

from envs.sandbox import Sandbox
from tests.envs.sandboxes import NEEDS_LINUX

pytestmark = NEEDS_LINUX

HONEST = """
print("honest-" + "output-" + "0123456789" * 200)  # honest-source-0123456789
text = input()
open("honest-" + "naming-0123456789", "w").close()
"""

THIEF = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
reading, writing = os.pipe()

def mapped(address):
    if libc.write(writing, ctypes.c_void_p(address), 1) != 1:
        return False
    os.read(reading, 1)
    return True

def around(address):
    low = high = address & ~4095
    while mapped(low - 4096) and high - low < 1 << 25:
        low -= 4096
    while mapped(high) and high - low < 1 << 26:
        high += 4096
    return low, high

places = {around(id(thing)) for thing in (object(), bytearray(100), os, ctypes)}
places |= {around(libc.malloc(size)) for size in (20, 600, 5000, 60000, 1000000)}
for low, high in sorted(places):
    text = b"".join(ctypes.string_at(page, 4096) for page in range(low, high, 4096) if mapped(page))
    for kind in (b"out" + b"put", b"sou" + b"rce", b"inp" + b"uts", b"nam" + b"ing"):
        found = text.find(b"hon" + b"est-" + kind + b"-" + b"0123")
        if found >= 0:
            print("found", text[found:found + 20])
print("searched", sum(high - low for low, high in places) > 1 << 20)
"""


def test_nothing_of_an_earlier_program_is_found_in_memory(sandbox: Sandbox) -> None:
    for _ in range(3):
        honest = sandbox.run(HONEST, b"honest-inputs-" + b"0123456789" * 200)
        assert honest.succeeded, honest
        assert honest.stdout.startswith(b"honest-output-0123456789")
        assert sandbox.run(THIEF).stdout == b"searched True\n"
        called = sandbox.call("def same(text): return text", "same", ["honest-output-" + "0123456789" * 200])
        assert called.succeeded
        assert sandbox.run(THIEF).stdout == b"searched True\n"
