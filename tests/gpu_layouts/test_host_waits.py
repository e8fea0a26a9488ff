from collections import Counter
from pathlib import Path
import sys
import pytest
from config.schema.policy import load_policy
from tests.gpu_layouts.layouts import Case, Layout, learner_on, save_tiny, scored_groups
from tests.groups import credit_groups
from tests.pretend_gpu import pretend_gpus


def count(microbatches, folder, preset="grpo", **case):
    policy = load_policy(
        preset, overlong_cache=None, filter_range=None, dynamic_batching=False, **case.pop("policy", {})
    )
    with pretend_gpus(1) as gpus:
        learner, plan = learner_on(Layout(1), Case(policy, folder, **case), folder)
        learner.config.train.gradient_accumulation_steps = microbatches
        learner.step(credit_groups(learner, scored_groups()))
        batch = credit_groups(learner, scored_groups())
        gpus.waits.clear()
        learner.step(batch)
        return gpus.waits


def test_it(tmp_path):
    folder = save_tiny(tmp_path, False)
    a, b = count(1, folder), count(2, folder)
    print(len(a), len(b))
    for k, v in sorted(Counter(b).items()):
        print(v, Counter(a)[k], k)
    assert 0
