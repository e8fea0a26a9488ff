"""Command line of the self-test: reads FOLDER, starts the checks and returns the exit code."""

import sys
from pathlib import Path

from config.cli.command_line import escape_unencodable_characters
from config.schema.errors import EXIT_INTERRUPTED
from torchgrpo.selftest.main import run_selftest

USAGE = "usage: python -m torchgrpo.selftest [FOLDER]; selftest.json goes there, else into outputs/selftest"


def main(words: list[str]) -> int:
    """Runs the self-test; returns 1 if a check fails, 2 for a wrong command line."""
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
        return run_selftest(folder)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    escape_unencodable_characters()
    sys.exit(main(sys.argv[1:]))
