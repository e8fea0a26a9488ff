"""Tests of summary.csv, which has a row for each run of a sweep."""

import csv
import json
from pathlib import Path

from torchgrpo.reports.sweep_report import TABLE_FILE, write_sweep


def write_run(folder: Path, name: str, overrides: list[str], rewards: list[float], outcome: str | None) -> None:
    run = folder / name
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in overrides))
    if rewards:
        rows = [
            {"optimizer_step": step, "reward/mean": reward, "time/elapsed_s": 2.0 * step}
            for step, reward in enumerate(rewards, start=1)
        ]
        rows.append({"optimizer_step": len(rewards), "eval/sums/pass@1": 0.5, "eval/sums/length": 3.0})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if outcome:
        (run / "summary.json").write_text(json.dumps({"outcome": outcome, "wall_time_s": 1.5}))


def test_table_has_a_row_for_failed_and_unstarted_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "0", ["optimizer.lr=1e-4", "policy=grpo"], [0.1, 0.6, 0.5], "finished")
    write_run(tmp_path, "1", ["optimizer.lr=3e-4", "policy=grpo"], [0.2], None)
    write_run(tmp_path, "10", ["+env.options.a=[1,2]"], [], "failed")
    write_run(tmp_path, "2", ["optimizer.lr=1e-3"], [], None)
    write_sweep(tmp_path)
    rows = list(csv.DictReader((tmp_path / TABLE_FILE).open()))
    assert [row["run"] for row in rows] == ["0", "1", "2", "10"]
    assert [row["optimizer.lr"] for row in rows] == ["1e-4", "3e-4", "1e-3", ""]
    assert rows[3]["env.options.a"] == "[1,2]"
    first = rows[0]
    assert (first["first_reward"], first["last_reward"], first["best_reward"]) == ("0.1", "0.5", "0.6")
    assert (first["outcome"], first["seconds"], first["optimizer_steps"]) == ("finished", "6.0", "3")
    assert first["eval/sums/pass@1"] == "0.5" and "eval/sums/length" not in first
    assert rows[1]["outcome"] == "no summary: killed, or still running"
    assert (rows[2]["outcome"], rows[3]["outcome"]) == ("did not start", "failed")
    assert rows[3]["last_reward"] == ""


def test_sweep_of_evaluations_keeps_the_names_of_its_runs(tmp_path: Path) -> None:
    for name in ("0", "1"):
        write_run(tmp_path, name, ["run=eval", f"model.name=m{name}"], [], "finished")
    write_sweep(tmp_path)
    header, *rows = csv.reader((tmp_path / TABLE_FILE).open())
    assert len(set(header)) == len(header)
    assert [dict(zip(header, row, strict=True))["run"] for row in rows] == ["0", "1"]


def test_folder_without_runs_gets_no_table(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    write_sweep(tmp_path)
    assert not (tmp_path / TABLE_FILE).exists()
