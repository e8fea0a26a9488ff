"""What a benchmark prints, and with `--write` puts into a page of docs/, between marks that name it."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


@dataclass(frozen=True)
class Recorded:
    """script: the file of the benchmark. page: the name of that in docs/."""

    script: str
    page: str

    @property
    def text(self) -> str:
        """What the page holds of it."""
        return self._parts()[1].strip()

    def print_or_write(self, about: str | None, text: Callable[[], str]) -> None:
        """As the command line says. about: what its help says."""
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=about, formatter_class=raw)
        parser.add_argument("--write", action="store_true")
        writes = parser.parse_args().write
        printed = text()
        if not writes:
            print(printed)
            return
        before, _, after = self._parts()
        self._path.write_text(f"{before}{self._begin}\n\n{printed}\n\n{END}{after}")

    @property
    def _path(self) -> Path:
        return ROOT / "docs" / self.page

    @property
    def _begin(self) -> str:
        return f"<!-- printed by benchmarks/{Path(self.script).name} -->"

    def _parts(self) -> tuple[str, str, str]:
        """Before the mark, between the marks, after them."""
        before, rest = self._path.read_text().split(self._begin)
        between, after = rest.split(END, 1)
        return before, between, after
