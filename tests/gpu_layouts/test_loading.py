"""The loader's own `device_map` on pretended GPUs (see tests/pretend_gpu.py)."""

from pathlib import Path

import pytest
import torch

from config.errors import ConfigError
from config.schema import ModelConfig
from tests.gpu_layouts.layouts import save_tiny
from tests.pretend_gpu import pretend_gpus
from tests.tiny import tiny_llama
from training.learner_models import torch_devices
from training.model import load_model

LAYER_AND_HEAD = 175 << 10
"""Bytes free on each GPU: enough for one layer of the tiny model, so that it is spread at all."""


@pytest.mark.parametrize("tied", [False, True])
def test_layers_are_spread_and_the_head_is_checked_there(tied: bool, tmp_path: Path) -> None:
    with pretend_gpus(4, LAYER_AND_HEAD):
        model = load_model(ModelConfig(name=str(save_tiny(tmp_path, tied))), torch_devices(range(4)))
        devices = {parameter.device for parameter in model.parameters()}
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert devices == {*torch_devices(range(3))}
        assert (head.device == embedding.device) == tied
        logits = model(torch.arange(3, 9, device="cuda:0")[None]).logits.cpu()
    torch.testing.assert_close(logits, tiny_llama(tied)(torch.arange(3, 9)[None]).logits)


def test_layers_that_no_gpu_has_room_for_are_told(tmp_path: Path) -> None:
    """Left alone, accelerate puts them on the disk with a line in its log, and the first forward pass dies of it."""
    with (
        pretend_gpus(2, LAYER_AND_HEAD),
        pytest.raises(ConfigError, match="do not fit into what is free on 2 GPUs"),
    ):
        load_model(ModelConfig(name=str(save_tiny(tmp_path, False))), torch_devices(range(2)))
