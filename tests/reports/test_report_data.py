"""Tests of the data of a report against ledger records and hand-computed numbers."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from config.schema.errors import ConfigError
from envs.group import SampledCompletion
from tests.episodes import failed_episode, rewritten_episode, tool_episode
from tests.groups import make_completion, make_group
from tests.reports.synthetic_run import HOSTILE_TEXTS, RunSpec, write_run_folder
from tests.script_runner import ROOT
from torchgrpo.evaluation.statistics import paired_test
from torchgrpo.monitoring.ledger_record import GroupFate, TokenValues, group_to_record
from torchgrpo.monitoring.ledger_storage import parse_record, read_records
from torchgrpo.reports import completion_selection
from torchgrpo.reports.chats import chat_data
from torchgrpo.reports.completion_selection import find_flips, group_steps, select_completions
from torchgrpo.reports.curves import chart_layout, curve_data
from torchgrpo.reports.evaluations import compare_first_and_last, problem_success_rates
from torchgrpo.reports.histograms import histogram_data
from torchgrpo.reports.html_page import render_page
from torchgrpo.reports.ledger_columns import mean_advantage, read_columns, select_ledger_files
from torchgrpo.reports.report import build_report_data, write_report
from torchgrpo.reports.rollouts import token_data
from torchgrpo.reports.run_folder import RunFolder
from torchgrpo.reports.timeline import MAX_ENGINE_ROWS, MAX_SEGMENTS, limit_segments, merge_intervals, timeline_data
from torchgrpo.reports.token_strings import make_token_decoder, tokenizer_file


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_folder(tmp_path_factory.mktemp("report") / "run", RunSpec(steps=12, evaluate=6))


@pytest.fixture(scope="module")
def data(run_dir: Path) -> dict[str, Any]:
    return build_report_data(run_dir)


def read_page_data(path: Path) -> dict[str, Any]:
    """Returns the data of a page; as in a browser, the first `</script>` ends them."""
    text = path.read_text().split('<script type="application/json" id="data">')[1]
    return dict(json.loads(text.split("</script>")[0]))


def test_columns_equal_the_records(run_dir: Path) -> None:
    columns, records = read_columns(select_ledger_files(run_dir)), list(read_records(run_dir))
    pairs = [(record, one) for record in records for one in record["completions"]]
    assert len(columns.completions["score"]) == len(pairs) == (12 * 4 + 3 * 12) * 4
    for index, (record, one) in enumerate(pairs):
        assert columns.completions["score"][index] == one["verdict"]["score"]
        assert columns.completions["length"][index] == len(one["token_ids"])
        assert columns.completions["characters"][index] == len(one["text"])
        group = columns.completions["group"][index]
        assert columns.prompts[columns.groups["prompt"][group]] == record["prompt_id"]
        assert columns.sets[columns.groups["set"][group]] == record["set"]
        age = columns.completions["age"][index]
        versions = one["policy_versions"]
        assert math.isnan(age) if record["set"] else age == record["trained_at"] - versions[0]


def test_shown_completions_equal_the_records(data: dict[str, Any], run_dir: Path) -> None:
    rollouts = data["rollouts"]
    records = {(record["set"], record["iteration"], record["group_id"]): record for record in read_records(run_dir)}
    shown, groups = rollouts["completions"], rollouts["groups"]
    assert len(shown["text"]) == rollouts["totals"]["completions"] == (12 * 4 + 3 * 12) * 4
    for row, group in enumerate(shown["group"]):
        key = (rollouts["sets"][groups["set"][group]], groups["iteration"][group], int(groups["id"][group]))
        one = records[key]["completions"][shown["sample"][row]]
        assert one["text"] == shown["text"][row] and one["verdict"]["score"] == shown["score"][row]
        prompt = rollouts["prompts"][groups["prompt"][group]]
        assert rollouts["texts"][prompt["messages"][1][1]] == records[key]["messages"][1]["content"]
        if row in rollouts["tokens"]:
            assert len(rollouts["tokens"][row]["strings"]) == len(one["token_ids"])


def test_token_strings_come_from_the_tokenizer_of_the_run(data: dict[str, Any], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    decode_tokens, reason = make_token_decoder({"model.name": str(ROOT / "torchgrpo" / "models" / "quickstart")})
    assert decode_tokens is not None and reason == ""
    tokenizer = Tokenizer.from_file(str(ROOT / "torchgrpo" / "models" / "quickstart" / "tokenizer.json"))
    ids = tokenizer.encode("12+30=").ids
    assert "".join(decode_tokens(ids)) == tokenizer.decode(ids, skip_special_tokens=False)
    assert data["rollouts"]["tokens"]
    decode_tokens, reason = make_token_decoder({"model.name": "nobody/nothing"})
    assert decode_tokens is None and "nobody/nothing" in reason
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(f"model:\n  name: {ROOT}/torchgrpo/models/quickstart\n")
    assert tokenizer_file(str(tmp_path)) == ROOT / "torchgrpo" / "models" / "quickstart" / "tokenizer.json"


def test_budget_bounds_the_texts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = read_columns(select_ledger_files(run_dir))
    steps = group_steps(columns, [])
    monkeypatch.setattr(completion_selection, "TEXT_BYTES", 12_000)
    monkeypatch.setattr(completion_selection, "MAX_TOKENS", 200)
    selection = select_completions(columns, steps)
    sizes = columns.completions["characters"] + 80
    assert 6_000 < sizes[selection.completions].sum() <= 12_000
    assert 0 < columns.completions["length"][list(selection.with_tokens)].sum() <= 200
    assert set(selection.with_tokens) <= set(selection.completions.tolist())
    assert 0 < len(selection.flips) < selection.num_flips
    assert np.array_equal(selection.completions, select_completions(columns, steps).completions)
    least, most = completion_selection.find_step_extremes(columns, steps).T
    for step, low, high in zip(range(1, 13), least, most, strict=True):
        mask = columns.is_training & (steps[columns.completions["group"]] == step)
        scores = columns.completions["score"]
        assert (scores[low], scores[high]) == (scores[mask].min(), scores[mask].max()) and mask[low] and mask[high]


def test_flip_is_a_prompt_whose_first_and_last_group_differ(run_dir: Path) -> None:
    columns = read_columns(select_ledger_files(run_dir))
    flips = {(flip.set, flip.prompt): flip for flip in find_flips(columns, group_steps(columns, []))}
    rates: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for record in read_records(run_dir):
        key = (columns.sets.index(record["set"]), columns.prompts.index(record["prompt_id"]))
        mean = float(np.mean([one["verdict"]["success"] for one in record["completions"]]))
        rates.setdefault(key, []).append((record["iteration"], record["group_id"], mean))  # type: ignore[arg-type]
    expected = {}
    for key, group_rates in rates.items():
        ends = [rate[-1] >= 0.5 for rate in (min(group_rates), max(group_rates))]
        if ends[0] != ends[1]:
            expected[key] = ends[1]
    assert {key: flip.to_right for key, flip in flips.items()} == expected and len(expected) > 3
    for flip in flips.values():
        assert (columns.completions["success"][flip.last] == 1) == flip.to_right
        assert (columns.completions["success"][flip.first] == 1) != flip.to_right


def test_paired_test_uses_the_same_problems(run_dir: Path) -> None:
    columns = read_columns(select_ledger_files(run_dir))
    means = []
    for iteration in (0, 12):
        records = [record for record in read_records(run_dir, "eval") if record["iteration"] == iteration]
        means.append(
            {each["prompt_id"]: np.mean([one["verdict"]["success"] for one in each["completions"]]) for each in records}
        )
        assert problem_success_rates(columns, "sums", iteration) == means[-1]
    (comparison,) = compare_first_and_last(columns)
    expected = paired_test([means[0][key] for key in sorted(means[0])], [means[1][key] for key in sorted(means[0])])
    assert (comparison["from"], comparison["to"], comparison["problems"], comparison["summary"]) == (
        0,
        12,
        12,
        expected.summary,
    )
    assert comparison["p"] == pytest.approx(expected.p_value, rel=1e-4)


def test_histograms_count_each_completion_once(run_dir: Path) -> None:
    length, age, reward = histogram_data(read_columns(select_ledger_files(run_dir)))
    assert [third["count"] for third in reward["thirds"]] == [4 * 4 * 4] * 3
    scores = [one["verdict"]["score"] for record in read_records(run_dir, "train") for one in record["completions"]]
    assert reward["thirds"][0]["mean"] == pytest.approx(np.mean(scores[:64]), abs=1e-5)
    assert reward["edges"] == [-0.5, 0.5, 1.5] and age["edges"] == [-0.5, 0.5, 1.5]
    assert all(sum(third["shares"]) == pytest.approx(1, abs=1e-3) for third in length["thirds"])


def test_intervals_are_merged() -> None:
    spans = np.array([[5.0, 6.0], [0.0, 2.0], [1.0, 3.0], [3.0, 4.0], [5.5, 5.7]])
    assert merge_intervals(spans).tolist() == [[0.0, 4.0], [5.0, 6.0]]
    assert limit_segments(merge_intervals(spans), 6.0, MAX_SEGMENTS).tolist() == [[0.0, 4.0], [5.0, 1.0]]


def test_each_engine_has_a_row(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", RunSpec(engines=3))
    data = timeline_data(RunFolder.read(run), read_columns(select_ledger_files(run)))
    assert data is not None
    titles = [row["title"] for row in data["rows"]]
    assert titles[:4] == [*(f"engine {number} (CPU)" for number in range(3)), "rewards: score"]
    assert "learner (GPU 0): collect" in titles and "learner (GPU 0): optimize" in titles
    counts = [row["count"] for row in data["rows"] if row["key"] == "generate"]
    assert sum(counts) == next(row["count"] for row in data["rows"] if row["key"] == "score")


def test_many_engines_share_a_row(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", RunSpec(engines=MAX_ENGINE_ROWS + 1))
    data = timeline_data(RunFolder.read(run), read_columns(select_ledger_files(run)))
    assert data is not None
    engine_rows = [row for row in data["rows"] if row["key"] == "generate"]
    assert [row["title"] for row in engine_rows] == [f"{MAX_ENGINE_ROWS + 1} engines"]


def test_long_timeline_keeps_its_busy_seconds() -> None:
    starts = np.arange(3 * MAX_SEGMENTS) * 2.0
    intervals = np.stack([starts, starts + 0.5], axis=1)
    segments = limit_segments(intervals, starts[-1] + 2, MAX_SEGMENTS)
    assert len(segments) == MAX_SEGMENTS
    assert segments[:, 1].sum() == pytest.approx(0.5 * len(starts))
    assert segments[:, 1].tolist() == pytest.approx([1.5] * MAX_SEGMENTS)


def test_curves_of_a_long_run_are_means() -> None:
    rows: list[dict[str, Any]] = [
        {"optimizer_step": step, "reward/mean": float(step), "grad_norm": math.inf if step == 2 else 1.0, "name": "x"}
        for step in range(1, 11)
    ]
    data = curve_data(rows, [{"optimizer_step": 0, "eval/a/pass@1": 0.123456789, "eval/a/score": math.nan}], points=4)
    assert data["stride"] == 3 and data["x"]["step"] == [2, 5, 8, 10]
    assert data["series"] == {"reward/mean": [2, 5, 8, 10], "grad_norm": [1, 1, 1, 1]}
    assert data["eval"] == {"eval/a/pass@1": [[0, 0.12346]]}


def test_each_metric_is_in_one_chart(data: dict[str, Any], run_dir: Path) -> None:
    names = [name for section in data["layout"] for chart in section["charts"] for name in chart["metrics"]]
    assert len(names) == len(set(names))
    logged = {name for row in RunFolder.read(run_dir).steps for name in row}
    assert logged - set(names) == {"optimizer_step", "age/histogram/0"}
    assert chart_layout(["reward/my_component"])[0]["charts"][0]["title"] == "Reward components"
    (learning,) = chart_layout(["reward/zero_variance_groups"])
    assert "no gradient" in learning["charts"][0]["about"]["reward/zero_variance_groups"]
    (other,) = chart_layout(["new/thing"])
    assert other["folded"] and other["charts"] == [
        {"title": "new/thing", "unit": "", "metrics": ["new/thing"], "about": {"new/thing": ""}}
    ]


def test_settings_are_the_difference_from_the_defaults(data: dict[str, Any]) -> None:
    settings = {key: (value, default) for key, value, default in data["run"]["settings"]}
    assert settings["optimizer.lr"] == (1e-4, 1e-6)
    assert settings["env.options.max_operand"] == (49, "")
    assert "train.epochs" not in settings
    assert data["run"]["command"] == "python grpo.py optimizer.lr=1e-4"


def test_no_text_ends_the_script_block(tmp_path: Path) -> None:
    path = write_report(write_run_folder(tmp_path / "run", RunSpec(steps=4, evaluate=0, hostile=True)))
    page = path.read_text()
    assert page.count("<script") == 2 and "<!--" not in page.split("<body>")[1]
    texts = set(read_page_data(path)["rollouts"]["completions"]["text"])
    assert {text[:6000] for text in HOSTILE_TEXTS} <= texts
    assert re.search(r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+';", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_title_is_escaped() -> None:
    assert b"<title>&lt;b&gt;</title>" in render_page("<b>", {"kind": "run"})


def test_partial_lines_are_skipped(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", RunSpec(steps=4, evaluate=0))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"optimizer_step": 5, "reward/me')
    with (run / "rollouts" / "train_000005.jsonl").open("w") as file:
        file.write('{"kind": "train", "ite')
    data = read_page_data(write_report(run))
    assert data["run"]["steps"] == 4 and data["rollouts"]["totals"]["groups"] == 16


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not the folder of a run \(metrics.jsonl is missing\)"):
        write_report(tmp_path)


def test_files_of_a_large_ledger_are_selected_evenly(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for number in range(1, 11):
        (folder / f"train_{number:06d}.jsonl.zst").write_bytes(b"x" * 100)
    (folder / "train_000011.jsonl").write_bytes(b"x" * 300)
    (folder / "eval_sums_000004.jsonl.zst").write_bytes(b"x" * 100)
    assert len(select_ledger_files(tmp_path)) == 12
    names = [path.name for path in select_ledger_files(tmp_path, limit=400)]
    assert names[0] == "train_000001.jsonl.zst" and names[-1] == "train_000011.jsonl"
    assert "eval_sums_000004.jsonl.zst" in names and len(names) == 5


def test_records_of_real_groups_are_read(tmp_path: Path) -> None:
    with_env_tokens = make_completion(
        4, 1.0, {"accuracy": 1.0}, sampled_mask=[True, False, False, True], versions=[2, 3, 3, 4]
    )
    group = make_group(7, [with_env_tokens, make_completion(4, 0.0)], unselected_candidates=[make_completion(2, 0.5)])
    row = np.array([0.25, 0.5, -0.5, 0.75], dtype=np.float32)
    values = TokenValues([[1.0, 0.0, 0.0, 3.0], -1.0], [True, True], np.tile(row, 2), np.tile(abs(row), 2))
    lines = [
        group_to_record(group, GroupFate("trained", 1, optimizer_steps=[5], trained_at=5, token_values=values)),
        group_to_record(group, GroupFate("evaluated", 1, eval_set="sums")),
    ]
    path = tmp_path / "train_000001.jsonl"
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    path.write_bytes(b"".join(orjson.dumps(line, option=option) for line in lines))
    columns = read_columns([path])
    assert columns.completions["age"].tolist()[:2] == [2.0, 5.0] and np.isnan(columns.completions["age"][2:]).all()
    assert columns.completions["advantage"].tolist()[:2] == [2.0, -1.0]
    assert np.isnan(columns.completions["advantage"][2:]).all()
    first, second, _ = parse_record(path.read_bytes().splitlines()[0])["completions"]
    shown = token_data(first, lambda ids: [str(each) for each in ids])
    assert shown == {
        "strings": ["1", "2", "3", "4"],
        "advantage": [1, 0, 0, 3],
        "log_ratio": [0.25, 0.5, -0.5, 0.75],
        "entropy": [0.25, 0.5, 0.5, 0.75],
        "sampled": [1, 0, 0, 1],
    }
    assert token_data(second, lambda ids: ["x"] * len(ids))["advantage"] == -1
    assert "sampled" not in token_data(second, lambda ids: ["x"] * len(ids))
    (untrained, *_) = parse_record(path.read_bytes().splitlines()[1])["completions"]
    assert set(token_data(untrained, lambda ids: ["x"] * len(ids))) == {"strings", "sampled"}


def record_of(completion: SampledCompletion) -> dict[str, Any]:
    """Returns a completion as a record of the ledger has it."""
    record = group_to_record(make_group(1, [completion]), GroupFate("stale", 1))
    completions: list[dict[str, Any]] = parse_record(orjson.dumps(record))["completions"]
    return completions[0]


def test_episode_has_turns_calls_and_replies() -> None:
    chat = chat_data(record_of(tool_episode()))
    assert chat["turns"][0] == {
        "text": "I multiply.",
        "reasoning": "12 * 7",
        "calls": [
            ["mul(a=12, b=7)", "84", ""],
            ['lookup(query="84", deep={"limit": null})', "nothing\nfound", "error"],
        ],
        "malformed": 1,
        "opening": [],
        "replies": [["tool", "no JSON"]],
        "reward": 0.25,
        "engine_s": 0.5,
        "env_s": 0.125,
        "start_s": 0.0,
        "tokens": [0, 4],
        "new_sequence": False,
    }
    assert [chat["turns"][1][name] for name in ("text", "calls", "tokens")] == ["84", [], [7, 9]]
    assert (chat["sequences"], chat["error"]) == (1, "")
    rewritten = chat_data(record_of(rewritten_episode()))
    assert [turn["new_sequence"] for turn in rewritten["turns"]] == [False, False, True]
    assert rewritten["sequences"] == 2
    assert chat_data(record_of(failed_episode()))["error"] == "Game.step raised KeyError: 'board'"


def test_texts_of_an_episode_are_bounded() -> None:
    episode = failed_episode()
    reply = {"role": "user", "content": "long " * 2000}
    episode.turns = [replace(episode.turns[0], replies=(reply,)) for _ in range(100)]
    chat = chat_data(record_of(episode))
    (text,) = {text for turn in chat["turns"] for _, text in turn["replies"]}
    assert text == f"{reply['content'][:200]} … (9800 characters more)"


def test_report_has_the_chats_of_episodes_only(tmp_path: Path, data: dict[str, Any]) -> None:
    run = write_run_folder(tmp_path / "run", RunSpec(steps=4, evaluate=0, episodes=True))
    page = read_page_data(write_report(run))["rollouts"]
    assert len(page["chats"]) == len(page["completions"]["text"]) == 4 * 4 * 4
    assert set(page["completions"]["text"]) == {""}
    assert {chat["turns"][0]["text"] for chat in page["chats"].values()} >= {"I multiply.", "40", "5"}
    assert data["rollouts"]["chats"] == {} and "" not in data["rollouts"]["completions"]["text"]
    sections = {section["title"]: section["charts"] for section in build_report_data(run)["layout"]}
    titles = [chart["title"] for chart in sections["Episodes"]]
    assert titles == ["Reward by turn", "Ends", "Seconds", "Tool calls", "Failed tool calls"]
    assert "Episodes" not in {section["title"] for section in data["layout"]}


def test_the_mean_advantage_is_that_of_sampled_tokens() -> None:
    assert mean_advantage({"advantage": [0.5, 0.0, 0.0, 1.5], "sampled_mask": [True, False, False, True]}) == 1.0
    assert mean_advantage({"advantage": [0.5, 1.0], "sampled_mask": []}) == 0.75
    assert mean_advantage({"advantage": [], "sampled_mask": []}) == 0.0
    assert mean_advantage({"advantage": -0.5, "sampled_mask": [True, False]}) == -0.5
