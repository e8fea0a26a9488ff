"""Tests of settings and plans of engines that are servers outside the run."""

from pathlib import Path

import pytest

from config.schema.errors import ConfigError
from config.schema.inference import InferenceModelConfig
from tests.rollout.vllm_server import free_port
from tests.script_runner import compose_run_config
from torchgrpo.plan.machine import Machine, this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan_report import format_plan
from torchgrpo.rollout.engines.build_engines import build_engine
from torchgrpo.training.model_loading import load_tokenizer

URL = "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "vllm", "urls": [URL]}, "needs inference_model.backend=http"),
        ({"backend": "vllm", "weight_folder": "weights"}, "weight_folder=weights has an effect with"),
        ({"backend": "http"}, "inference_model.urls is empty"),
        ({"backend": "http", "urls": [URL, f"{URL}/"]}, "listed twice"),
        ({"backend": "http", "urls": ["ftp://127.0.0.1:1"]}, "is not the address of a server"),
        ({"backend": "http", "urls": ["127.0.0.1:8001"]}, "is not the address of a server"),
        ({"backend": "http", "urls": [f"{URL}/v1"]}, "more than scheme, host and port"),
        ({"backend": "http", "urls": ["http://127.0.0.1:99999"]}, "out of range"),
        ({"backend": "http", "urls": [URL], "num_devices": 2}, "num_devices=2 has no effect"),
        ({"backend": "http", "urls": [URL], "devices": [0]}, "has no effect"),
        ({"backend": "http", "urls": [URL], "colocate": True}, "do not take turns"),
        ({"backend": "http", "urls": [URL], "lora": "adapter"}, "full weights only"),
    ],
)
def test_settings_that_servers_cannot_obey_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferenceModelConfig(**settings)  # type: ignore[arg-type]


def test_servers_are_engines_without_devices_and_the_plan_prints_their_commands() -> None:
    config = compose_run_config("inference_model.backend=http", f"inference_model.urls=[{URL},http://10.0.0.2:8002]")
    plan = make_plan(config, False, Machine(2, 80.0, 64.0, 1024.0, None, gpu_ids=("a", "b")))
    assert plan.devices.engines == ((), ())
    assert plan.devices.in_process
    assert plan.transport == "weight_folder"
    report = format_plan(plan, [])
    assert "--host 10.0.0.2 --port 8002" in report
    assert "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server" in report


def test_an_absent_server_is_an_error_with_its_command(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = compose_run_config("inference_model.backend=http", f"inference_model.urls=[{url}]")
    plan = make_plan(config, False, this_machine(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=f"no vLLM server answers at {url}.*\n.*api_server"):
        build_engine(config, load_tokenizer(config.model), plan, tmp_path)
