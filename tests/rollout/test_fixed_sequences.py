"""Which sequences the canary falls back on, and how often it may."""

from rollout.weights.canary import _Budget
from rollout.weights.fixed_sequences import canary_sequences
from tests.rollout.conftest import VOCAB


def test_sequences_reach_past_a_cache_block_unless_the_engine_is_shorter() -> None:
    assert [len(sequence) for sequence in canary_sequences(VOCAB, 4096)] == [160] * 3
    assert [len(sequence) for sequence in canary_sequences(VOCAB, 32)] == [32] * 3
    assert canary_sequences(VOCAB, 4096) == canary_sequences(VOCAB, 4096)
    assert max(map(max, canary_sequences(VOCAB, 4096))) < VOCAB


def test_the_canary_takes_no_more_than_its_share() -> None:
    """Of the clock's time since the first comparison, which is nobody's choice."""
    now = [50.0]
    budget = _Budget(0.01, lambda: now[0])
    assert budget.allows
    budget.took(2.0)
    assert not budget.allows and budget.spent == 0
    now[0] = 251.0
    assert budget.allows, "once in 200 seconds"
    budget.took(2.0)
    assert not budget.allows
    now[0] = 451.0
    assert budget.allows
    budget.looked(0.1)
    assert not budget.allows
    now[0] = 461.0
    assert budget.allows


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
