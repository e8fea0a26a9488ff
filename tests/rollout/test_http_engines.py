"""Tests of engines that are real `vllm serve` processes: tokens, pushes, restarts, wrong servers."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from config.schema.errors import ConfigError
from envs.group import Sampling
from tests.rollout.recording import QUICKSTART
from tests.rollout.vllm_server import MISSING, VLLMServerProcess
from tests.script_runner import compose_run_config, read_metrics, start_script, wait_for_output, wait_until
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.engines.build_engines import build_engine
from torchgrpo.rollout.engines.interface import Engine, Request, generate
from torchgrpo.training.model_loading import load_model, load_tokenizer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"a vLLM server needs {', '.join(MISSING)}"),
]
LIMITS = ("inference_model.max_tokens=448", "env.max_prompt_tokens=64")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    process = VLLMServerProcess(tmp_path_factory.mktemp("server") / "server.log")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.close()


def start_engine(folder: Path, *settings: str) -> Engine:
    config = compose_run_config(*LIMITS, *settings)
    plan = make_plan(config, True, this_machine(folder), folder)
    return build_engine(config, load_tokenizer(config.model), plan, folder)


def http_settings(server: VLLMServerProcess, *more: str) -> tuple[str, ...]:
    return "inference_model.backend=http", f"inference_model.urls=[{server.url}]", *more


def changed_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    model = load_model(compose_run_config().model, torch.device("cpu"))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
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
                engine.load(changed_weights(1), 1)
    finally:
        served.close()
        local.close()


@pytest.mark.parametrize("update", ["keep", "wait", "abort"])
def test_a_push_splits_the_versions_of_requests_in_flight(
    server: VLLMServerProcess, tmp_path: Path, update: str
) -> None:
    engine = start_engine(tmp_path, *http_settings(server, f"inference_model.update={update}"))
    try:
        engine.load(changed_weights(1), 1)
        engine.submit(Request(1, (5, 6, 7), 4, Sampling(temperature=2.0, max_tokens=440), seed=1))
        engine.step(0.5)
        engine.load(changed_weights(2), 2)
        responses = []
        while not responses:
            responses = engine.step(1.0)
        for completion in responses[0].completions:
            versions = [version for version, _ in groupby(completion.policy_versions)]
            assert versions in ([[1]] if update == "wait" else [[1], [2], [1, 2]])
            assert len(completion.policy_versions) == len(completion.token_ids) == len(completion.log_probs)
        assert len(list((tmp_path / "weights").iterdir())) == 1
    finally:
        engine.close()
    assert not (tmp_path / "weights").exists()


def test_a_restarted_server_gets_the_present_weights(tmp_path: Path) -> None:
    server = VLLMServerProcess(tmp_path / "server.log")
    try:
        server.wait_until_ready()
        engine = start_engine(tmp_path, *http_settings(server))
        engine.load(changed_weights(1), 1)
        request = Request(1, (5, 6, 7), 4, Sampling(temperature=1.7, max_tokens=24), seed=1)
        (before,) = generate(engine, [request])
        numbers = engine.engine_pids
        server.kill()
        server.start()
        server.wait_until_ready()  # with the weights of its files
        (after,) = generate(engine, [request])
        assert engine.engine_pids != numbers
        assert [one.token_ids for one in after.completions] == [one.token_ids for one in before.completions]
        assert all(set(one.policy_versions) == {1} for one in after.completions)
        engine.close()
    finally:
        server.close()


def test_a_run_continues_after_its_server_was_killed_and_started_again(tmp_path: Path) -> None:
    server = VLLMServerProcess(tmp_path / "server.log")
    run_dir = tmp_path / "run"
    small = ("env.num_envs=8", "env.repeats=4", "train.dialog_turns_per_batch=32", "train.total_dialog_turns=192")
    try:
        server.wait_until_ready()
        process = start_script("grpo.py", run_dir, *small, *http_settings(server))
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(read_metrics(run_dir)) >= 2, process)
        server.kill()
        server.start()
        output = wait_for_output(process)
        assert process.returncode == 0, output
        assert "is lost with" in output and "is back, with policy version" in output
        rows = read_metrics(run_dir)
        assert [row["policy_version"] for row in rows] == [float(number) for number in range(6)]
        assert all(row["logprob_diff/max"] < 1e-3 for row in rows)
    finally:
        server.close()


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
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in str(error.value)
    assert QUICKSTART.name in str(error.value)
