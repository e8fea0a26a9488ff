"""Checks of vLLM engines: they draw and score as the learner's model does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from envs.group import SampledCompletion, Sampling
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.engines.backends.vllm import vllm_settings
from torchgrpo.rollout.engines.interface import Request, SteppedEngine, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.selftest.check import Bench
from torchgrpo.selftest.tiny import built, configured, moved
from torchgrpo.training.model_loading import load_model, load_tokenizer, saved_eos_token_ids
from torchgrpo.training.training_mode import evaluation_mode

MEAN_GAP = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Largest mean |engine log-prob - learner log-prob| of drawn tokens that an engine's dtype explains."""
TIMEOUT_S = 3600.0  # beyond the deadline of the check
VLLM = "inference_model.backend=vllm"


def policy(run: Lockstep) -> nn.Module:
    return run.learner.worker.model


def requests(sampling: Sampling) -> list[Request]:
    """Four prompts of different lengths, four completions each."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(7, 250, (3 + 5 * i,), generator=generator).tolist() for i in range(4)]
    return [Request(i, tuple(prompt), 4, sampling, seed=i) for i, prompt in enumerate(prompts)]


def drawn_gap(model: nn.Module, engine: SteppedEngine, sampling: Sampling) -> torch.Tensor:
    """|engine - learner| of log-probs of drawn tokens, each of the engine's present version."""
    asked, gaps = requests(sampling), []
    for request, response in zip(asked, generate(engine, asked, timeout=TIMEOUT_S), strict=True):
        for completion in response.completions:
            versions = set(completion.policy_versions)
            assert versions == {engine.policy_version}, "a token has the version of another push"
            gaps.append(torch.tensor(completion.log_probs) - expected(model, request, completion))
    return torch.cat(gaps).abs()


@torch.no_grad()
def expected(model: nn.Module, request: Request, completion: SampledCompletion) -> torch.Tensor:
    """The learner's log-probs of a completion, of the distribution that `request` draws from."""
    sampling, count = request.sampling, len(completion.token_ids)
    device = next(model.parameters()).device
    ids = torch.tensor([[*request.prompt, *completion.token_ids]], device=device)
    with evaluation_mode(model):
        logits = model(ids).logits[0, -count - 1 : -1].float().cpu() / sampling.temperature
    values, order = logits.sort(descending=True)
    if sampling.top_k:
        values[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        shares = values.softmax(-1)
        values[shares.cumsum(-1) - shares >= sampling.top_p] = -torch.inf
    log_probs = torch.empty_like(logits).scatter_(1, order, values.log_softmax(-1))
    return log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def weights_arrive(bench: Bench, overrides: Sequence[str] = (), tied: bool = False, pushes: int = 3) -> str:
    """Pushes changed weights, and compares fixed sequences and drawn tokens after each push."""
    with built(bench, VLLM, *overrides, tied=tied) as run:
        weights, worst, gap = run.collector.weights, 0.0, 0.0
        for version in range(pushes):
            weights.push()
            worst = max(worst, weights.check()["weight_check/largest"])
            gaps = drawn_gap(policy(run), run.collector.engine, Sampling(max_tokens=8))
            gap = max(gap, float(gaps.mean()))
            weights.rest_engines()
            moved(policy(run), seed=version)
        dtype, transport = run.plan.engine.dtype, run.plan.transport
    assert gap < MEAN_GAP[dtype], f"{dtype}: drawn log-probs are {gap:.2g} from the learner's in the mean"
    return f"{transport}, {dtype}: weight check {worst:.1g}, drawn tokens {gap:.1g}"


def draws(bench: Bench, overrides: Sequence[str] = ()) -> str:
    """Draws with temperature, top-k, top-p and seeds; compares log-probs with the learner's."""
    gap = 0.0
    with built(bench, VLLM, *overrides) as run:
        engine, dtype = run.collector.engine, run.plan.engine.dtype
        run.collector.weights.push()
        plain = Sampling(max_tokens=8)
        warm = replace(plain, temperature=0.7)
        for sampling in (plain, warm, replace(warm, top_k=20, top_p=0.9)):
            apart = drawn_gap(policy(run), engine, sampling)
            cut = apart.isinf()  # half precision may order the last kept token and the next otherwise
            assert not cut.any() or dtype != "float32", f"{sampling}: a token was drawn that is cut off"
            gap = max(gap, float(apart[~cut].mean()))
            assert gap < MEAN_GAP[dtype], f"{sampling}: log-probs are {gap:.2g} from the learner's"
        first, second = (drawn(engine, plain) for _ in range(2))
    assert len(set(first)) > len(first) // 2, "different seeds give the same completions"
    same = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
    least = 1 if bench.device == "cpu" else 0.5
    assert same >= least, f"equal seeds: {same:.0%} of completions are equal"
    return f"log-probs within {gap:.1g} in the mean, equal seeds {same:.0%} equal"


def drawn(engine: SteppedEngine, sampling: Sampling) -> list[tuple[int, ...]]:
    """Tokens of the completions of `requests`."""
    responses = generate(engine, requests(sampling), timeout=TIMEOUT_S)
    return [tuple(one.token_ids) for response in responses for one in response.completions]


def in_flight(bench: Bench) -> str:
    """Pushes weights between tokens; each token keeps its own version and log-prob."""
    config = configured(bench, VLLM, "inference_model.dtype=float32")
    plan = make_plan(config, False, this_machine(bench.folder), bench.folder)
    plan = replace(plan, engine=replace(plan.engine, async_scheduling=False))  # as beside a learner that runs
    model = load_model(config.model, torch.device(plan.devices.train_device))
    ends = saved_eos_token_ids(config.model.name, load_tokenizer(config.model))
    engine = VLLMEngine(vllm_settings(config, tuple(ends), plan))
    try:
        for number, update in enumerate(("keep", "wait", "abort")):
            engine.settings = replace(engine.settings, update=update)
            _push_between_tokens(engine, model, 2 * number, update)
    finally:
        engine.close()
    return "keep, wait, abort"


def _push_between_tokens(engine: VLLMEngine, model: nn.Module, version: int, update: str) -> None:
    engine.load(model.state_dict().items(), version)
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
    """Trains on one GPU in turns: sleep frees memory, waking fits, nothing grows."""
    asleep: list[int] = []
    awake: list[int] = []
    with built(bench, VLLM, *overrides) as run:
        run.push_weights()
        for _ in range(iterations):
            rollout = run.collect()
            asleep.append(_free(bench))
            run.advantage(rollout)
            for minibatch in run.minibatches(rollout):
                run.learn(minibatch)
            moved(policy(run), seed=run.learner.optimizer_steps)
            run.push_weights()
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
