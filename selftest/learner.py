"""The learner on the device of the bench, against the same arithmetic on the CPU or in another layout."""

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from config.policy import PRESETS, load_policy
from config.schema import Config
from envs.group import Group, Verdict
from plan.machine import this_machine
from plan.make_plan import make_plan
from plan.plan import Plan
from run.build import build
from run.lockstep import Lockstep
from selftest.check import Bench
from selftest.tiny import configured, moved, subfolder
from training.batch import collate
from training.local_learner import LocalLearner, make_learner
from training.log_probs import selected_log_probs


def collected(bench: Bench, *overrides: str) -> list[Group]:
    """Four groups of four completions drawn on the CPU, with random rewards, for a random model never is right."""
    config = configured(Bench(bench.folder, "cpu"), *overrides)
    working = build(config, subfolder(bench, "rollouts"), Lockstep)
    try:
        groups = working.collect()
    finally:
        working.run.close("finished")
    chance = random.Random(3)
    for completion in (one for group in groups for one in group.completions):
        completion.verdict = Verdict(chance.random(), {}, "scored")
    return groups


def older(groups: list[Group]) -> list[Group]:
    """The same groups as of another policy. At ratios of 1, where |log ratio| has its kink, rounding chooses a side."""
    chance = random.Random(4)
    for completion in (one for group in groups for one in group.completions):
        completion.log_probs = [each + chance.uniform(-0.1, 0.1) for each in completion.log_probs]
    return groups


def learner_plan(config: Config, bench: Bench) -> Plan:
    """Where the learner is concerned: whether engines fit beside it is not asked."""
    return make_plan(config, False, this_machine(bench.folder), bench.folder)


def stepped(config: Config, bench: Bench, groups: list[Group]) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of one optimizer step, and the gradient that it applied, float64 on the CPU."""
    plan = learner_plan(config, bench)
    learner = make_learner(config, plan, bench.folder)
    seen: list[torch.Tensor] = []

    def read(*args: object) -> None:
        seen.extend(
            p.grad.flatten().double().cpu() for p in learner.worker.model.parameters() if p.grad is not None
        )

    learner.worker.optimizer.register_step_pre_hook(read)
    report = learner.step(learner.credit(groups))
    return report.metrics, torch.cat(seen)


def ranks(bench: Bench, overrides: Sequence[str] = ()) -> str:
    """Steps of two learner ranks are those of one process on the CPU."""
    from training import ranked_learner

    groups, cpu = collected(bench), Bench(bench.folder, "cpu")
    config = configured(bench, "train_model.num_devices=2", *overrides)
    together = ranked_learner.make_learner(config, learner_plan(config, bench), bench.folder)
    worst = 0.0
    try:
        config = configured(cpu, *overrides)
        alone = make_learner(config, learner_plan(config, cpu), bench.folder)
        for number in (1, 2):
            wanted, found = (one.step(one.credit(groups)).metrics for one in (alone, together))
            for name in ("loss/objective", "grad_norm", "kl/ref"):
                difference = abs(found[name] - wanted[name]) / (1 + abs(wanted[name]))
                assert difference < 1e-3, (
                    f"step {number}: {name} is {found[name]:.6g}, not {wanted[name]:.6g}"
                )
                worst = max(worst, difference)
    finally:
        together.close()
    return f"2 steps, losses and gradient norms within {worst:.1g}"


def preset(config: Config, name: str) -> Config:
    """The config with another objective."""
    changed = replace(config, policy=load_policy(name))
    changed.derive()
    return changed


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|; 0 where both are nothing."""
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def presets(bench: Bench) -> str:
    """Every preset's step: on a GPU as on the CPU; on the CPU packed as with whole, padded rows."""
    groups, cpu = older(collected(bench)), Bench(bench.folder, "cpu")
    here = configured(bench)
    other = configured(cpu, "train.packing=false", "train.gradient_accumulation_steps=2")
    names, worst = sorted(path.stem for path in PRESETS.glob("*.yaml")), 0.0
    for name in names:
        ours, gradient = stepped(preset(here, name), bench, groups)
        theirs, expected = stepped(preset(other, name), cpu, groups)
        difference = max(apart(gradient, expected), abs(ours["loss/objective"] - theirs["loss/objective"]))
        assert difference < 1e-3, f"policy={name}: gradient or loss differs by {difference:.2g}"
        worst = max(worst, difference)
    return f"{len(names)} presets, gradients within {worst:.1g}"


def precision(bench: Bench, mixed: str, overrides: Sequence[str] = ()) -> str:
    """Steps under `train.mixed_precision`: the weights move, and log-probs stay near those in float32."""
    groups = collected(bench)
    batch = collate(groups)
    config = configured(bench, f"train.mixed_precision={mixed}", "optimizer.warmup_steps=0", *overrides)
    learner = make_learner(config, learner_plan(config, bench), bench.folder)
    learner.worker.scorer.autocast_dtype, dtype = None, learner.worker.scorer.autocast_dtype
    mask = batch.tokens.response_mask
    full = learner.worker.scorer(batch.tokens).log_prob.detach().cpu()[mask]
    learner.worker.scorer.autocast_dtype = dtype
    gap = float((learner.worker.scorer(batch.tokens).log_prob.detach().cpu()[mask] - full).abs().mean())
    assert gap < 0.1, f"log-probs under {mixed} are {gap:.2g} from those in float32 in the mean"
    before = [p.detach().clone() for p in learner.worker.model.parameters() if p.requires_grad]
    for _ in range(3):
        report = learner.step(learner.credit(groups))
        assert math.isfinite(report.metrics["grad_norm"]) or report.skipped
    after = [p.detach() for p in learner.worker.model.parameters() if p.requires_grad]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True)), "no weight moved"
    if learner.worker.scaler.is_enabled():
        overflow(learner, groups)
    return f"log-probs within {gap:.2g} of float32 in the mean"


def overflow(learner: LocalLearner, groups: list[Group]) -> None:
    """A gradient beyond float16 is skipped, and the scale halved."""
    device = next(learner.worker.model.parameters()).device
    learner.worker.scaler.scale(torch.zeros(1, device=device))  # from then on it has a scale
    learner.worker.scaler.update(2.0**100)
    report = learner.step(learner.credit(groups))
    assert report.skipped, "an overflow was not skipped"
    assert learner.worker.scaler.get_scale() == 2.0**99, (
        f"the scale is {learner.worker.scaler.get_scale()} after an overflow"
    )
    assert learner.nonfinite_steps == 0, "an overflow counts as a fault"


def head(bench: Bench) -> str:
    """The chunked output head in three dtypes: values and gradients of a plain float64 softmax."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden = torch.randn(64, 64, generator=generator).to(dtype)
        weight = (torch.randn(512, 64, generator=generator) / 8).to(dtype)
        targets = torch.randint(0, 512, (64,), generator=generator)
        ours = [tensor.clone().to(bench.device).requires_grad_() for tensor in (hidden, weight)]
        theirs = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
        log_prob, _ = selected_log_probs(ours[0], ours[1], None, targets.to(bench.device), chunk_size=9)
        expected = (theirs[0] @ theirs[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(log_prob.double().cpu(), expected, rtol=1e-3, atol=1e-3)
        log_prob.sum().backward()
        expected.sum().backward()
        for mine, plain in zip(ours, theirs, strict=True):
            assert mine.grad is not None and plain.grad is not None
            difference = apart(mine.grad.double().cpu(), plain.grad)
            assert difference < (1e-4 if dtype == torch.float32 else 3e-2), (
                f"{dtype}: gradient {difference:.2g} off"
            )
            worst = max(worst, difference)
    return f"float32, bfloat16, float16; gradients within {worst:.1g}"


def references(bench: Bench, homes: Sequence[str]) -> str:
    """The reference scores the same in every home, the same bits twice, and gives a visited GPU's memory back."""
    batch = collate(collected(bench))
    mask = batch.tokens.response_mask
    expected = batch.sample_log_prob[mask]
    for home in homes:
        lora = home == "base of the LoRA policy"
        config = configured(bench, "policy.kl_coef=0.1", f"train_model.lora.enabled={str(lora).lower()}")
        plan = learner_plan(config, bench)
        devices = (1,) if home == "own devices" else ()
        moved_to = replace(plan.reference, home=home, devices=devices, ranks=len(devices))  # type: ignore[arg-type]
        plan = replace(plan, reference=moved_to)
        learner = make_learner(config, plan, bench.folder)
        with closing(learner):
            moved(learner.worker.model, seed=1)
            if learner.scorers is None:
                assert learner.worker.reference is not None
                scores = [learner.worker.reference.log_prob([batch])[0].cpu() for _ in range(2)]
            else:
                scores = [learner.scorers.wait(learner.scorers.begin(batch)) for _ in range(2)]
        assert torch.equal(*scores), f"{home}: the same batch scored twice gives other bits"
        gap = float((scores[0][mask] - expected).abs().max())
        assert gap < 2e-3, f"{home}: log-probs differ from the frozen weights' by up to {gap:.2g}"
        if home == "host memory" and bench.device == "cuda":
            assert learner.worker.reference is not None
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            learner.worker.reference.log_prob([batch])
            assert torch.cuda.memory_allocated() <= held, "the visiting reference left something on the GPU"
            assert torch.cuda.max_memory_allocated() > held, "the reference did not visit the GPU"
    return ", ".join(homes)


def resumes(bench: Bench) -> str:
    """A learner's state through files, on the same device and on the CPU: equal next steps."""
    groups = collected(bench)
    config = configured(bench)
    first = make_learner(config, learner_plan(config, bench), bench.folder)
    first.step(first.credit(groups))
    path, numbers = bench.folder / "saved", first.numbers()
    first.save(path)()
    wanted = first.step(first.credit(groups)).metrics
    for device, bound in ((bench.device, 1e-5), ("cpu", 1e-3)):
        there = Bench(bench.folder, device)
        config = configured(there)
        again = make_learner(config, learner_plan(config, there), bench.folder)
        again.load(path, numbers)
        found = again.step(again.credit(groups)).metrics
        for name in ("loss/objective", "grad_norm", "kl/ref"):
            assert abs(found[name] - wanted[name]) <= bound * (1 + abs(wanted[name])), (
                f"resumed on {device}: {name} is {found[name]:.6g} and not {wanted[name]:.6g}"
            )
    return f"{bench.device}, CPU"
