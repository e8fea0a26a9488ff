"""Checks of learner steps, precision, ranks, output head, reference and reload against another computation."""

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from config.schema.config import Config
from config.schema.policy import PRESETS, load_policy
from envs.group import Group, Verdict
from torchgrpo.batches.batch import collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.plan import Plan
from torchgrpo.selftest.check import CheckWorkspace
from torchgrpo.selftest.tiny_model import make_config, open_run, perturb_weights
from torchgrpo.training.learner import make_learner
from torchgrpo.training.log_probs import selected_log_probs

WITH_REFERENCE = "policy.kl_coef=0.1"
COMPARED_METRICS = ("loss/objective", "grad_norm", "kl/ref")


def collect_groups(workspace: CheckWorkspace) -> list[Group]:
    """Samples groups from a random model on the CPU, with random rewards.

    Real rewards would all be equal, since the model is never right.
    """
    with open_run(CheckWorkspace(workspace.folder)) as run:
        groups = run.collect().groups
    chance = random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups


def make_learner_plan(config: Config, workspace: CheckWorkspace) -> Plan:
    """Builds the plan without its checks, because no engine has to fit beside the learner."""
    return make_plan(config, False, this_machine(workspace.folder), workspace.folder)


def max_metric_difference(metrics: dict[str, float], expected: dict[str, float]) -> float:
    """Returns the largest relative difference of the compared metrics."""
    return max(abs(metrics[name] - expected[name]) / (1 + abs(expected[name])) for name in COMPARED_METRICS)


def relative_difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns |tensor - expected| / |expected|; 0 if both are zero."""
    return float((tensor - expected).norm() / expected.norm().clamp_min(1e-12))


def run_step(config: Config, workspace: CheckWorkspace, groups: list[Group]) -> tuple[dict[str, float], torch.Tensor]:
    """Runs one optimizer step; returns its metrics and gradient (flat, float64 on the CPU)."""
    learner = make_learner(config, make_learner_plan(config, workspace), workspace.folder)
    gradients_list: list[torch.Tensor] = []

    def record_gradients(*args: object) -> None:
        gradients = (parameter.grad for parameter in learner.worker.model.parameters())
        gradients_list.extend(gradient.flatten().double().cpu() for gradient in gradients if gradient is not None)

    learner.worker.optimizer.register_step_pre_hook(record_gradients)
    report = learner.step(learner.credit(Rollout.from_groups(groups)).batch)
    return report.metrics, torch.cat(gradients_list)


def check_presets(workspace: CheckWorkspace) -> str:
    """Compares each preset's step on a GPU with the CPU, packed with padded rows."""
    groups, cpu = collect_groups(workspace), CheckWorkspace(workspace.folder)
    chance = random.Random(4)
    for completion in (one for group in groups for one in group.completions):
        # Log-probs of an older policy: at a ratio of 1, the kink of |log ratio|, rounding would choose a side.
        completion.log_probs = [each + chance.uniform(-0.1, 0.1) for each in completion.log_probs]
    here = make_config(workspace)
    other = make_config(cpu, "train.packing=false", "train.gradient_accumulation_steps=2")
    names, worst = sorted(path.stem for path in PRESETS.glob("*.yaml")), 0.0
    for name in names:
        for config in (here, other):
            config.policy = load_policy(name)
            config.derive_fields()
        ours, gradient = run_step(here, workspace, groups)
        theirs, expected = run_step(other, cpu, groups)
        difference = max(
            relative_difference(gradient, expected), abs(ours["loss/objective"] - theirs["loss/objective"])
        )
        assert difference < 1e-3, f"policy={name}: gradient or loss differs by {difference:.2g}"
        worst = max(worst, difference)
    return f"{len(names)} presets, gradients within {worst:.1g}"


def check_ranks(workspace: CheckWorkspace) -> str:
    """Compares steps of two learner ranks with steps of one process on the CPU."""
    groups, cpu, worst = collect_groups(workspace), CheckWorkspace(workspace.folder), 0.0
    config = make_config(workspace, "train_model.num_devices=2", WITH_REFERENCE)
    with closing(make_learner(config, make_learner_plan(config, workspace), workspace.folder)) as ranked:
        config = make_config(cpu, WITH_REFERENCE)
        single = make_learner(config, make_learner_plan(config, cpu), workspace.folder)
        for number in (1, 2):
            expected, metrics = (
                one.step(one.credit(Rollout.from_groups(groups)).batch).metrics for one in (single, ranked)
            )
            difference = max_metric_difference(metrics, expected)
            assert difference < 1e-3, f"step {number}: {metrics}, not {expected}"
            worst = max(worst, difference)
    return f"2 steps, losses and gradient norms within {worst:.1g}"


def check_mixed_precision(workspace: CheckWorkspace, mixed_precision: str, overrides: Sequence[str] = ()) -> str:
    """Checks steps in mixed precision: weights change, log-probs stay close to float32."""
    groups = collect_groups(workspace)
    batch = collate(groups)
    config = make_config(workspace, f"train.mixed_precision={mixed_precision}", "optimizer.warmup_steps=0", *overrides)
    learner = make_learner(config, make_learner_plan(config, workspace), workspace.folder)
    scorer, scores = learner.worker.scorer, []
    for dtype in (None, scorer.autocast_dtype):
        scorer.autocast_dtype = dtype
        scores.append(scorer(batch.tokens).log_prob.detach().cpu()[batch.tokens.response_mask])
    gap = float((scores[0] - scores[1]).abs().mean())
    assert gap < 0.1, f"log-probs under {mixed_precision} are {gap:.2g} from those in float32 in the mean"
    trained = [parameter for parameter in learner.worker.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    for _ in range(3):
        report = learner.step(learner.credit(Rollout.from_groups(groups)).batch)
        assert math.isfinite(report.metrics["grad_norm"]) or report.is_skipped
    assert any(not torch.equal(*pair) for pair in zip(before, trained, strict=True)), "no weight changed"
    if learner.worker.scaler.is_enabled():
        learner.worker.scaler.scale(torch.zeros(1, device=trained[0].device))  # the first call creates the scale
        learner.worker.scaler.update(2.0**100)
        assert learner.step(learner.credit(Rollout.from_groups(groups)).batch).is_skipped, "an overflow was not skipped"
        scale = learner.worker.scaler.get_scale()
        assert scale == 2.0**99, f"the scale is {scale} after an overflow"
    return f"log-probs within {gap:.2g} of float32 in the mean"


def check_output_head(workspace: CheckWorkspace) -> str:
    """Compares the output head in three dtypes with a softmax in float64."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden = torch.randn(64, 64, generator=generator).to(dtype)
        weight = (torch.randn(512, 64, generator=generator) / 8).to(dtype)
        targets = torch.randint(0, 512, (64,), generator=generator)
        ours = [tensor.to(workspace.device, copy=True).requires_grad_() for tensor in (hidden, weight)]
        theirs = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
        head = selected_log_probs(ours[0], ours[1], None, targets.to(workspace.device), 0.7, 9, with_entropy=True)
        distribution = torch.distributions.Categorical(logits=theirs[0] @ theirs[1].T / 0.7)
        log_prob_and_entropy = torch.stack([value for value in head if value is not None])
        expected = torch.stack((distribution.log_prob(targets), distribution.entropy()))
        torch.testing.assert_close(log_prob_and_entropy.double().cpu(), expected, rtol=1e-3, atol=1e-3)
        mine = torch.autograd.grad(log_prob_and_entropy.sum(), ours)
        plain = torch.autograd.grad(expected.sum(), theirs)
        difference = max(relative_difference(one.double().cpu(), other) for one, other in zip(mine, plain, strict=True))
        bound = 1e-4 if dtype == torch.float32 else 3e-2
        assert difference < bound, f"{dtype}: gradient differs by {difference:.2g}"
        worst = max(worst, difference)
    return f"float32, bfloat16, float16; gradients within {worst:.1g}"


def check_reference_placements(workspace: CheckWorkspace, homes: Sequence[str]) -> str:
    """Computes reference log-probs twice for each placement of the reference.

    A reference in host memory must leave nothing on the GPU.
    """
    batch = collate(collect_groups(workspace))
    mask = batch.tokens.response_mask
    for home in homes:
        lora = home == "base of the LoRA policy"
        config = make_config(workspace, WITH_REFERENCE, f"train_model.lora.enabled={str(lora).lower()}")
        plan = make_learner_plan(config, workspace)
        devices = (1,) if home == "own devices" else ()
        there = replace(plan.reference, home=home, devices=devices, ranks=len(devices))  # type: ignore[arg-type]
        with closing(make_learner(config, replace(plan, reference=there), workspace.folder)) as learner:
            perturb_weights(learner.worker.model, seed=1)
            reference = learner.worker.reference
            if learner.scorers is not None:
                scores = [learner.scorers.wait_for_log_probs(learner.scorers.submit(batch)) for _ in range(2)]
            else:
                assert reference is not None
                scores = [reference.log_prob([batch])[0].cpu() for _ in range(2)]
            if home == "host memory" and workspace.device == "cuda":
                assert reference is not None
                allocated = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                reference.log_prob([batch])
                assert torch.cuda.memory_allocated() <= allocated, "the reference left memory allocated on the GPU"
                assert torch.cuda.max_memory_allocated() > allocated, "the reference was not copied to the GPU"
        assert torch.equal(*scores), f"{home}: the same batch scored twice gives different log-probs"
        gap = float((scores[0][mask] - batch.sample_log_prob[mask]).abs().max())
        assert gap < 2e-3, f"{home}: log-probs differ from the frozen weights' by up to {gap:.2g}"
    return ", ".join(homes)


def check_learner_resume(workspace: CheckWorkspace) -> str:
    """Compares the next step of a learner with that of its saved and reloaded copies.

    The copies are loaded on the same device and on the CPU.
    """
    groups, config = collect_groups(workspace), make_config(workspace)
    first = make_learner(config, make_learner_plan(config, workspace), workspace.folder)
    first.step(first.credit(Rollout.from_groups(groups)).batch)
    path, scalar_state = workspace.folder / "saved", first.scalar_state()
    first.save(path)()
    expected = first.step(first.credit(Rollout.from_groups(groups)).batch).metrics
    for there, bound in ((workspace, 1e-5), (CheckWorkspace(workspace.folder), 1e-3)):
        config = make_config(there)
        again = make_learner(config, make_learner_plan(config, there), workspace.folder)
        again.load(path, scalar_state)
        metrics = again.step(again.credit(Rollout.from_groups(groups)).batch).metrics
        assert max_metric_difference(metrics, expected) <= bound, (
            f"resumed on {there.device}: {metrics}, not {expected}"
        )
    return f"{workspace.device}, CPU"
