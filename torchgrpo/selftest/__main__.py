"""`python -m torchgrpo.selftest [FOLDER]`: tries every path of this machine, and writes selftest.json in FOLDER."""

import sys
from pathlib import Path

from config.cli.command_line import escape_what_a_terminal_lacks
from config.schema.errors import INTERRUPTED
from torchgrpo.selftest.main import selftest

USAGE = "usage: python -m torchgrpo.selftest [FOLDER]; selftest.json goes there, else into outputs/selftest"


def main(words: list[str]) -> int:
    """Return the exit code: 1 where something does not work, 2 for a wrong command line."""
    if len(words) > 1 or any(word.startswith("-") for word in words):
        print(USAGE, file=sys.stdout if words in (["-h"], ["--help"]) else sys.stderr)
        return 0 if words in (["-h"], ["--help"]) else 2
    folder = Path(words[0] if words else "outputs/selftest")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: {folder} cannot be made: {error.strerror}; name another folder", file=sys.stderr)
        return 2
    try:
        return selftest(folder)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    escape_what_a_terminal_lacks()
    sys.exit(main(sys.argv[1:]))
