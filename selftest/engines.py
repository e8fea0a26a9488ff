"""vLLM engines: what they draw and score is the learner's own model, before and after weights arrive."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn

from envs.group import SampledCompletion, Sampling
from plan.machine import this_machine
from plan.make_plan import make_plan
from rollout.engines.sampler import Request, SteppedEngine, generate
from rollout.engines.vllm_engine import VLLMEngine
from run.build import build
from run.engines import vllm_settings
from run.lockstep import Lockstep
from selftest.check import Bench
from selftest.tiny import configured, model_folder, moved, subfolder
from training.local_learner import LocalLearner
from training.model_loading import load_model, load_tokenizer, saved_eos_token_ids
from training.scoring import plain_scores

MEAN_GAP = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Largest mean |engine log-prob - learner log-prob| of drawn tokens that an engine's dtype explains."""
VLLM = "inference_model.backend=vllm"


@contextmanager
def built(bench: Bench, *overrides: str, tied: bool = False) -> Iterator[Lockstep]:
    """A run of grpo.py on vLLM, closed at the end."""
    working = build(configured(bench, VLLM, *overrides, tied=tied), subfolder(bench, "run"), Lockstep)
    try:
        yield working
    finally:
        working.run.close("finished")


def policy(working: Lockstep) -> nn.Module:
    """The learner's model."""
    assert isinstance(working.run.learner, LocalLearner)
    return working.run.learner.worker.model


def requests(sampling: Sampling) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(7, 250, (3 + 5 * i,), generator=generator).tolist() for i in range(4)]
    return [Request(i, tuple(prompt), 4, sampling, seed=i) for i, prompt in enumerate(prompts)]


def drawn_gap(model: nn.Module, engine: SteppedEngine, sampling: Sampling) -> torch.Tensor:
    """|engine - learner| of the log-probs of newly drawn tokens; every one is of the engine's present version."""
    asked, gaps = requests(sampling), []
    for request, response in zip(asked, generate(engine, asked, timeout=50), strict=True):
        for completion in response.completions:
            assert set(completion.policy_versions) == {engine.policy_version}, (
                "a token has the version of another push"
            )
            gaps.append(torch.tensor(completion.log_probs) - expected(model, request, completion))
    return torch.cat(gaps).abs()


@torch.no_grad()
def expected(model: nn.Module, request: Request, completion: SampledCompletion) -> torch.Tensor:
    """The learner's log-probs of a completion's tokens, of the distribution that `request` draws from."""
    sampling, count = request.sampling, len(completion.token_ids)
    if sampling.top_p == 1 and not sampling.top_k:
        sequence = [*request.prompt, *completion.token_ids]
        return torch.tensor(plain_scores(model, [sequence], sampling.temperature)[0][-count:])
    parameter = next(model.parameters())
    ids = torch.tensor([[*request.prompt, *completion.token_ids]], device=parameter.device)
    logits = model(ids).logits[0, -count - 1 : -1].float().cpu() / sampling.temperature
    values, order = logits.sort(descending=True)
    if sampling.top_k:
        values[:, sampling.top_k :] = -torch.inf
    shares = values.softmax(-1)
    values[shares.cumsum(-1) - shares >= sampling.top_p] = -torch.inf
    rows = torch.empty_like(logits).scatter_(1, order, values.log_softmax(-1))
    return rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def weights_arrive(
    bench: Bench,
    overrides: Sequence[str] = (),
    tied: bool = False,
    width: int | None = None,
    layers: int = 2,
    lose_engine: bool = False,
    pushes: int = 3,
) -> str:
    """Push changed weights, and compare fixed sequences and sampled tokens after each.

    width: of a larger random model. lose_engine: the first engine is killed before the last push.
    """
    name = () if width is None else (f"model.name={model_folder(bench, tied, width, layers)}",)
    with built(bench, *name, *overrides, tied=tied) as working:
        run, worst, gap = working.run, 0.0, 0.0
        model, engine = policy(working), run.engine
        for version in range(pushes):
            if version == pushes - 1 and lose_engine:
                os.kill(_an_actor(), signal.SIGKILL)
            run.weights.push()
            worst = max(worst, run.weights.check()["weight_check/largest"])
            gap = max(gap, float(drawn_gap(model, engine, Sampling(max_tokens=8)).mean()))
            run.weights.rest_engines()
            moved(model, seed=version)
        dtype, transport = run.plan.engine.dtype, run.plan.transport
        assert gap < MEAN_GAP[dtype], f"{dtype}: drawn log-probs are {gap:.2g} from the learner's in the mean"
    return f"{transport}, {dtype}: weight check {worst:.1g}, drawn tokens {gap:.1g}"


def _an_actor() -> int:
    """Process id of an engine in a Ray actor."""
    started = psutil.Process().children(recursive=True)
    return int(next(child.pid for child in started if "EngineHost" in child.name()))


def draws(bench: Bench, overrides: Sequence[str] = ()) -> str:
    """Temperature, top-k, top-p, greedy, seeds: the log-probs are those of the distribution that was drawn from."""
    with built(bench, *overrides) as working:
        run = working.run
        run.weights.push()
        model, engine, dtype = policy(working), run.engine, run.plan.engine.dtype
        gap = 0.0
        for sampling in (
            Sampling(max_tokens=8),
            Sampling(temperature=0.7, max_tokens=8),
            Sampling(temperature=0.7, top_k=20, top_p=0.9, max_tokens=8),
        ):
            apart = drawn_gap(model, engine, sampling)
            at_the_edge = apart.isinf()  # half precision may order the last kept token and the next otherwise
            assert not at_the_edge.any() or dtype != "float32", (
                f"{sampling}: a token was drawn that is cut off"
            )
            gap = max(gap, float(apart[~at_the_edge].mean()))
            assert gap < MEAN_GAP[dtype], (
                f"{sampling}: log-probs are {gap:.2g} from the learner's in the mean"
            )
        same = repeated(engine)
        assert same == 1 or (bench.device == "cuda" and same > 0.5), (
            f"equal seeds: {same:.0%} of completions are equal"
        )
    return f"log-probs within {gap:.1g} in the mean, equal seeds {same:.0%} equal"


def repeated(engine: SteppedEngine) -> float:
    """Share of completions that come twice under equal seeds."""

    def drawn() -> list[tuple[int, ...]]:
        responses = generate(engine, requests(Sampling(max_tokens=8)), timeout=50)
        return [tuple(one.token_ids) for response in responses for one in response.completions]

    first, second = drawn(), drawn()
    assert len(set(first)) > len(first) // 2, "different seeds give the same completions"
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)


def in_flight(bench: Bench) -> str:
    """A push while tokens are being drawn, with keep, wait and abort: each token has its version and log-prob."""
    config = configured(bench, VLLM, "inference_model.dtype=float32")
    plan = make_plan(config, False, this_machine(bench.folder), bench.folder)
    plan = replace(plan, engine=replace(plan.engine, async_scheduling=False))  # as beside a learner that runs
    model = load_model(config.model, torch.device(plan.devices.train_device))
    ends = saved_eos_token_ids(config.model.name, load_tokenizer(config.model))
    engine = VLLMEngine(vllm_settings(config, tuple(ends), plan))
    try:
        for version, update in enumerate(("keep", "wait", "abort")):
            engine.settings = replace(engine.settings, update=update)
            engine.load(model.state_dict().items(), 2 * version)
            _push_between_tokens(engine, model, 2 * version, update)
    finally:
        engine.close()
    return "keep, wait, abort"


def _push_between_tokens(engine: VLLMEngine, model: nn.Module, version: int, update: str) -> None:
    request = Request(version, tuple(range(10, 30)), 3, Sampling(max_tokens=12), seed=1)
    engine.submit(request)
    for _ in range(4):
        assert engine.step() == []
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved(model, seed=version)
    engine.load(model.state_dict().items(), version + 1)
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finished: list[Any] = []
    while engine.in_flight:
        finished += engine.step()
    before = 12 if update == "wait" else 4
    for completion in finished[0].completions:
        count = len(completion.token_ids)
        wanted = [version] * min(before, count) + [version + 1] * max(0, count - before)
        assert completion.policy_versions == wanted, f"update={update}: versions {completion.policy_versions}"
        parts = []
        for state, chosen in ((old, slice(0, before)), (new, slice(before, None))):
            model.load_state_dict(state)
            parts.append(expected(model, request, completion)[chosen])
        gap = float((torch.tensor(completion.log_probs) - torch.cat(parts)).abs().max())
        assert gap < 1e-2, (
            f"update={update}: log-probs differ by {gap:.2g} from those of each token's version"
        )


def turns(bench: Bench, overrides: Sequence[str] = (), iterations: int = 3) -> str:
    """Iterations of grpo.py on one GPU: sleep frees the engine's memory, waking fits beside the optimizer's states,
    and nothing grows from one iteration to the next."""
    asleep: list[int] = []
    awake: list[int] = []
    with built(bench, *overrides) as working:
        working.push_weights()
        for _ in range(iterations):
            groups = working.collect()
            asleep.append(_free(bench))
            for minibatch in working.minibatches(working.advantage(groups)):
                working.learn(minibatch)
            moved(policy(working), seed=working.run.learner.optimizer_steps)
            working.push_weights()
            awake.append(_free(bench))
    if bench.device == "cpu":
        return "no GPU memory to give back"
    freed, grown = min(asleep) - max(awake), asleep[1] - asleep[-1]
    assert freed > 1 << 30, f"sleeping gives {freed / 2**30:.2f} GiB back"
    assert grown < 256 << 20, f"{grown / 2**20:.0f} MiB more are taken after every iteration"
    return f"sleeping frees {freed / 2**30:.1f} GiB"


def _free(bench: Bench) -> int:
    """Bytes of the GPU that no process holds, this one's cache given back."""
    if bench.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
