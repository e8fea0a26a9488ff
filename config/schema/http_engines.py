"""Checks of the settings of `inference_model.backend=http`, whose engines are servers outside the run."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from config.schema.errors import ConfigError

_SETTINGS_OF_SERVERS = {
    "num_devices": 1,
    "devices": None,
    "tensor_parallel_size": 1,
    "quantization": None,
    "gpu_memory_utilization": 0.9,
    "kv_cache_gib": None,
    "max_num_batched_tokens": None,
    "enforce_eager": None,
}
"""Settings that the command line of a server replaces, with their defaults."""


def check_urls(backend: str, urls: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Checks the addresses of servers and the settings that servers cannot obey.

    settings: fields of the section `inference_model`.

    Raises:
        ConfigError: addresses without the backend or the reverse, a bad address, or a setting without an effect.
    """
    if backend != "http":
        if urls:
            raise ConfigError(
                f"inference_model.urls={list(urls)} needs inference_model.backend=http, but the backend is {backend}: "
                "set that backend, or leave urls out"
            )
        if settings["weight_folder"] is not None:
            raise ConfigError(
                f"inference_model.weight_folder={settings['weight_folder']} has an effect with "
                "inference_model.backend=http only: leave it out"
            )
        return
    if not urls:
        raise ConfigError(
            "inference_model.backend=http: inference_model.urls is empty; give the addresses of vLLM servers, such as "
            "inference_model.urls=[http://127.0.0.1:8001]"
        )
    for url in urls:
        _check_url(url)
    addresses = [url.rstrip("/").lower() for url in urls]
    repeated = sorted({url for url in addresses if addresses.count(url) > 1})
    if repeated:
        raise ConfigError(f"inference_model.urls: {repeated[0]} is listed twice; list each server once")
    for name, default in _SETTINGS_OF_SERVERS.items():
        if settings[name] != default:
            raise ConfigError(
                f"inference_model.{name}={settings[name]} has no effect with inference_model.backend=http: give it to "
                "`vllm serve`, and leave it out here"
            )
    if settings["colocate"]:
        raise ConfigError(
            "inference_model.colocate=true: servers of inference_model.backend=http do not take turns with the "
            "learner on a GPU; leave it out, or set inference_model.backend=vllm"
        )
    if settings["lora"] == "adapter":
        raise ConfigError(
            "inference_model.lora=adapter: inference_model.backend=http pushes full weights only; set "
            "inference_model.lora=merge"
        )


def _check_url(url: str) -> None:
    """Raises ConfigError unless `url` is the address of a server without a path."""
    remedy = "give scheme, host and port, such as http://127.0.0.1:8001"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"inference_model.urls: {url}: {error}; {remedy}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"inference_model.urls: {url} is not the address of a server; {remedy}")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"inference_model.urls: {url} has more than scheme, host and port; {remedy}")
