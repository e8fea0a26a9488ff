"""Command `python -m torchgrpo.reports RUN`: writes the report at low CPU priority."""

import os
import sys
from pathlib import Path

from torchgrpo.reports.report import write_report

if __name__ == "__main__":
    os.nice(19)
    write_report(Path(sys.argv[1]))
