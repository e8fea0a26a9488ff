"""The GPU of a thread in which an engine computes."""

import torch

from tests.pretend_gpu import pretend_gpus
from torchgrpo.rollout.engine_thread import start_engine_thread


def test_the_thread_computes_on_the_gpu_of_its_creator() -> None:
    devices: list[int] = []
    with pretend_gpus(2):
        torch.cuda.set_device(1)
        start_engine_thread(lambda: devices.append(torch.cuda.current_device()), "rollouts").join()
    assert devices == [1]
