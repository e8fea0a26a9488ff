"""Tests the trackers of a dry run, by hand and against torch's own tracker."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.run.dry_run.fake_tensors import use_fake_tensors
from torchgrpo.run.dry_run.step import make_longest_microbatch
from torchgrpo.run.dry_run.tensor_tracker import MemoryTracker, TrafficTracker
from torchgrpo.training.learner_models import make_scorer
from torchgrpo.training.model_loading import load_model

MIB = 1 << 20
TINY = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


def test_the_peak_by_kind() -> None:
    memory = MemoryTracker()
    with FakeTensorMode():
        kept = torch.empty(MIB // 4)
        memory.add("parameters", [kept])
        with memory.track_phase("one", "activations"):
            first = kept * 2
            with memory.label_new_tensors("gradients"):
                second = first + 1
            del first
            third = second * 3  # never alive together with `first`
            del third, second
        with memory.track_phase("two", "temporary"):
            view = (kept + 1).view(2, -1)
            del view
    assert memory.peaks["one"] == {"parameters": MIB, "activations": MIB, "gradients": MIB}
    assert {kind: size for kind, size in memory.peaks["two"].items() if size} == {"parameters": MIB, "temporary": MIB}


def test_storages_that_are_freed_without_an_operation() -> None:
    """FSDP2 frees whole parameters by resizing their storages."""
    memory = MemoryTracker()
    with FakeTensorMode(), memory.track_phase("one", "gathered parameters"):
        whole = torch.empty(MIB // 4)
        whole.untyped_storage().resize_(0)
        other = torch.empty(MIB // 8)
        whole.untyped_storage().resize_(MIB)
        del other
    assert memory.peaks["one"].total() == MIB


def test_moved_bytes_of_operations() -> None:
    traffic = TrafficTracker()
    with FakeTensorMode():
        left, right = torch.empty(8, 16), torch.empty(16, 4)
        with traffic:
            torch.mm(left, right)
            torch.t(left)
    assert traffic.moved_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)


def test_peaks_equal_those_of_torchs_own_tracker(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    overrides = (f"model.name={tmp_path}", "env.max_prompt_tokens=40", "inference_model.max_tokens=24")
    plan = make_plan(config_of("grpo_gsm8k", *overrides), False, machine(2, 80.0))
    batch = make_longest_microbatch(plan)
    with use_fake_tensors(imitates_gpu=True):
        model = load_model(plan.config.model, torch.device("cpu"))
        scorer = make_scorer(plan.config, model, plan.learner)
        memory, torch_tracker = MemoryTracker(), MemTracker()
        memory.add("parameters", [*model.parameters(), *model.buffers()])
        with memory.track_phase("forward and backward", "activations"):
            scorer(batch.tokens).log_prob.sum().backward()
        model.zero_grad()
        torch_tracker.track_external(model)
        with torch_tracker:
            scorer(batch.tokens).log_prob.sum().backward()
    snapshot = torch_tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert memory.peaks["forward and backward"].total() == pytest.approx(snapshot["Total"], rel=0.01)
