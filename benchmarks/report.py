"""The report of a long run: seconds and memory to build it, its size, seconds until a browser shows it.

    python benchmarks/report.py [--steps 2000] [--completions 100000] [--folder FOLDER]

It makes a run's folder of that size (about 100 tokens a completion; minutes), builds its report in a process of its
own, and opens it in headless Chromium, where there is one. Beside each figure stands what it should stay under.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.reports.browser import CHROMIUM, browser  # noqa: E402
from tests.reports.made_run import Made, make_run  # noqa: E402

TARGETS = {"built in": "20 s", "peak memory": "2 GB", "file": "15 MB", "opened in": "2 s"}
OPENINGS = 5


BUILD = """
import sys; from pathlib import Path; from reports.report import write_report; write_report(Path(sys.argv[1]))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
"""At the priority of `run=report`; beside a run it has the lowest. Prints its own peak in KiB: what the system says of
a child holds that of the process that began it."""


def built(folder: Path) -> tuple[float, float, float]:
    """Seconds, those of the processor, and peak memory in GB, of the process that builds the report."""
    began = time.perf_counter()
    command = [sys.executable, "-c", BUILD, str(folder)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, used.ru_utime + used.ru_stime, int(told.split()[-1]) * 1024 / 1e9


def opened(path: Path) -> float:
    """Median seconds from asking for the page until it is there and the first frame was drawn."""
    seconds = []
    with browser() as chromium:
        for _ in range(OPENINGS):
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            began = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            seconds.append(time.perf_counter() - began)
            page.close()
    return sorted(seconds)[OPENINGS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--completions", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the run is made, or where it already is")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "run"
        if not folder.is_dir():
            of_step = given.completions // given.steps
            repeats = 10 if of_step % 10 == 0 else 1
            made = Made(
                given.steps, of_step // repeats, repeats, 100, evaluate=100, problems=200, prompts=2000
            )
            make_run(folder, made)
        seconds, busy, memory = built(folder)
        path = folder / "report.html"
        found = {
            "built in": f"{seconds:.1f} s ({busy:.1f} s CPU)",
            "peak memory": f"{memory:.2f} GB",
            "file": f"{path.stat().st_size / 1e6:.1f} MB",
            "opened in": f"{opened(path):.2f} s" if CHROMIUM else "no Chromium here",
        }
    for name, value in found.items():
        print(f"{name:<12} {value:<22} target: under {TARGETS[name]}")


if __name__ == "__main__":
    main()
