"""`python -m torchgrpo.reports RUN`: the report of a run, made in a process that leaves the machine to others."""

import os
import sys
from pathlib import Path

from torchgrpo.reports.report import write_report

if __name__ == "__main__":
    os.nice(19)
    write_report(Path(sys.argv[1]))
