"""Every known fault of a weight push, injected into the real engine: the canary stops and names it.

Four times: where fixed sequences prove every push at once, where what the engine draws proves it before the update, and
where it is asked about what it drew before the push, or before the push before that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

from envs.group import ALONE, Sampling
from rollout.engines import vllm_weights
from rollout.engines.sampler import Request, generate
from rollout.engines.vllm_engine import VLLMEngine
from rollout.weights.canary import Canary, CanaryError
from rollout.weights.evidence import Answer, Drawn, DrawnRow, drawn_part
from rollout.weights.fixed_sequences import FixedSequences, canary_sequences
from rollout.weights.rounding import Rounding
from tests.rollout.conftest import MAX_LEN, VOCAB, StartEngine, tiny_llama
from training.engine_arithmetic import Arithmetic, rounding_error

HEAD = "lm_head.weight"
Weights = dict[str, torch.Tensor]
Proof = Literal["fixed", "drawn", "asked", "asked late"]
PROMPTS = canary_sequences(VOCAB, MAX_LEN, count=3, length=140)
"""Each longer than a block of the prefix cache. What is drawn of them is 96 tokens; 64 are the least that prove."""


class Learner:
    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        padded = pad_sequence([torch.tensor(list(sequence)) for sequence in sequences], batch_first=True)
        # Causal: what follows a row does not change it.
        logits = self.model(padded).logits[:, :-1] / temperature
        scores = logits.log_softmax(-1).gather(2, padded[:, 1:, None])[..., 0]
        return [row[: len(ids) - 1].tolist() for row, ids in zip(scores, sequences, strict=True)]

    def rounding_error(
        self, sequences: Sequence[Sequence[int]], dtype: str, float8: bool, draws: int = 1
    ) -> list[list[float]]:
        return rounding_error(self.model, sequences, Arithmetic.of(dtype), draws=draws)


def train_a_little(model: LlamaForCausalLM, step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=generator))


class Run:
    """A learner, an engine, and the canary between them.

    proof: fixed sequences at every push, or what was drawn since, or before and scored since. drawn_before: what may
    be asked about, the newest last.
    """

    def __init__(self, engine: VLLMEngine, model: LlamaForCausalLM, proof: Proof = "fixed") -> None:
        self.engine, self.model, self.proof, self.version = engine, model, proof, 0
        self.learner = Learner(model)
        self.canary = Canary(
            FixedSequences(canary_sequences(VOCAB, MAX_LEN), engine, self.learner),
            Rounding(self.learner, engine.settings.dtype),
            HEAD if model.config.tie_word_embeddings else None,
            share=None if proof == "fixed" else 0.0,
        )
        self.drawn_before: list[Sequence[DrawnRow]] = []

    def push(self, change: Callable[[Weights], Weights] = lambda weights: weights) -> dict[str, float]:
        """And, where that is the proof, all that has to be before an update."""
        self.version += 1
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.canary.before_push()
        self.engine.load(change(weights).items(), self.version)
        found = self.canary.after_push(self.version)
        asks, drawn = self.proof in ("asked", "asked late"), None
        if self.proof == "drawn" or (asks and not self.drawn_before):
            drawn = self.draw()
            found |= self.canary.look_at({ALONE: drawn})
        elif asks:
            found |= self.canary.look_at({}, self.ask)
        if self.proof != "fixed" and not self.canary.proven:
            found |= self.canary.prove()
        if asks:
            kept = self.drawn_before[-1:] if self.proof == "asked late" else []
            rows = (drawn or self.draw()).rows
            self.drawn_before = [*kept, [replace(row, learner=None) for row in rows]]
        return found

    def ask(self) -> Answer:
        before = self.drawn_before[0]
        sequences = [row.sequence for row in before]
        learner = drawn_part(before, self.learner.score(sequences))
        return Answer(before, self.engine.score(sequences), learner, len(self.drawn_before))

    def draw(self) -> Drawn:
        requests = [
            Request(1000 * self.version + index, tuple(prompt), 4, Sampling(max_tokens=8), seed=self.version)
            for index, prompt in enumerate(PROMPTS)
        ]
        drawn = [
            (request.prompt, one)
            for request, response in zip(requests, generate(self.engine, requests), strict=True)
            for one in response.completions
        ]
        scores = self.learner.score([[*prompt, *one.token_ids] for prompt, one in drawn])
        rows = [
            DrawnRow(prompt, one.token_ids, one.log_probs, learner[-len(one.token_ids) :])
            for (prompt, one), learner in zip(drawn, scores, strict=True)
        ]
        gaps = [torch.tensor(row.engine) - torch.tensor(row.learner) for row in rows]
        return Drawn(torch.cat(gaps).abs(), rows[::3])

    def step_and_push(self, change: Callable[[Weights], Weights] = lambda w: w, scale: float = 0.05) -> None:
        train_a_little(self.model, self.version, scale)
        self.push(change)


@pytest.fixture(params=["fixed", "drawn", "asked", "asked late"])
def proof(request: pytest.FixtureRequest) -> Proof:
    return request.param


@pytest.fixture
def run(vllm_engine: VLLMEngine, tied: bool, proof: Proof) -> Run:
    return begun(vllm_engine, tiny_llama(tied), proof)


def begun(engine: VLLMEngine, model: LlamaForCausalLM, proof: Proof) -> Run:
    """So far that the next push is proven as all later ones are."""
    run = Run(engine, model, proof)
    run.push()
    if proof == "asked late":
        run.step_and_push()
    return run


def swap_halves(*names: str) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        return weights | {name: torch.cat(weights[name].chunk(2)[::-1]) for name in names}

    return change


def rounded(weights: Weights) -> Weights:
    return {name: tensor.to(torch.float8_e4m3fn).float() for name, tensor in weights.items()}


def not_a_number(weights: Weights) -> Weights:
    return weights | {"model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan)}


def hotter(weights: Weights) -> Weights:
    return weights | {"model.norm.weight": weights["model.norm.weight"] / 0.7}


def without_head(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


GARBAGE: dict[str, Callable[[Weights], Weights]] = {
    "query": swap_halves("model.layers.0.self_attn.q_proj.weight"),
    "mlp": swap_halves("model.layers.1.mlp.down_proj.weight"),
    "embedding": swap_halves("model.embed_tokens.weight", HEAD),
    "float8": rounded,
    "nan": not_a_number,
}


@pytest.mark.parametrize("scale", [0.05, 1e-3, 1e-6, 0.0])
def test_good_pushes_pass(run: Run, scale: float) -> None:
    for _ in range(3):
        train_a_little(run.model, run.version, scale)
        assert run.push()["canary/max_abs_diff"] < 1e-4


@pytest.mark.parametrize("scale", [0.05, 1e-5])
def test_unchanged(run: Run, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """The smaller movement hides inside the tolerance, and is missed all the same."""
    monkeypatch.setattr(run.engine, "_reload", lambda weights: None)
    with pytest.raises(CanaryError, match="Cause: unchanged"):
        run.step_and_push(scale=scale)


@pytest.mark.parametrize("scale", [0.05, 1e-4])
def test_stale_prefix_cache(run: Run, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(run.engine._llm, "reset_prefix_cache", lambda **how: True)
    with pytest.raises(CanaryError, match="Cause: stale prefix cache"):
        run.step_and_push(scale=scale)
    monkeypatch.undo()
    run.engine._llm.reset_prefix_cache(reset_running_requests=True)


def test_temperature_scaled(run: Run) -> None:
    with pytest.raises(CanaryError, match=r"Cause: temperature scaled.* 0\.7,"):
        run.step_and_push(hotter)


@pytest.mark.parametrize("change", GARBAGE.values(), ids=GARBAGE)
def test_garbage(run: Run, change: Callable[[Weights], Weights]) -> None:
    with pytest.raises(CanaryError, match="Cause: shard or dtype garbage"):
        run.step_and_push(change)


@pytest.mark.parametrize("proof", ["fixed"], indirect=True)
def test_a_replaced_engine_that_did_not_load_the_last_push(run: Run) -> None:
    """It would draw tokens with the weights it started from; the next push, good in itself, must not hide that."""
    first = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.step_and_push()
    run.engine.load(first.items(), version=0)
    with pytest.raises(
        CanaryError, match=r"the engine differs from policy version 2.*replaced a lost engine"
    ):
        run.step_and_push()


@pytest.mark.parametrize("proof", ["drawn"], indirect=True)
def test_a_replaced_engine_is_asked_whatever_the_one_before_it_drew(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    draw = run.draw

    def lost_while_drawing() -> Drawn:
        drawn = draw()
        run.engine.load(first.items(), version=0)
        monkeypatch.setattr(VLLMEngine, "members", (1,))
        return drawn

    monkeypatch.setattr(run, "draw", lost_while_drawing)
    with pytest.raises(CanaryError, match=r"of policy version 2: .*Cause: it replaced a lost engine"):
        run.step_and_push()


@pytest.mark.parametrize("proof", ["drawn"], indirect=True)
def test_what_was_drawn_proves_a_push_without_a_question(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.engine, "score", lambda sequences: pytest.fail("the engine was asked"))
    for _ in range(3):
        run.step_and_push()
    assert run.canary.proven


@pytest.mark.parametrize("proof", ["drawn"], indirect=True)
def test_few_tokens_prove_nothing_and_make_fixed_sequences_due(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    score, draw = run.engine.score, run.draw
    monkeypatch.setattr(run.engine, "score", lambda ids: asked.append(run.version) or score(ids))
    monkeypatch.setattr(run, "draw", lambda: replace(draw(), gaps=torch.zeros(63)))
    run.step_and_push()
    assert asked == [2], "when it was to be proven"
    run.step_and_push()
    assert asked == [2, 3, 3], "at once, before and after the push"
    monkeypatch.setattr(run, "draw", draw)
    run.step_and_push()
    run.step_and_push()
    assert asked == [2, 3, 3, 4, 4] and run.canary.proven


@pytest.mark.parametrize("proof", ["asked"], indirect=True)
def test_one_question_proves_a_push(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[list[int]]] = []
    score = run.engine.score
    monkeypatch.setattr(run.engine, "score", lambda ids: asked.append(ids) or score(ids))
    for count in range(1, 4):
        rows = [row.sequence for row in run.drawn_before[0]]
        run.step_and_push()
        assert asked[-1] == rows and len(asked) == count and run.canary.proven


@pytest.mark.parametrize("proof", ["asked"], indirect=True)
def test_an_answer_of_other_engines_makes_fixed_sequences_due(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    score, ask = run.engine.score, run.ask
    monkeypatch.setattr(run.engine, "score", lambda ids: asked.append(len(ids)) or score(ids))
    monkeypatch.setattr(run, "ask", lambda: replace(ask(), scores={"another": []}))
    run.step_and_push()
    assert asked == [4, 3] and run.canary.proven
    monkeypatch.setattr(run, "ask", ask)
    run.step_and_push()
    run.step_and_push()
    assert asked == [4, 3, 3, 3, 4], "at once, before and after the push; then asked again"


def test_tied_head_missing(
    started_engines: dict[bool, VLLMEngine], monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    """vLLM's own reload keeps what it packed of the head; written in place, it follows the embeddings."""
    engine, model = started_engines[True], tiny_llama(True)
    engine.load(model.state_dict().items(), version=0)
    run = Run(engine, model, proof)
    run.push()
    run.step_and_push(without_head)
    monkeypatch.setattr(vllm_weights, "_plain", lambda model, config: False)
    with pytest.raises(CanaryError, match=r"Cause: tied head missing; the push lacked lm_head\.weight"):
        run.step_and_push(without_head)


def test_an_adapter_that_is_never_applied(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    """The new adapter lies in its folder, and the engine goes on with the one it has."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    from rollout.engines.vllm_settings import AdapterShape

    policy = get_peft_model(tiny_llama(False), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    run = Run(start_engine(adapter=AdapterShape(4, 8.0, ("q_proj",))), policy, proof)

    def adapter(weights: Weights) -> Weights:
        return dict(get_peft_model_state_dict(policy))

    def move() -> None:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))

    run.push(adapter)
    move()
    run.push(adapter)
    monkeypatch.setattr(run.engine._llm, "add_lora", lambda request: True)
    move()
    with pytest.raises(CanaryError, match="Cause: unchanged"):
        run.push(adapter)


@pytest.fixture(scope="module")
def half_engines(start_engine: StartEngine) -> dict[str, VLLMEngine]:
    return {dtype: start_engine(dtype=dtype) for dtype in ("bfloat16", "float16")}


@pytest.fixture(params=["bfloat16", "float16"])
def half(request: pytest.FixtureRequest, half_engines: dict[str, VLLMEngine], proof: Proof) -> Run:
    """An engine in half precision under a float32 learner, its tolerance measured on this model."""
    return begun(half_engines[request.param], tiny_llama(False), proof)


def test_an_engine_in_half_precision_keeps_far_from_its_tolerance(half: Run) -> None:
    for _ in range(3):
        train_a_little(half.model, half.version, 0.05)
        assert half.push()["canary/max_abs_diff"] < half.canary.tolerance.largest / 2
    assert half.canary.tolerance.largest < 0.2, "which a constant for all models could not be"


def test_sharper_weights_round_more_and_a_closer_look_allows_it(half: Run) -> None:
    """Training makes a model surer of itself: its log-probs grow, and with them what rounding does to them."""
    narrow = half.canary.tolerance
    with torch.no_grad():
        half.model.lm_head.weight.mul_(30)
    assert half.push()["canary/max_abs_diff"] > narrow.largest
    assert half.canary.tolerance.largest > narrow.largest


def test_half_precision_shows_an_unchanged_engine(half: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half.engine, "_reload", lambda weights: None)
    with pytest.raises(CanaryError, match="Cause: unchanged"):
        half.step_and_push(scale=0.02)


def test_half_precision_shows_a_stale_prefix_cache(half: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half.engine._llm, "reset_prefix_cache", lambda **how: True)
    with pytest.raises(CanaryError, match="Cause: stale prefix cache"):
        half.step_and_push(scale=0.05)
    monkeypatch.undo()
    half.engine._llm.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("change", [*GARBAGE.values(), hotter], ids=[*GARBAGE, "hotter"])
def test_half_precision_hides_no_fault(half: Run, change: Callable[[Weights], Weights]) -> None:
    with pytest.raises(CanaryError, match=r"Cause: (shard or dtype garbage|temperature scaled)"):
        half.step_and_push(change)
