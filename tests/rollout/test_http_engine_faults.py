"""Tests of faults of vLLM servers, with small servers that misbehave at will."""

import asyncio
import gc
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema.errors import ConfigError
from envs.group import Sampling
from tests.log_capture import LogCapture
from tests.rollout.http_stand_in import StandInServer
from tests.script_runner import compose_run_config, run_script
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.engines.build_engines import build_engine
from torchgrpo.rollout.engines.http_client_thread import HTTPClientThread
from torchgrpo.rollout.engines.http_engine_pool import HTTPEnginePool
from torchgrpo.rollout.engines.http_server import ServerLost
from torchgrpo.rollout.engines.interface import Engine, Request, Response
from torchgrpo.rollout.engines.remote_engines import EngineLost
from torchgrpo.training.model_loading import load_model, load_tokenizer


@contextmanager
def serve(*servers: StandInServer) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.close()


def http_settings(*servers: StandInServer) -> tuple[str, ...]:
    urls = ",".join(server.url for server in servers)
    return "inference_model.backend=http", f"inference_model.urls=[{urls}]", "inference_model.dtype=float32"


def start_engine(folder: Path, *settings: str) -> Engine:
    config = compose_run_config(*settings)
    plan = make_plan(config, True, this_machine(folder), folder)
    return build_engine(config, load_tokenizer(config.model), plan, folder)


def submit_groups(engine: Engine, ids: range) -> None:
    for number in ids:
        engine.submit(Request(number, (5, 6, 7 + number), 4, Sampling(max_tokens=4), seed=number))


def wait_for_responses(engine: Engine, count: int) -> list[Response]:
    responses: list[Response] = []
    while len(responses) < count:
        responses += engine.step(0.5)
    return responses


@pytest.mark.parametrize("path", ["/server_info", "/weight_info", "/collective_rpc", "/inference/v1/generate"])
def test_a_server_without_an_endpoint_is_refused_with_the_command(path: str, tmp_path: Path) -> None:
    server = StandInServer(lacks=path)
    with serve(server), pytest.raises(ConfigError) as error:
        start_engine(tmp_path, *http_settings(server))
    message = str(error.value)
    assert server.url in message and path in message
    assert message.count("VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server") == 1
    assert ("VLLM_SERVER_DEV_MODE=1 is not set" in message) == (path != "/inference/v1/generate")
    assert "http engines" not in {thread.name for thread in threading.enumerate()}


def test_a_server_without_priorities_is_refused(tmp_path: Path) -> None:
    server = StandInServer(policy="fcfs")
    with serve(server), pytest.raises(ConfigError, match="--scheduling-policy fcfs instead of priority") as error:
        start_engine(tmp_path, *http_settings(server))
    assert "--scheduling-policy priority" in str(error.value)


def test_a_server_that_a_broken_push_left_paused_is_resumed(tmp_path: Path) -> None:
    server = StandInServer()
    with serve(server):
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/pause?mode=keep", method="POST"), timeout=600)
        engine = start_engine(tmp_path, *http_settings(server))
        try:
            submit_groups(engine, range(1))
            assert [response.request_id for response in wait_for_responses(engine, 1)] == [0]
        finally:
            engine.close()


def test_groups_of_a_dead_server_go_to_the_other_and_a_returned_server_gets_new_ones(
    tmp_path: Path, log_capture: LogCapture
) -> None:
    mortal, other = StandInServer(holds=True), StandInServer()
    with serve(mortal, other):
        engine = start_engine(tmp_path, *http_settings(mortal, other))
        try:
            submit_groups(engine, range(6))
            responses = engine.step(0.0)
            mortal.wait_until_holding()
            mortal.kill()
            responses += wait_for_responses(engine, 6 - len(responses))
            assert sorted(response.request_id for response in responses) == list(range(6))
            assert {one.engine for response in responses for one in response.completions} == {"engine 1"}
            assert mortal.num_held > 0
            assert sorted(map(tuple, other.prompts)) == sorted(4 * [(5, 6, 7 + number) for number in range(6)])
            assert engine.in_flight == 0

            weights = load_model(compose_run_config().model, torch.device("cpu")).state_dict()
            engine.load(weights.items(), 1)  # the absent server loads it at its return
            mortal.start()
            while len(engine.engine_pids) < 2:
                engine.step(0.5)
            submit_groups(engine, range(6, 12))
            responses = wait_for_responses(engine, 6)
            assert sorted(response.request_id for response in responses) == list(range(6, 12))
            completions = [one for response in responses for one in response.completions]
            assert {one.engine for one in completions} == {"engine 0", "engine 1"}
            assert all(one.policy_versions == [1] * 4 for one in completions)
        finally:
            engine.close()
    assert f"engine 0 at {mortal.url} is lost" in log_capture.text
    assert f"engine 0 at {mortal.url} is back, with policy version 1" in log_capture.text


def test_a_failure_of_a_cancelled_call_is_not_printed(log_capture: LogCapture) -> None:
    client = HTTPClientThread()

    async def fail_at_cancellation(start_event: threading.Event) -> None:
        try:
            start_event.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ServerLost("reset") from None

    start_event = threading.Event()
    call = client.start(fail_at_cancellation(start_event))
    assert start_event.wait(600)
    call.cancel()
    client.start(asyncio.sleep(0.1)).result(600)  # the call ends before the loop does
    client.close()
    del call
    gc.collect()
    assert "never retrieved" not in log_capture.text


def test_a_push_does_not_wait_for_completions(tmp_path: Path) -> None:
    server = StandInServer(holds=True)
    with serve(server):
        engine = start_engine(tmp_path, *http_settings(server))
        try:
            submit_groups(engine, range(2))
            engine.step(0.0)
            server.wait_until_holding()
            weights = load_model(compose_run_config().model, torch.device("cpu")).state_dict()
            engine.load(weights.items(), 1)
            assert server.num_held > 0 and engine.in_flight == 2
        finally:
            engine.close()


def test_a_returned_server_with_other_scores_ends_the_run(tmp_path: Path) -> None:
    server = StandInServer(holds=True)
    with serve(server):
        engine = start_engine(tmp_path, *http_settings(server))
        try:
            weights = load_model(compose_run_config().model, torch.device("cpu")).state_dict()
            engine.load(weights.items(), 1)
            submit_groups(engine, range(1))
            engine.step(0.0)
            server.wait_until_holding()
            server.kill()
            server.log_prob = -2.0
            server.start()
            with pytest.raises(EngineLost, match="serves another model"):
                wait_for_responses(engine, 1)
        finally:
            engine.close()


@pytest.fixture
def _short_absences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens `start_timeout_s` after the healthy start, which may be slow."""
    connect_all = HTTPEnginePool._connect_all

    def connect_and_shorten(pool: HTTPEnginePool) -> None:
        connect_all(pool)
        pool._settings = replace(pool._settings, start_timeout_s=1.0)

    monkeypatch.setattr(HTTPEnginePool, "_connect_all", connect_and_shorten)


@pytest.mark.usefixtures("_short_absences")
def test_a_run_whose_server_stays_away_ends_with_one_message(tmp_path: Path) -> None:
    server = StandInServer(holds=True)

    def kill_at_the_first_sample() -> None:
        server.wait_until_holding()
        server.kill()

    with serve(server), ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_at_the_first_sample)
        mismatch = "train.on_mismatch=log"  # its weights are not the learner's
        result = run_script("grpo.py", tmp_path / "run", *http_settings(server), mismatch)
        assert result.returncode == 1, result.output
        killed.result()
    assert "Traceback" not in result.output
    assert result.output.count("waited 1 s for a server to come back (inference_model.start_timeout_s)") == 1
    assert server.url in result.output and "api_server" in result.output
    assert "http engines" not in {thread.name for thread in threading.enumerate()}
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.usefixtures("_short_absences")
def test_an_engine_whose_servers_stay_away_names_each(tmp_path: Path) -> None:
    servers = [StandInServer(holds=True), StandInServer(holds=True)]
    with serve(*servers):
        engine = start_engine(tmp_path, *http_settings(*servers))
        try:
            submit_groups(engine, range(4))
            engine.step(0.0)
            for server in servers:
                server.wait_until_holding()
                server.kill()
            with pytest.raises(EngineLost, match="waited 1 s") as error:
                wait_for_responses(engine, 4)
            assert all(server.url in str(error.value) for server in servers)
        finally:
            engine.close()
