"""Tests of engines that are real vLLM servers: tokens, pushes, restarts, wrong settings."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from config.schema.errors import ConfigError
from envs.group import Sampling
from tests.rollout.recording import QUICKSTART
from tests.rollout.vllm_server import MISSING, VLLMServerProcess
from tests.script_runner import (
    ENVIRONMENT,
    compose_run_config,
    read_metrics,
    run_script,
    start_script,
    wait_for_output,
    wait_until,
)
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.engines.build_engines import build_engine
from torchgrpo.rollout.engines.interface import Engine, Request, Response, generate
from torchgrpo.training.model_loading import load_model, load_tokenizer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"a vLLM server needs {', '.join(MISSING)}"),
]
LIMITS = ("inference_model.max_tokens=448", "env.max_prompt_tokens=64")
GROUPS, REPEATS, ITERATIONS = 8, 4, 6
BATCHES = (
    f"env.num_envs={GROUPS}",
    f"env.repeats={REPEATS}",
    f"train.dialog_turns_per_batch={GROUPS * REPEATS}",
    f"train.total_dialog_turns={GROUPS * REPEATS * ITERATIONS}",
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    process = VLLMServerProcess(tmp_path_factory.mktemp("server") / "server.log")
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def server(process: VLLMServerProcess) -> VLLMServerProcess:
    """The server of all tests, which a test may kill if it starts it again."""
    process.wait_until_ready()
    return process


def start_engine(folder: Path, *settings: str) -> Engine:
    config = compose_run_config(*LIMITS, *settings)
    plan = make_plan(config, True, this_machine(folder), folder)
    return build_engine(config, load_tokenizer(config.model), plan, folder)


def http_settings(server: VLLMServerProcess, *more: str) -> tuple[str, ...]:
    return "inference_model.backend=http", f"inference_model.urls=[{server.url}]", *more


def changed_model(seed: int) -> PreTrainedModel:
    model = load_model(compose_run_config().model, torch.device("cpu"))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    return model


def flat_model(seed: int) -> PreTrainedModel:
    """Returns a model with almost uniform probabilities, so that few completions are short."""
    model = changed_model(seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.02)
    return model


def endless_model(seed: int) -> PreTrainedModel:
    """Returns a flat model that never samples its end token."""
    model = flat_model(seed)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 10.0  # a constant in the hidden states, which the end token meets
        head[:, 0] = 0.0
        head[model.config.eos_token_id, 0] = -30.0
    return model


def weights_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def test_tokens_scores_and_pushes_equal_those_of_the_engine_in_this_process(
    server: VLLMServerProcess, tmp_path: Path
) -> None:
    served = start_engine(tmp_path, *http_settings(server))
    local = start_engine(tmp_path, "inference_model.backend=vllm")
    samplings = [
        Sampling(max_tokens=24),
        Sampling(temperature=1.7, max_tokens=24),
        Sampling(temperature=1.5, top_p=0.9, top_k=20, min_p=0.02, max_tokens=24),
        Sampling(temperature=1.6, max_tokens=24, stop=("1", "2")),
    ]
    requests = [
        Request(4 * number + index, (5 + index, 6, 7 + number), 4, sampling, seed=100 * number + index)
        for number, sampling in enumerate(samplings)
        for index in range(4)
    ]
    sequences = [[1 + index * step % 250 for index in range(30)] for step in (3, 7)]
    try:
        for version in range(2):
            pairs = zip(generate(served, requests), generate(local, requests), strict=True)
            for one, other in (
                (a, b) for first, second in pairs for a, b in zip(first.completions, second.completions, strict=True)
            ):
                assert one.token_ids == other.token_ids
                assert one.finish_reason == other.finish_reason
                assert one.policy_versions == other.policy_versions == [version] * len(one.token_ids)
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            (ours,), (theirs,) = served.score(sequences).values(), local.score(sequences).values()
            for row, other_row in zip(ours.log_probs, theirs.log_probs, strict=True):
                assert row == pytest.approx(other_row, abs=1e-4)
            for engine in (served, local) if version == 0 else ():
                engine.load(weights_of(changed_model(1)), 1)
    finally:
        served.close()
        local.close()


@pytest.mark.parametrize("update", ["keep", "wait", "abort"])
def test_a_push_splits_the_versions_of_requests_in_flight(
    server: VLLMServerProcess, tmp_path: Path, update: str
) -> None:
    engine = start_engine(tmp_path, *http_settings(server, f"inference_model.update={update}"))
    old_weights, new_weights = (weights_of(endless_model(seed)) for seed in (1, 2))
    try:
        engine.load(old_weights, 1)
        # 64 sequences run at a time, for 448 steps; after the short one, those before it have tokens.
        for number in range(8):
            engine.submit(Request(number, (5, 6, 7), 32, Sampling(max_tokens=448), seed=100 * number))
            if number == 0:
                engine.submit(Request(8, (5, 6, 7), 1, Sampling(max_tokens=4), seed=800))
        responses: list[Response] = []
        while not any(response.request_id == 8 for response in responses):
            responses += engine.step(1.0)
        engine.load(new_weights, 2)
        while len(responses) < 9:
            responses += engine.step(1.0)
        completions = [one for response in responses for one in response.completions]
        spans = {tuple(version for version, _ in groupby(one.policy_versions)) for one in completions}
        assert spans <= {(1,), (2,), (1, 2)}
        assert ((1, 2) in spans) == (update != "wait")
        assert all(len(one.policy_versions) == len(one.token_ids) == len(one.log_probs) for one in completions)
        assert len(list((tmp_path / "weights").iterdir())) == 1
    finally:
        engine.close()
    assert not (tmp_path / "weights").exists()
    assert "http engines" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("inference_model.max_tokens=1000",), "accepts sequences of 512 tokens"),
        (("inference_model.dtype=bfloat16",), "computes in float32 instead of bfloat16"),
    ],
)
def test_a_server_with_other_settings_is_refused(
    server: VLLMServerProcess, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        start_engine(tmp_path, *http_settings(server, *settings))
    assert "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server" in str(error.value)
    assert QUICKSTART.name in str(error.value)


def test_a_restarted_server_gets_the_present_weights(server: VLLMServerProcess, tmp_path: Path) -> None:
    engine = start_engine(tmp_path, *http_settings(server))
    try:
        engine.load(weights_of(changed_model(1)), 1)
        request = Request(1, (5, 6, 7), 4, Sampling(temperature=1.7, max_tokens=24), seed=1)
        (before,) = generate(engine, [request])
        numbers = engine.engine_pids
        server.kill()
        server.start()
        server.wait_until_ready()  # with the weights of its files; the engine has noticed nothing
        (after,) = generate(engine, [request])
        assert engine.engine_pids != numbers
        assert [one.token_ids for one in after.completions] == [one.token_ids for one in before.completions]
        assert all(set(one.policy_versions) == {1} for one in after.completions)
    finally:
        engine.close()


@pytest.mark.parametrize("script", ["grpo.py", "grpo_async.py"])
def test_a_run_continues_after_its_server_was_killed_and_started_again(
    server: VLLMServerProcess, tmp_path: Path, script: str
) -> None:
    # Other weights than those of the server's files, and long completions, so that the kill interrupts some.
    model, run_dir, temporary = tmp_path / "model", tmp_path / "run", tmp_path / "temporary"
    flat_model(1).save_pretrained(model)
    load_tokenizer(compose_run_config().model).save_pretrained(model)
    temporary.mkdir()
    settings = (*BATCHES, "train.stale_groups=wait", "env.reward=tests.rewards:digits")
    long = (f"model.name={model}", "inference_model.max_tokens=400")
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    process = start_script(script, run_dir, *settings, *http_settings(server, *long), environment=environment)
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(read_metrics(run_dir)) >= 2, process)
    wait_until(lambda: server.pauses_while_running(REPEATS), process)
    server.kill()
    server.start()
    output = wait_for_output(process)
    assert process.returncode == 0, output
    (lost_groups,) = re.findall(r"is lost with (\d+) groups in flight", output)
    assert int(lost_groups) > 0, output
    assert "is back, with policy version" in output
    assert not (run_dir / "weights").exists()
    assert not list(temporary.iterdir())

    rows = read_metrics(run_dir)
    assert len(rows) == ITERATIONS
    # The weights of the server's files differ by several nats; one update of the learner by far less.
    bound = 1e-3 if script == "grpo.py" else 1.0
    assert all(row["logprob_diff/max"] < bound for row in rows)
    assert all(row.get("weight_check/max", 0.0) < 1e-3 for row in rows)
    undisturbed_dir = tmp_path / "undisturbed"
    run = run_script(script, undisturbed_dir, *settings, "inference_model.backend=transformers")
    assert run.returncode == 0, run.output
    max_age = 0 if script == "grpo.py" else compose_run_config().train.max_policy_age
    assert_each_group_was_trained_once(run_dir, undisturbed_dir, max_age)


def assert_each_group_was_trained_once(run_dir: Path, undisturbed_dir: Path, max_age: int) -> None:
    """Asserts that a run trained once on each group of an undisturbed run.

    max_age: of its tokens, in policy versions.
    """
    groups, others = (
        [group for group in read_records(folder, "train") if group["fate"] == "trained"]
        for folder in (run_dir, undisturbed_dir)
    )
    assert sorted(group["group_id"] for group in groups) == list(range(GROUPS * ITERATIONS))
    assert Counter(group["row"] for group in groups) == Counter(group["row"] for group in others)
    for group in groups:
        assert len(group["completions"]) == REPEATS
        for one in group["completions"]:
            ages = {group["iteration"] - 1 - version for version in one["policy_versions"]}
            assert len(one["policy_versions"]) == len(one["token_ids"]) == len(one["log_probs"])
            assert ages <= set(range(max_age + 1))
