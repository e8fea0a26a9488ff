"""Checks of vLLM engines: log-probs equal the learner's after pushes, and sleep frees GPU memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from envs.group import SampledCompletion, Sampling
from torchgrpo.plan.machine import this_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.rollout.engines.backends.vllm import make_vllm_settings
from torchgrpo.rollout.engines.interface import Request, SteppedEngine, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.selftest.check import CheckWorkspace
from torchgrpo.selftest.tiny_model import make_config, open_run, perturb_weights
from torchgrpo.training.model_loading import load_model, load_tokenizer, saved_eos_token_ids
from torchgrpo.training.training_mode import evaluation_mode

MEAN_GAP = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Largest mean |engine log-prob - learner log-prob| of sampled tokens, by the engine's dtype."""
GENERATION_TIMEOUT_S = 3600.0  # beyond the deadline of the check
VLLM = "inference_model.backend=vllm"


def policy_model(run: LockstepRun) -> nn.Module:
    return run.learner.worker.model


def make_requests(sampling: Sampling) -> list[Request]:
    """Builds requests for four prompts of different lengths, four completions each."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(7, 250, (3 + 5 * i,), generator=generator).tolist() for i in range(4)]
    return [Request(i, tuple(prompt), 4, sampling, seed=i) for i, prompt in enumerate(prompts)]


def log_prob_gap(model: nn.Module, engine: SteppedEngine, sampling: Sampling) -> torch.Tensor:
    """Returns |engine - learner| of the log-probs of sampled tokens.

    All tokens must have the engine's current policy version.
    """
    requests, gaps = make_requests(sampling), []
    for request, response in zip(requests, generate(engine, requests, timeout=GENERATION_TIMEOUT_S), strict=True):
        for completion in response.completions:
            versions = set(completion.policy_versions)
            assert versions == {engine.policy_version}, "a token has the version of another push"
            gaps.append(torch.tensor(completion.log_probs) - learner_log_probs(model, request, completion))
    return torch.cat(gaps).abs()


@torch.no_grad()
def learner_log_probs(model: nn.Module, request: Request, completion: SampledCompletion) -> torch.Tensor:
    """Returns the learner's log-probs of a completion, under the sampling distribution of `request`."""
    sampling, count = request.sampling, len(completion.token_ids)
    device = next(model.parameters()).device
    ids = torch.tensor([[*request.prompt, *completion.token_ids]], device=device)
    with evaluation_mode(model):
        logits = model(ids).logits[0, -count - 1 : -1].float().cpu() / sampling.temperature
    values, order = logits.sort(descending=True)
    values[values.softmax(-1) < sampling.min_p * values.softmax(-1)[:, :1]] = -torch.inf
    if sampling.top_k:
        values[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        shares = values.softmax(-1)
        values[shares.cumsum(-1) - shares >= sampling.top_p] = -torch.inf
    log_probs = torch.empty_like(logits).scatter_(1, order, values.log_softmax(-1))
    return log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def check_weight_push(
    workspace: CheckWorkspace, overrides: Sequence[str] = (), tied: bool = False, pushes: int = 3
) -> str:
    """Pushes changed weights, and compares fixed sequences and sampled tokens after each push."""
    with open_run(workspace, VLLM, *overrides, tied=tied) as run:
        weight_pusher, worst, gap = run.rollout_components.weight_pusher, 0.0, 0.0
        for version in range(pushes):
            weight_pusher.push()
            worst = max(worst, weight_pusher.check()["weight_check/max"])
            gaps = log_prob_gap(policy_model(run), run.rollout_components.engine, Sampling(max_tokens=8))
            gap = max(gap, float(gaps.mean()))
            weight_pusher.sleep_engines()
            perturb_weights(policy_model(run), seed=version)
        dtype, transport = run.plan.engine.dtype, run.plan.transport
    assert gap < MEAN_GAP[dtype], f"{dtype}: sampled log-probs are {gap:.2g} from the learner's in the mean"
    return f"{transport}, {dtype}: weight check {worst:.1g}, sampled tokens {gap:.1g}"


def check_sampling(workspace: CheckWorkspace, overrides: Sequence[str] = ()) -> str:
    """Samples with temperature, min-p, top-k, top-p and seeds; compares log-probs with the learner's."""
    gap = 0.0
    with open_run(workspace, VLLM, *overrides) as run:
        engine, dtype = run.rollout_components.engine, run.plan.engine.dtype
        run.rollout_components.weight_pusher.push()
        plain = Sampling(max_tokens=8)
        warm = replace(plain, temperature=0.7)
        for sampling in (plain, warm, replace(warm, min_p=0.02), replace(warm, top_k=20, top_p=0.9)):
            gaps = log_prob_gap(policy_model(run), engine, sampling)
            is_cut = gaps.isinf()  # half precision may swap the last kept token and the next
            assert not is_cut.any() or dtype != "float32", f"{sampling}: an excluded token was sampled"
            gap = max(gap, float(gaps[~is_cut].mean()))
            assert gap < MEAN_GAP[dtype], f"{sampling}: log-probs are {gap:.2g} from the learner's"
        first, second = (sample_tokens(engine, plain) for _ in range(2))
    assert len(set(first)) > len(first) // 2, "different seeds give the same completions"
    same = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
    least = 1 if workspace.device == "cpu" else 0.5
    assert same >= least, f"equal seeds: {same:.0%} of completions are equal"
    return f"log-probs within {gap:.1g} in the mean, equal seeds {same:.0%} equal"


def sample_tokens(engine: SteppedEngine, sampling: Sampling) -> list[tuple[int, ...]]:
    """Samples completions of `make_requests`; returns their tokens."""
    responses = generate(engine, make_requests(sampling), timeout=GENERATION_TIMEOUT_S)
    return [tuple(one.token_ids) for response in responses for one in response.completions]


def check_push_in_flight(workspace: CheckWorkspace) -> str:
    """Pushes weights between tokens, and checks the version and log-prob of each token."""
    config = make_config(workspace, VLLM, "inference_model.dtype=float32")
    plan = make_plan(config, False, this_machine(workspace.folder), workspace.folder)
    plan = replace(plan, engine=replace(plan.engine, async_scheduling=False))  # as beside a running learner
    model = load_model(config.model, torch.device(plan.devices.train_device))
    ends = saved_eos_token_ids(config.model.name, load_tokenizer(config.model))
    engine = VLLMEngine(make_vllm_settings(config, tuple(ends), plan))
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
    perturb_weights(model, seed=version)
    engine.load(model.state_dict().items(), version + 1)
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finished: list[Any] = []
    while engine.in_flight:
        finished += engine.step()
    before = 12 if update == "wait" else 4
    for completion in finished[0].completions:
        count = len(completion.token_ids)
        expected = [version] * min(before, count) + [version + 1] * max(0, count - before)
        assert completion.policy_versions == expected, f"update={update}: versions {completion.policy_versions}"
        segments = []
        for state, selection in ((old, slice(0, before)), (new, slice(before, None))):
            model.load_state_dict(state)
            segments.append(learner_log_probs(model, request, completion)[selection])
        gap = float((torch.tensor(completion.log_probs) - torch.cat(segments)).abs().max())
        assert gap < 1e-2, f"update={update}: log-probs differ by {gap:.2g} from those of each token's version"


def check_shared_gpu(workspace: CheckWorkspace, overrides: Sequence[str] = (), iterations: int = 3) -> str:
    """Trains with learner and engine on one GPU, and checks that sleep frees memory.

    Memory must not grow over the iterations.
    """
    free_asleep: list[int] = []
    free_awake: list[int] = []
    with open_run(workspace, VLLM, *overrides) as run:
        run.push_weights()
        for _ in range(iterations):
            rollout = run.collect()
            free_asleep.append(_free(workspace))
            run.advantage(rollout)
            for minibatch in run.minibatches(rollout):
                run.learn(minibatch)
            perturb_weights(policy_model(run), seed=run.learner.optimizer_steps)
            run.push_weights()
            free_awake.append(_free(workspace))
    if workspace.device == "cpu":
        return "no GPU memory to release"
    freed_bytes, growth = min(free_asleep) - max(free_awake), free_asleep[1] - free_asleep[-1]
    assert freed_bytes > 1 << 30, f"sleeping releases {freed_bytes / 2**30:.2f} GiB"
    assert growth < 256 << 20, f"memory grows by {growth / 2**20:.0f} MiB after every iteration"
    return f"sleeping frees {freed_bytes / 2**30:.1f} GiB"


def _free(workspace: CheckWorkspace) -> int:
    """Returns the free bytes of the GPU, after emptying this process's cache."""
    if workspace.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
