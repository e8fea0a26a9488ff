"""Checks of the learner against the same arithmetic on the CPU or in another layout."""

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
from torchgrpo.selftest.check import Bench
from torchgrpo.selftest.tiny import built, configured, moved
from torchgrpo.training.learner import make_learner
from torchgrpo.training.log_probs import selected_log_probs

WITH_REFERENCE = "policy.kl_coef=0.1"
COMPARED = ("loss/objective", "grad_norm", "kl/ref")


def collected(bench: Bench) -> list[Group]:
    """Groups that a random model draws on the CPU. It never is right, so rewards are random."""
    with built(Bench(bench.folder)) as run:
        groups = run.collect().groups
    chance = random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups


def learner_plan(config: Config, bench: Bench) -> Plan:
    """The plan, unchecked: whether engines fit beside the learner does not matter."""
    return make_plan(config, False, this_machine(bench.folder), bench.folder)


def off(found: dict[str, float], wanted: dict[str, float]) -> float:
    """Largest relative difference of the compared metrics."""
    return max(abs(found[name] - wanted[name]) / (1 + abs(wanted[name])) for name in COMPARED)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|; 0 where both are nothing."""
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def stepped(config: Config, bench: Bench, groups: list[Group]) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of one optimizer step, and the gradient that it applied, float64 on the CPU."""
    learner = make_learner(config, learner_plan(config, bench), bench.folder)
    seen: list[torch.Tensor] = []

    def read(*args: object) -> None:
        gradients = (parameter.grad for parameter in learner.worker.model.parameters())
        seen.extend(gradient.flatten().double().cpu() for gradient in gradients if gradient is not None)

    learner.worker.optimizer.register_step_pre_hook(read)
    report = learner.step(learner.credit(Rollout.of(groups)).batch)
    return report.metrics, torch.cat(seen)


def presets(bench: Bench) -> str:
    """Compares every preset's step on a GPU with the CPU, and packed rows with padded ones."""
    groups, cpu = collected(bench), Bench(bench.folder)
    chance = random.Random(4)
    for completion in (one for group in groups for one in group.completions):
        # As of an older policy: at ratios of 1, where |log ratio| has its kink, rounding chooses a side.
        completion.log_probs = [each + chance.uniform(-0.1, 0.1) for each in completion.log_probs]
    here = configured(bench)
    other = configured(cpu, "train.packing=false", "train.gradient_accumulation_steps=2")
    names, worst = sorted(path.stem for path in PRESETS.glob("*.yaml")), 0.0
    for name in names:
        for config in (here, other):
            config.policy = load_policy(name)
            config.derive()
        ours, gradient = stepped(here, bench, groups)
        theirs, expected = stepped(other, cpu, groups)
        difference = max(apart(gradient, expected), abs(ours["loss/objective"] - theirs["loss/objective"]))
        assert difference < 1e-3, f"policy={name}: gradient or loss differs by {difference:.2g}"
        worst = max(worst, difference)
    return f"{len(names)} presets, gradients within {worst:.1g}"


def ranks(bench: Bench) -> str:
    """Compares steps of two learner ranks with those of one process on the CPU."""
    groups, cpu, worst = collected(bench), Bench(bench.folder), 0.0
    config = configured(bench, "train_model.num_devices=2", WITH_REFERENCE)
    with closing(make_learner(config, learner_plan(config, bench), bench.folder)) as together:
        config = configured(cpu, WITH_REFERENCE)
        alone = make_learner(config, learner_plan(config, cpu), bench.folder)
        for number in (1, 2):
            wanted, found = (
                one.step(one.credit(Rollout.of(groups)).batch).metrics for one in (alone, together)
            )
            difference = off(found, wanted)
            assert difference < 1e-3, f"step {number}: {found}, not {wanted}"
            worst = max(worst, difference)
    return f"2 steps, losses and gradient norms within {worst:.1g}"


def precision(bench: Bench, mixed: str, overrides: Sequence[str] = ()) -> str:
    """Steps in mixed precision: weights move, log-probs stay near those in float32."""
    groups = collected(bench)
    batch = collate(groups)
    config = configured(bench, f"train.mixed_precision={mixed}", "optimizer.warmup_steps=0", *overrides)
    learner = make_learner(config, learner_plan(config, bench), bench.folder)
    scorer, scores = learner.worker.scorer, []
    for dtype in (None, scorer.autocast_dtype):
        scorer.autocast_dtype = dtype
        scores.append(scorer(batch.tokens).log_prob.detach().cpu()[batch.tokens.response_mask])
    gap = float((scores[0] - scores[1]).abs().mean())
    assert gap < 0.1, f"log-probs under {mixed} are {gap:.2g} from those in float32 in the mean"
    trained = [parameter for parameter in learner.worker.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    for _ in range(3):
        report = learner.step(learner.credit(Rollout.of(groups)).batch)
        assert math.isfinite(report.metrics["grad_norm"]) or report.skipped
    assert any(not torch.equal(*pair) for pair in zip(before, trained, strict=True)), "no weight moved"
    if learner.worker.scaler.is_enabled():
        learner.worker.scaler.scale(torch.zeros(1, device=trained[0].device))  # from then on it has a scale
        learner.worker.scaler.update(2.0**100)
        assert learner.step(learner.credit(Rollout.of(groups)).batch).skipped, "an overflow was not skipped"
        scale = learner.worker.scaler.get_scale()
        assert scale == 2.0**99, f"the scale is {scale} after an overflow"
    return f"log-probs within {gap:.2g} of float32 in the mean"


def head(bench: Bench) -> str:
    """Compares the chunked output head in three dtypes with a plain float64 softmax."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden = torch.randn(64, 64, generator=generator).to(dtype)
        weight = (torch.randn(512, 64, generator=generator) / 8).to(dtype)
        targets = torch.randint(0, 512, (64,), generator=generator)
        ours = [tensor.to(bench.device, copy=True).requires_grad_() for tensor in (hidden, weight)]
        theirs = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
        log_prob, _ = selected_log_probs(ours[0], ours[1], None, targets.to(bench.device), chunk_size=9)
        expected = (theirs[0] @ theirs[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(log_prob.double().cpu(), expected, rtol=1e-3, atol=1e-3)
        mine, plain = torch.autograd.grad(log_prob.sum(), ours), torch.autograd.grad(expected.sum(), theirs)
        difference = max(apart(one.double().cpu(), other) for one, other in zip(mine, plain, strict=True))
        bound = 1e-4 if dtype == torch.float32 else 3e-2
        assert difference < bound, f"{dtype}: gradient {difference:.2g} off"
        worst = max(worst, difference)
    return f"float32, bfloat16, float16; gradients within {worst:.1g}"


def references(bench: Bench, homes: Sequence[str]) -> str:
    """Scores by the reference in every home, twice; a visit leaves nothing on the GPU."""
    batch = collate(collected(bench))
    mask = batch.tokens.response_mask
    for home in homes:
        lora = home == "base of the LoRA policy"
        config = configured(bench, WITH_REFERENCE, f"train_model.lora.enabled={str(lora).lower()}")
        plan = learner_plan(config, bench)
        devices = (1,) if home == "own devices" else ()
        there = replace(plan.reference, home=home, devices=devices, ranks=len(devices))  # type: ignore[arg-type]
        with closing(make_learner(config, replace(plan, reference=there), bench.folder)) as learner:
            moved(learner.worker.model, seed=1)
            reference = learner.worker.reference
            if learner.scorers is not None:
                scores = [learner.scorers.wait(learner.scorers.begin(batch)) for _ in range(2)]
            else:
                assert reference is not None
                scores = [reference.log_prob([batch])[0].cpu() for _ in range(2)]
            if home == "host memory" and bench.device == "cuda":
                assert reference is not None
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                reference.log_prob([batch])
                assert torch.cuda.memory_allocated() <= held, "the reference left something on the GPU"
                assert torch.cuda.max_memory_allocated() > held, "the reference did not visit the GPU"
        assert torch.equal(*scores), f"{home}: the same batch scored twice gives other bits"
        gap = float((scores[0][mask] - batch.sample_log_prob[mask]).abs().max())
        assert gap < 2e-3, f"{home}: log-probs differ from the frozen weights' by up to {gap:.2g}"
    return ", ".join(homes)


def resumes(bench: Bench) -> str:
    """Saves a learner, loads it on the same device and on the CPU, and compares next steps."""
    groups, config = collected(bench), configured(bench)
    first = make_learner(config, learner_plan(config, bench), bench.folder)
    first.step(first.credit(Rollout.of(groups)).batch)
    path, numbers = bench.folder / "saved", first.numbers()
    first.save(path)()
    wanted = first.step(first.credit(Rollout.of(groups)).batch).metrics
    for there, bound in ((bench, 1e-5), (Bench(bench.folder), 1e-3)):
        config = configured(there)
        again = make_learner(config, learner_plan(config, there), bench.folder)
        again.load(path, numbers)
        found = again.step(again.credit(Rollout.of(groups)).batch).metrics
        assert off(found, wanted) <= bound, f"resumed on {there.device}: {found}, not {wanted}"
    return f"{bench.device}, CPU"
