"""What a report says, against the records it was made of, and against numbers worked out by hand."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from config.schema.errors import ConfigError
from envs.example import Completion
from tests.groups import make_completion, make_group
from tests.reports.made_run import HOSTILE, Made, make_run
from tests.scripts import ROOT
from torchgrpo.evaluation.statistics import paired_test
from torchgrpo.monitoring.ledger_line import Fate, TokenValues, record_of
from torchgrpo.monitoring.ledger_storage import parsed, read_records
from torchgrpo.reports import selection
from torchgrpo.reports.columns import columns_of, read_files
from torchgrpo.reports.curves import curves, layout
from torchgrpo.reports.document import document
from torchgrpo.reports.evaluations import first_against_last, success_of_problems
from torchgrpo.reports.histograms import histograms
from torchgrpo.reports.pieces import pieces_of_run, tokenizer_file
from torchgrpo.reports.report import report_data, write_report
from torchgrpo.reports.rollouts import token_values
from torchgrpo.reports.run_folder import RunFolder
from torchgrpo.reports.selection import flips, select, steps_of_groups
from torchgrpo.reports.timeline import MOST_ENGINES, MOST_SEGMENTS, drawn_segments, timeline, union


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run", Made(steps=12, evaluate=6))


@pytest.fixture(scope="module")
def data(made: Path) -> dict[str, Any]:
    return report_data(made)


def embedded(path: Path) -> dict[str, Any]:
    """The data in a page, read as a browser does: up to the first end of a script."""
    text = path.read_text().split('<script type="application/json" id="data">')[1]
    return dict(json.loads(text.split("</script>")[0]))


def test_columns_are_those_of_the_records(made: Path) -> None:
    columns, records = columns_of(read_files(made)), list(read_records(made))
    flat = [(record, one) for record in records for one in record["completions"]]
    assert len(columns.completions["score"]) == len(flat) == (12 * 4 + 3 * 12) * 4
    for place, (record, one) in enumerate(flat):
        assert columns.completions["score"][place] == one["verdict"]["score"]
        assert columns.completions["length"][place] == len(one["token_ids"])
        assert columns.completions["characters"][place] == len(one["text"])
        group = columns.completions["group"][place]
        assert columns.prompts[columns.groups["prompt"][group]] == record["prompt_id"]
        assert columns.sets[columns.groups["set"][group]] == record["set"]
        age = columns.completions["age"][place]
        versions = one["policy_versions"]
        assert math.isnan(age) if record["set"] else age == record["trained_at"] - versions[0]


def test_what_is_shown_is_what_was_written(data: dict[str, Any], made: Path) -> None:
    rollouts = data["rollouts"]
    records = {
        (record["set"], record["iteration"], record["group_id"]): record for record in read_records(made)
    }
    shown, groups = rollouts["completions"], rollouts["groups"]
    assert len(shown["text"]) == rollouts["of"]["completions"] == (12 * 4 + 3 * 12) * 4
    for place, group in enumerate(shown["group"]):
        key = (rollouts["sets"][groups["set"][group]], groups["iteration"][group], int(groups["id"][group]))
        one = records[key]["completions"][shown["sample"][place]]
        assert one["text"] == shown["text"][place] and one["verdict"]["score"] == shown["score"][place]
        prompt = rollouts["prompts"][groups["prompt"][group]]
        assert rollouts["texts"][prompt["messages"][1][1]] == records[key]["messages"][1]["content"]
        if place in rollouts["tokens"]:
            assert len(rollouts["tokens"][place]["pieces"]) == len(one["token_ids"])


def test_tokens_are_cut_by_the_tokenizer_of_the_run(data: dict[str, Any], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    pieces, why = pieces_of_run({"model.name": str(ROOT / "torchgrpo" / "models" / "quickstart")})
    assert pieces is not None and why == ""
    tokenizer = Tokenizer.from_file(str(ROOT / "torchgrpo" / "models" / "quickstart" / "tokenizer.json"))
    ids = tokenizer.encode("12+30=").ids
    assert "".join(pieces(ids)) == tokenizer.decode(ids, skip_special_tokens=False)
    assert data["rollouts"]["tokens"]
    pieces, why = pieces_of_run({"model.name": "nobody/nothing"})
    assert pieces is None and "nobody/nothing" in why
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(f"model:\n  name: {ROOT}/torchgrpo/models/quickstart\n")
    assert tokenizer_file(str(tmp_path)) == ROOT / "torchgrpo" / "models" / "quickstart" / "tokenizer.json"


def test_a_budget_bounds_the_texts(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(read_files(made))
    steps = steps_of_groups(columns, [])
    monkeypatch.setattr(selection, "TEXT_BYTES", 12_000)
    monkeypatch.setattr(selection, "TOKENS", 200)
    chosen = select(columns, steps)
    sizes = columns.completions["characters"] + 80
    assert 6_000 < sizes[chosen.completions].sum() <= 12_000
    assert 0 < columns.completions["length"][list(chosen.with_tokens)].sum() <= 200
    assert set(chosen.with_tokens) <= set(chosen.completions.tolist())
    assert 0 < len(chosen.flips) < chosen.all_flips
    assert np.array_equal(chosen.completions, select(columns, steps).completions)
    least, most = selection.extremes_of_steps(columns, steps).T
    for step, low, high in zip(range(1, 13), least, most, strict=True):
        mine = columns.training & (steps[columns.completions["group"]] == step)
        scores = columns.completions["score"]
        assert (
            (scores[low], scores[high]) == (scores[mine].min(), scores[mine].max())
            and mine[low]
            and mine[high]
        )


def test_a_flip_is_a_prompt_whose_first_and_last_group_differ(made: Path) -> None:
    columns = columns_of(read_files(made))
    found = {(flip.set, flip.prompt): flip for flip in flips(columns, steps_of_groups(columns, []))}
    rates: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for record in read_records(made):
        key = (columns.sets.index(record["set"]), columns.prompts.index(record["prompt_id"]))
        mean = float(np.mean([one["verdict"]["success"] for one in record["completions"]]))
        rates.setdefault(key, []).append((record["iteration"], record["group_id"], mean))  # type: ignore[arg-type]
    expected = {}
    for key, seen in rates.items():
        ends = [rate[-1] >= 0.5 for rate in (min(seen), max(seen))]
        if ends[0] != ends[1]:
            expected[key] = ends[1]
    assert {key: flip.to_right for key, flip in found.items()} == expected and len(expected) > 3
    for flip in found.values():
        assert (columns.completions["success"][flip.last] == 1) == flip.to_right
        assert (columns.completions["success"][flip.first] == 1) != flip.to_right


def test_the_paired_test_is_of_the_same_problems(made: Path) -> None:
    columns = columns_of(read_files(made))
    means = []
    for iteration in (0, 12):
        records = [record for record in read_records(made, "eval") if record["iteration"] == iteration]
        means.append(
            {
                each["prompt_id"]: np.mean([one["verdict"]["success"] for one in each["completions"]])
                for each in records
            }
        )
        assert success_of_problems(columns, "sums", iteration) == means[-1]
    (told,) = first_against_last(columns)
    expected = paired_test(
        [means[0][key] for key in sorted(means[0])], [means[1][key] for key in sorted(means[0])]
    )
    assert (told["from"], told["to"], told["problems"], told["words"]) == (0, 12, 12, expected.words)
    assert told["p"] == pytest.approx(expected.p_value, rel=1e-4)


def test_histograms_count_every_completion_once(made: Path) -> None:
    length, age, reward = histograms(columns_of(read_files(made)))
    assert [part["count"] for part in reward["parts"]] == [4 * 4 * 4] * 3
    scores = [
        one["verdict"]["score"] for record in read_records(made, "train") for one in record["completions"]
    ]
    assert reward["parts"][0]["mean"] == pytest.approx(np.mean(scores[:64]), abs=1e-5)
    assert reward["edges"] == [-0.5, 0.5, 1.5] and age["edges"] == [-0.5, 0.5, 1.5]
    assert all(sum(part["shares"]) == pytest.approx(1, abs=1e-3) for part in length["parts"])


def test_intervals_are_united() -> None:
    spans = np.array([[5.0, 6.0], [0.0, 2.0], [1.0, 3.0], [3.0, 4.0], [5.5, 5.7]])
    assert union(spans).tolist() == [[0.0, 4.0], [5.0, 6.0]]
    assert drawn_segments(union(spans), 6.0, MOST_SEGMENTS).tolist() == [[0.0, 4.0], [5.0, 1.0]]


def test_every_engine_has_a_lane(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(engines=3))
    found = timeline(RunFolder.read(run), columns_of(read_files(run)))
    assert found is not None
    titles = [lane["title"] for lane in found["lanes"]]
    assert titles[:4] == [*(f"engine {number} (CPU)" for number in range(3)), "rewards: score"]
    assert "learner (GPU 0): collect" in titles and "learner (GPU 0): learn" in titles
    drawn = [lane["count"] for lane in found["lanes"] if lane["key"] == "generate"]
    assert sum(drawn) == next(lane["count"] for lane in found["lanes"] if lane["key"] == "score")


def test_many_engines_share_a_lane(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(engines=MOST_ENGINES + 1))
    found = timeline(RunFolder.read(run), columns_of(read_files(run)))
    assert found is not None
    drawn = [lane for lane in found["lanes"] if lane["key"] == "generate"]
    assert [lane["title"] for lane in drawn] == [f"{MOST_ENGINES + 1} engines"]


def test_a_long_timeline_keeps_its_seconds_of_work() -> None:
    starts = np.arange(3 * MOST_SEGMENTS) * 2.0
    united = np.stack([starts, starts + 0.5], axis=1)
    drawn = drawn_segments(united, starts[-1] + 2, MOST_SEGMENTS)
    assert len(drawn) == MOST_SEGMENTS
    assert drawn[:, 1].sum() == pytest.approx(0.5 * len(starts))
    assert drawn[:, 1].tolist() == pytest.approx([1.5] * MOST_SEGMENTS)


def test_curves_of_a_long_run_are_means() -> None:
    rows: list[dict[str, Any]] = [
        {
            "optimizer_step": step,
            "reward/mean": float(step),
            "grad_norm": math.inf if step == 2 else 1.0,
            "name": "x",
        }
        for step in range(1, 11)
    ]
    found = curves(
        rows, [{"optimizer_step": 0, "eval/a/pass@1": 0.123456789, "eval/a/score": math.nan}], points=4
    )
    assert found["stride"] == 3 and found["x"]["step"] == [2, 5, 8, 10]
    assert found["series"] == {"reward/mean": [2, 5, 8, 10], "grad_norm": [1, 1, 1, 1]}
    assert found["eval"] == {"eval/a/pass@1": [[0, 0.12346]]}


def test_every_metric_has_its_place_once(data: dict[str, Any], made: Path) -> None:
    names = [name for part in data["layout"] for chart in part["charts"] for name in chart["metrics"]]
    assert len(names) == len(set(names))
    logged = {name for row in RunFolder.read(made).steps for name in row}
    assert logged - set(names) == {"optimizer_step", "age/histogram/0"}
    assert layout(["reward/my_part"])[0]["charts"][0]["title"] == "Parts of the reward"
    (learning,) = layout(["reward/zero_variance_groups"])
    assert "they teach nothing" in learning["charts"][0]["about"]["reward/zero_variance_groups"]
    (other,) = layout(["new/thing"])
    assert other["folded"] and other["charts"] == [
        {"title": "new/thing", "unit": "", "metrics": ["new/thing"], "about": {"new/thing": ""}}
    ]


def test_settings_are_the_difference_from_the_defaults(data: dict[str, Any]) -> None:
    told = {key: (value, default) for key, value, default in data["run"]["settings"]}
    assert told["optimizer.lr"] == (1e-4, 1e-6)
    assert told["env.options.max_operand"] == (49, "")
    assert "train.epochs" not in told
    assert data["run"]["command"] == "python grpo.py optimizer.lr=1e-4"


def test_no_text_ends_the_block_that_it_stands_in(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", Made(steps=4, evaluate=0, hostile=True)))
    page = path.read_text()
    assert page.count("<script") == 2 and "<!--" not in page.split("<body>")[1]
    texts = set(embedded(path)["rollouts"]["completions"]["text"])
    assert {text[:6000] for text in HOSTILE} <= texts
    assert re.search(r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+';", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_a_title_is_text() -> None:
    assert b"<title>&lt;b&gt;</title>" in document("<b>", {"kind": "run"})


def test_a_line_that_was_being_written_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=4, evaluate=0))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"optimizer_step": 5, "reward/me')
    with (run / "rollouts" / "train_000005.jsonl").open("w") as file:
        file.write('{"kind": "train", "ite')
    told = embedded(write_report(run))
    assert told["run"]["steps"] == 4 and told["rollouts"]["of"]["groups"] == 16


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run has been here \(metrics.jsonl is missing\)"):
        write_report(tmp_path)


def test_of_a_ledger_that_is_too_long_files_are_read_evenly(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for number in range(1, 11):
        (folder / f"train_{number:06d}.jsonl.zst").write_bytes(b"x" * 100)
    (folder / "train_000011.jsonl").write_bytes(b"x" * 300)
    (folder / "eval_sums_000004.jsonl.zst").write_bytes(b"x" * 100)
    assert len(read_files(tmp_path)) == 12
    names = [path.name for path in read_files(tmp_path, limit=400)]
    assert names[0] == "train_000001.jsonl.zst" and names[-1] == "train_000011.jsonl"
    assert "eval_sums_000004.jsonl.zst" in names and len(names) == 5


def test_records_of_real_groups_are_understood(tmp_path: Path) -> None:
    by_env = make_completion(
        4, 1.0, {"accuracy": 1.0}, sampled=[True, False, False, True], versions=[2, 3, 3, 4]
    )
    trained = make_group(7, [by_env, make_completion(4, 0.0)], left_out=[make_completion(2, 0.5)])
    for one in trained.candidates:
        one.shown = Completion(one.text, one.num_drawn, False)
    row = np.array([0.25, 0.5, -0.5, 0.75], dtype=np.float32)
    values = TokenValues([[1.0, 0.0, 0.0, 3.0], -1.0], [True, True], np.tile(row, 2), np.tile(abs(row), 2))
    lines = [
        record_of(trained, Fate("trained", 1, optimizer_steps=[5], trained_at=5, tokens=values)),
        record_of(trained, Fate("evaluated", 1, evaluated="sums")),
    ]
    path = tmp_path / "train_000001.jsonl"
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    path.write_bytes(b"".join(orjson.dumps(line, option=option) for line in lines))
    columns = columns_of([path])
    assert (
        columns.completions["age"].tolist()[:2] == [2.0, 5.0]
        and np.isnan(columns.completions["age"][2:]).all()
    )
    assert columns.completions["advantage"].tolist()[:2] == [1.0, -1.0]
    assert np.isnan(columns.completions["advantage"][2:]).all()
    first, second, _ = parsed(path.read_bytes().splitlines()[0])["completions"]
    shown = token_values(first, lambda ids: [str(each) for each in ids])
    assert shown == {
        "pieces": ["1", "2", "3", "4"],
        "advantage": [1, 0, 0, 3],
        "log_ratio": [0.25, 0.5, -0.5, 0.75],
        "entropy": [0.25, 0.5, 0.5, 0.75],
        "sampled": [1, 0, 0, 1],
    }
    assert token_values(second, lambda ids: ["x"] * len(ids))["advantage"] == -1
    assert "sampled" not in token_values(second, lambda ids: ["x"] * len(ids))
    (unseen, *_) = parsed(path.read_bytes().splitlines()[1])["completions"]
    assert set(token_values(unseen, lambda ids: ["x"] * len(ids))) == {"pieces", "sampled"}
