"""Tests that report, rollouts and diagnostics read run folders with former names."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from omegaconf import OmegaConf

from config.schema import former_names as names
from config.schema.rollouts import RolloutsConfig
from torchgrpo.monitoring.diagnostics import diagnose
from torchgrpo.monitoring.ledger_storage import ledger_files, read_lines
from torchgrpo.reports.report import build_report_data
from torchgrpo.run.jobs.rollouts import format_rollouts


def with_former_names(table: Mapping[str, str], record: dict[str, Any]) -> dict[str, Any]:
    former = {new: old for old, new in table.items()}
    return {former.get(name, name): value for name, value in record.items()}


def former_group(line: bytes) -> bytes:
    record = with_former_names(names.LEDGER_FIELDS, orjson.loads(line))
    record["completions"] = [with_former_names(names.COMPLETION_FIELDS, one) for one in record["completions"]]
    for completion in record["completions"]:
        completion["verdict"] = with_former_names(names.VERDICT_FIELDS, completion["verdict"])
    return orjson.dumps(record)


@pytest.fixture
def former_run(lockstep_run: Path, tmp_path: Path) -> Path:
    """Copies a run of the present code, and gives its files the former names."""
    run = tmp_path / "run"
    shutil.copytree(lockstep_run, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    former_rows = [with_former_names(names.METRICS, row) for row in rows]
    assert former_rows != rows
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in former_rows))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    former_events = {new: old for old, new in names.EVENTS.items()}
    for event in events:
        event["event"] = former_events.get(event["event"], event["event"])
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for file in ledger_files(run):
        text = b"".join(former_group(line) + b"\n" for line in read_lines(file.path))
        file.path.write_bytes(zstandard.compress(text) if file.path.suffix == ".zst" else text)
    settings = OmegaConf.to_container(OmegaConf.load(run / ".hydra" / "config.yaml"))
    assert isinstance(settings, dict)
    for old, new in names.KEYS.items():
        (section, _, name), (new_section, _, new_name) = old.rpartition("."), new.rpartition(".")
        fields = settings.setdefault(section, {}) if section else settings
        fields[name] = settings[new_section].pop(new_name)
    OmegaConf.save(OmegaConf.create(settings), run / ".hydra" / "config.yaml")
    return run


def test_rollouts_print_the_same(lockstep_run: Path, former_run: Path) -> None:
    filters = RolloutsConfig(limit=0)
    assert format_rollouts(former_run, filters) == format_rollouts(lockstep_run, filters)


def test_the_report_has_the_same_data(lockstep_run: Path, former_run: Path) -> None:
    former, present = build_report_data(former_run), build_report_data(lockstep_run)
    differing = [key for key in present["run"] if former["run"][key] != present["run"][key]]
    assert set(differing) <= {"name", "written_at"} and former | {"run": 0} == present | {"run": 0}


def test_diagnostics_find_the_same(lockstep_run: Path, former_run: Path) -> None:
    assert diagnose(former_run) == diagnose(lockstep_run)
