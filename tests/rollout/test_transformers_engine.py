import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from envs.group import SampledCompletion, Sampling
from tests.rollout.conftest import drain, score_single_engine
from tests.tiny_models import EOS, VOCABULARY, tiny_llama
from torchgrpo.rollout.engines.continuous_batching_decoder import ContinuousBatchingDecoder
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.token_sampling import SamplingFilter, sample_tokens, uniform_samples
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine


def requests(count: int, n: int = 4, **sampling: float) -> list[Request]:
    settings = Sampling(max_tokens=12, **sampling)
    return [Request(i, tuple(range(5, 8 + i % 7)), n, settings, seed=100 + i) for i in range(count)]


def fresh_log_probs(
    model: torch.nn.Module, request: Request, completion: SampledCompletion, settings: SamplingFilter
) -> torch.Tensor:
    """Returns log-probs of a completion's tokens by one forward pass over the whole sequence."""
    ids = torch.tensor([[*request.prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
    return settings.log_probs(logits).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        *[{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_p": 0.9, "top_k": 9}],
        *[{"min_p": 0.1}, {"temperature": 1.3, "top_p": 0.9, "top_k": 9, "min_p": 0.05}],
    ],
)
def test_log_probs_equal_a_fresh_forward_for_every_token(tied: bool, sampling: dict[str, float]) -> None:
    model = tiny_llama(tied)
    asked = requests(9, **sampling)
    answers = generate(TransformersEngine(model, [EOS], max_num_seqs=11), asked)
    for request, answer in zip(asked, answers, strict=True):
        for completion in answer.completions:
            expected = fresh_log_probs(model, request, completion, SamplingFilter([request.sampling], model.device))
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_min_p_keeps_the_tokens_near_the_likeliest_before_top_p_applies() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    for sampling, kept in (
        (Sampling(min_p=0.3), [0.4, 0.3, 0.2]),
        (Sampling(min_p=1.0), [0.4]),
        (Sampling(min_p=0.3, top_p=0.76), [0.4, 0.3]),
        (Sampling(top_p=0.76), [0.4, 0.3, 0.2]),
        (Sampling(min_p=0.3, top_k=2), [0.4, 0.3]),
    ):
        probabilities = SamplingFilter([sampling], torch.device("cpu")).log_probs(logits)[0].exp()
        expected = torch.tensor(kept) / sum(kept)
        torch.testing.assert_close(probabilities[: len(kept)], expected)
        assert not probabilities[len(kept) :].any()


def test_equal_seeds_give_equal_tokens_whatever_else_runs() -> None:
    model = tiny_llama()
    together = generate(TransformersEngine(model, [EOS], max_num_seqs=400), requests(8))
    crowded = generate(TransformersEngine(model, [EOS], max_num_seqs=4), requests(8))
    assert [a.completions for a in together] == [
        [
            SampledCompletion(c.token_ids, pytest.approx(c.log_probs, abs=1e-5), c.policy_versions, c.finish_reason)
            for c in b.completions
        ]
        for b in crowded
    ]


def test_waiting_requests_replace_finished_rows() -> None:
    """Limits from 1 to 40 tokens make rows end at all times.

    Each completion equals that of the request alone, and the cache never holds more rows than may run.
    """
    asked = [
        replace(one, sampling=replace(one.sampling, max_tokens=1 + 7 * place % 40))
        for place, one in enumerate(requests(24))
    ]
    engine = TransformersEngine(tiny_llama(seed=0), [], max_num_seqs=12)
    for one in asked:
        engine.submit(one)
    answered: dict[int, Response] = {}
    while engine.in_flight:
        answered |= {response.request_id: response for response in engine.step()}
        decoder = engine.decoder
        assert isinstance(decoder, ContinuousBatchingDecoder)
        assert len(decoder._rows) <= 12
        assert not any(row.is_finished for row in decoder._rows)
        assert sum(cohort.rows for cohort in decoder._cache.cohorts) == len(decoder._rows)
    for one in asked:
        (alone,) = generate(TransformersEngine(tiny_llama(seed=0), []), [one])
        together = answered[one.request_id].completions
        for ours, theirs in zip(together, alone.completions, strict=True):
            assert ours.token_ids == theirs.token_ids
            torch.testing.assert_close(
                torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=1e-4, rtol=1e-4
            )


def test_the_cache_grows_with_its_rows_up_to_their_limit() -> None:
    """The prompt is stored once, whatever the number of completions."""
    (one,) = requests(1)
    one = replace(one, sampling=replace(one.sampling, max_tokens=40))
    engine = TransformersEngine(tiny_llama(), [], max_num_seqs=4)
    engine.submit(one)
    longest, capacities = one.sampling.max_tokens, []
    for filled in range(1, longest - 1):
        engine.step()
        assert isinstance(engine.decoder, ContinuousBatchingDecoder)
        (cohort,) = engine.decoder._cache.cohorts
        assert cohort.num_tokens == filled
        assert len(cohort._prompts[0][0]) == 1
        assert len(cohort._completions[0][0]) == one.n
        capacities.append(cohort.capacity)
        assert filled <= capacities[-1] <= min(longest, max(16, filled + filled // 4))
    assert capacities == sorted(capacities) and 1 < len(set(capacities)) < len(capacities)


def test_a_completion_ends_at_the_end_token_or_the_limit_and_says_which() -> None:
    answers = generate(TransformersEngine(tiny_llama(), [EOS]), requests(20))
    reasons = Counter()
    for answer in answers:
        assert len(answer.completions) == 4
        for completion in answer.completions:
            reasons[completion.finish_reason] += 1
            ended = completion.token_ids[-1] == EOS
            assert completion.finish_reason == ("stop" if ended else "length")
            assert EOS not in completion.token_ids[:-1]
            assert len(completion.token_ids) == 12 or ended
            assert len(completion.log_probs) == len(completion.policy_versions) == len(completion.token_ids)
    assert set(reasons) == {"stop", "length"}


def test_one_token_limit() -> None:
    sampling = Sampling(max_tokens=1)
    asked = [Request(i, (5, 6), 3, sampling, seed=i) for i in range(4)]
    engine = TransformersEngine(tiny_llama(), [EOS])
    assert all(len(c.token_ids) == 1 for answer in generate(engine, asked) for c in answer.completions)
    assert engine.in_flight == 0


def test_tokens_follow_the_models_distribution() -> None:
    model = tiny_llama()
    request = Request(0, (5, 6, 7), 8000, Sampling(max_tokens=1, temperature=0.8, top_p=0.95), seed=7)
    engine = TransformersEngine(model, [EOS], max_num_seqs=8000)
    (answer,) = generate(engine, [request])
    counts = Counter(completion.token_ids[0] for completion in answer.completions)
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt])).logits[:, -1]
    expected = SamplingFilter([request.sampling], model.device).log_probs(logits)[0].exp()
    for token in range(VOCABULARY):
        p = float(expected[token])
        assert abs(counts[token] - 8000 * p) <= 5 * math.sqrt(8000 * p * (1 - p)) + 1e-9


def pushed_in_the_middle(update: str) -> tuple[list[Request], list[Response]]:
    """Starts six groups and pushes new weights after five steps."""
    engine = TransformersEngine(tiny_llama(seed=0), [], max_num_seqs=64, update=update)
    asked = requests(6)
    for request in asked:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.load(tiny_llama(seed=1).state_dict().items(), version=1)
    assert engine.in_flight == 6
    return asked, drain(engine)


@pytest.mark.parametrize(("update", "tokens_before"), [("keep", (6,)), ("abort", (6,)), ("wait", (12,))])
def test_a_push_between_steps(update: str, tokens_before: tuple[int, ...]) -> None:
    """Every token has the version that sampled it, and that version's log-prob."""
    old, new = tiny_llama(seed=0), tiny_llama(seed=1)
    plain = SamplingFilter([Sampling()], torch.device("cpu"))
    asked, answers = pushed_in_the_middle(update)
    assert sorted(answer.request_id for answer in answers) == list(range(6))
    for answer in answers:
        request = asked[answer.request_id]
        for completion in answer.completions:
            before = sum(version == 0 for version in completion.policy_versions)
            assert completion.policy_versions == [0] * before + [1] * (12 - before)
            assert before in tokens_before
            got = torch.tensor(completion.log_probs)
            under_old = fresh_log_probs(old, request, completion, plain)
            under_new = fresh_log_probs(new, request, completion, plain)
            torch.testing.assert_close(got[:before], under_old[:before], atol=1e-4, rtol=0)
            torch.testing.assert_close(got[before:], under_new[before:], atol=1e-4, rtol=0)


def test_interrupted_requests_continue_unchanged() -> None:
    kept, stopped = (
        {answer.request_id: [c.token_ids for c in answer.completions] for answer in pushed_in_the_middle(update)[1]}
        for update in ("keep", "abort")
    )
    assert kept == stopped


def test_two_aborting_pushes_in_a_row_lose_nothing() -> None:
    engine = TransformersEngine(tiny_llama(seed=0), [EOS], max_num_seqs=8, update="abort")
    for request in requests(6):
        engine.submit(request)
    answers: list[Response] = []
    version = 0
    while engine.in_flight:
        answers += engine.step()
        for _ in range(2):
            version += 1
            engine.load(tiny_llama(seed=version).state_dict().items(), version)
    assert sorted(answer.request_id for answer in answers) == list(range(6))
    for answer in answers:
        for completion in answer.completions:
            assert completion.policy_versions == sorted(completion.policy_versions)
            assert len(completion.token_ids) == len(completion.policy_versions)


def test_a_push_that_leaves_tensors_out_is_an_error() -> None:
    engine = TransformersEngine(tiny_llama(), [EOS])
    weights = [(name, tensor) for name, tensor in tiny_llama().state_dict().items() if "lm_head" not in name]
    with pytest.raises(KeyError, match="lm_head"):
        engine.load(weights, version=1)


def test_score_is_the_models_log_prob() -> None:
    model = tiny_llama()
    sequence = [5, 9, 3, 17, 3, 3]
    (scores,) = score_single_engine(TransformersEngine(model, [EOS]), [sequence])
    with torch.no_grad():
        expected = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
    assert scores == pytest.approx(expected.gather(-1, torch.tensor(sequence)[1:, None])[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize("lengths", [[3], [9, 2, 40, 40], [300, 5, 7, 200, 30, 1, 30]])
def test_batched_sequences_have_the_scores_of_each_alone(lengths: list[int]) -> None:
    """Up to rounding, for padded sequences and for batches that are split."""
    engine = TransformersEngine(tiny_llama(), [EOS])
    sequences = [row.tolist() for row in torch.randint(3, 40, (len(lengths), max(lengths))).unbind()]
    sequences = [row[:length] for row, length in zip(sequences, lengths, strict=True)]
    together = score_single_engine(engine, sequences)
    for row, sequence in zip(together, sequences, strict=True):
        assert row == pytest.approx(score_single_engine(engine, [sequence])[0], abs=1e-5)
        assert len(row) == len(sequence) - 1


def test_greedy_takes_the_likeliest_token_with_certainty() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    settings = SamplingFilter([Sampling(temperature=0.0)] * 6, torch.device("cpu"))
    seeds = np.arange(6, dtype=np.uint64)
    tokens, log_probs = sample_tokens(settings.log_probs(logits), seeds, seeds)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert log_probs.tolist() == [0.0] * 6


def test_uniforms_are_uniform_and_independent_of_neighbours() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    counters = np.tile(np.arange(200, dtype=np.uint64), 200)
    values = uniform_samples(seeds, counters).reshape(200, 200)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.02


def test_sampling_inverts_the_cumulative_distribution_of_a_large_vocabulary() -> None:
    """1,000 tokens in blocks of 256 are sampled; rounding may swap neighbours."""
    seeds = np.arange(5_000, dtype=np.uint64)
    counters = np.zeros_like(seeds)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).expand(len(seeds), -1)
    log_probs = logits.log_softmax(-1)
    tokens, sampled_log_probs = sample_tokens(log_probs, seeds, counters)
    cumulative = log_probs[0].double().exp().cumsum(0)
    expected = torch.searchsorted(cumulative, torch.from_numpy(uniform_samples(seeds, counters)) * cumulative[-1])
    assert (tokens - expected).abs().max() <= 1
    assert (tokens == expected).double().mean() > 0.99
    assert torch.equal(sampled_log_probs, log_probs.gather(1, tokens[:, None])[:, 0])
