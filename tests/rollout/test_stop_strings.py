"""Tests that every engine ends a completion at its first stop string."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from envs.group import SampledCompletion, Sampling
from tests.rollout.conftest import OpenPool, StartEngine, drain
from tests.rollout.conftest import tiny_llama as llama_of_vllm
from tests.rollout.test_prefill import windows
from tests.tiny_models import EOS, tiny_llama
from torchgrpo.rollout.engines.completion_ends import CompletionEnds
from torchgrpo.rollout.engines.interface import Engine, Request, Response, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine

QUICKSTART = Path(__file__).resolve().parents[2] / "torchgrpo" / "models" / "quickstart"
TEXTS = ["look <search>who</search> now", "The answer: </answer>", "naïve résumé ☃ 😀\n\nObservation: 12", "a b  c </s"]
STOPS = ("</search>", "\n\n", "Observation: ", "é", "☃", "<|end|>", "answer")


def quickstart_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(QUICKSTART)
    return tokenizer


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """Trains a byte-level tokenizer with a control token and an added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.add_tokens([AddedToken("</search>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_piece_tokenizer() -> PreTrainedTokenizerBase:
    """Trains a tokenizer with bytes for unknown characters.

    Decoding strips the first space.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=list("<>/| \n"), show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("☃", "").replace("é", "") for text in TEXTS] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_end(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """Returns the length of the shortest prefix with a stop string, or None."""
    vocabulary = set(tokenizer.get_vocab().values())
    for length in range(1, len(token_ids) + 1):
        known = [token for token in token_ids[:length] if token in vocabulary]
        text = tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(string in text for string in stop):
            return length
    return None


@pytest.mark.parametrize("make", [quickstart_tokenizer, byte_level_tokenizer, word_piece_tokenizer])
def test_a_completion_ends_where_its_whole_text_first_has_a_stop_string(make: object) -> None:
    """Sequences mix the tokens of texts with random tokens and with ids without a token."""
    tokenizer: PreTrainedTokenizerBase = make()  # type: ignore[operator]
    chance, ends, num_ended = random.Random(0), CompletionEnds([], tokenizer), 0
    for _ in range(400):
        pieces = [*TEXTS, *STOPS, *(string[:-1] for string in STOPS)]
        token_ids: list[int] = []
        for _ in range(6):
            token_ids += tokenizer.encode(chance.choice(pieces), add_special_tokens=False)
            token_ids.append(chance.randrange(len(tokenizer) + 20))
        stop = tuple(chance.sample(STOPS, chance.randint(1, 3)))
        sampling = Sampling(max_tokens=10_000, stop=stop)
        found = next(
            (n for n in range(1, len(token_ids) + 1) if ends.finish_reason(token_ids[:n], sampling) == "stop"), None
        )
        assert found == first_end(tokenizer, token_ids, stop), (stop, token_ids)
        num_ended += found is not None
    assert 100 < num_ended < 400


def test_an_end_token_and_a_stop_string_come_before_the_limit() -> None:
    ends = CompletionEnds([EOS], quickstart_tokenizer())
    (letter,) = quickstart_tokenizer().encode("7", add_special_tokens=False)
    sampling = Sampling(max_tokens=1, stop=("7",))
    assert ends.finish_reason([letter], sampling) == "stop"
    assert ends.finish_reason([EOS], replace(sampling, stop=())) == "stop"
    assert ends.finish_reason([letter], replace(sampling, stop=())) == "length"
    assert ends.finish_reason([letter], Sampling(max_tokens=2)) == "abort"


def test_sampling_parameters_return_from_json() -> None:
    sampling = Sampling(min_p=0.1, stop=("a", "b"))
    assert Sampling(**json.loads(json.dumps(asdict(sampling)))) == sampling


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine = TransformersEngine(tiny_llama(), [EOS])
    with pytest.raises(ValueError, match=r"request 3: the engine has no tokenizer to find stop=\('x',\)"):
        engine.submit(Request(3, (5, 6), 1, Sampling(stop=("x",)), seed=0))


# --- engines -----------------------------------------------------------------------------------------------


def mixed_requests(tokenizer: PreTrainedTokenizerBase, max_token: int) -> list[Request]:
    """Makes requests with different limits and stop strings.

    Stop strings are the texts of one or two sampled tokens; every third request has none.
    """
    chance = random.Random(1)
    letters = [tokenizer.decode([token]) for token in range(5, max_token) if token in tokenizer.get_vocab().values()]
    stops: list[tuple[str, ...]] = [
        (),
        tuple(chance.sample(letters, 3)),
        tuple(a + b for a in letters for b in letters[::3]),
    ]
    return [
        Request(i, tuple(range(5, 9)), 4, Sampling(max_tokens=10 + 7 * (i % 3), stop=stops[i % len(stops)]), seed=i)
        for i in range(9)
    ]


def check_ends(
    tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request], responses: Sequence[Response], end_token: int
) -> int:
    """Asserts that completions end where they must; returns the number that a stop string ended."""
    num_ended = 0
    for request, response in zip(requests, responses, strict=True):
        for one in response.completions:
            length = first_end(tokenizer, one.token_ids, request.sampling.stop)
            assert length in (None, len(one.token_ids))
            is_stopped = length is not None or one.token_ids[-1] == end_token
            assert one.finish_reason == ("stop" if is_stopped else "length")
            assert is_stopped or len(one.token_ids) == request.sampling.max_tokens
            assert len(one.log_probs) == len(one.policy_versions) == len(one.token_ids)
            num_ended += length is not None
    return num_ended


def check_against_uncut(
    tokenizer: PreTrainedTokenizerBase, engine: Engine, requests: list[Request], end_token: int
) -> list[Response]:
    """Asserts that completions are those without stop strings, cut at the first of them."""
    uncut = generate(engine, [replace(one, sampling=replace(one.sampling, stop=())) for one in requests])
    responses = generate(engine, requests)
    assert check_ends(tokenizer, requests, responses, end_token) >= 8
    for response, longer in zip(responses, uncut, strict=True):
        for one, whole in zip(response.completions, longer.completions, strict=True):
            length = len(one.token_ids)
            assert one.token_ids == whole.token_ids[:length]
            assert one.log_probs == pytest.approx(whole.log_probs[:length], abs=1e-4)
    assert engine.in_flight == 0
    return responses


@pytest.mark.parametrize("model", [tiny_llama, windows], ids=["continuous", "generate"])
def test_transformers_cuts_each_request_by_its_own_stop_strings(model: object) -> None:
    tokenizer = quickstart_tokenizer()
    engine = TransformersEngine(model(), [EOS], max_num_seqs=16, tokenizer=tokenizer)  # type: ignore[operator]
    check_against_uncut(tokenizer, engine, mixed_requests(tokenizer, 40), EOS)


def engine_with_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Engine:
    return TransformersEngine(tiny_llama(), [EOS], max_num_seqs=8, tokenizer=tokenizer)


def test_engines_of_a_pool_cut_as_one_in_this_process(open_pool: OpenPool) -> None:
    tokenizer = quickstart_tokenizer()
    pool = open_pool(partial(engine_with_tokenizer, tokenizer), engines=2)
    requests = mixed_requests(tokenizer, 40)
    expected = generate(engine_with_tokenizer(tokenizer), requests)

    def ends(responses: list[Response]) -> list[list[tuple[list[int], str]]]:
        return [[(one.token_ids, one.finish_reason) for one in response.completions] for response in responses]

    assert ends(generate(pool, requests)) == ends(expected)


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_vllm_cuts_each_request_by_its_own_stop_strings(start_engine: StartEngine, update: str) -> None:
    """The model has more ids than the tokenizer, and a push interrupts completions."""
    tokenizer = quickstart_tokenizer()
    engine = start_engine(update=update, tokenizer=tokenizer)
    requests = mixed_requests(tokenizer, 263)
    check_against_uncut(tokenizer, engine, requests, 2)
    for request in requests:
        engine.submit(request)
    responses: list[Response] = []
    for _ in range(5):
        responses += engine.step()
    engine.load(llama_of_vllm(False).state_dict().items(), version=1)
    responses = sorted(responses + drain(engine), key=lambda one: one.request_id)
    assert check_ends(tokenizer, requests, responses, 2) >= 8
    versions = [version_changes(one) for response in responses for one in response.completions]
    assert {(0,), (0, 1)} <= set(versions) <= {(0,), (0, 1)}
    assert not engine._running and not engine._core.engine_core.scheduler.has_unfinished_requests()


def version_changes(completion: SampledCompletion) -> tuple[int, ...]:
    return tuple(dict.fromkeys(completion.policy_versions))
