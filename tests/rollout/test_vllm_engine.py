"""Tests of the real vLLM (CPU build) against transformers: log-probs, pushes, versions, seeds, limits."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from config.schema.errors import ConfigError, RunError
from envs.group import SampledCompletion, Sampling
from tests.rollout.conftest import EOS, MAX_LEN, StartEngine, score_single_engine, tiny_llama, tiny_settings
from tests.rollout.log_prob_comparison import max_log_prob_gap, model_log_probs, random_tokens
from tests.script_runner import ENVIRONMENT, ROOT, run_python
from torchgrpo.rollout.engines import vllm_process
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_engine_args import engine_arguments
from torchgrpo.rollout.engines.vllm_process import check_version, preserve_process_state
from torchgrpo.rollout.engines.vllm_settings import AdapterShape


def perturbed_copy(model: LlamaForCausalLM, scale: float = 0.1) -> LlamaForCausalLM:
    """Returns a copy of a model with every weight changed at random."""
    other = copy.deepcopy(model)
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + scale * torch.randn_like(parameter))
    return other


def token_log_probs(model: LlamaForCausalLM, prompt: list[int], completion: SampledCompletion) -> torch.Tensor:
    sequence = prompt + completion.token_ids
    rows = model_log_probs(model, sequence)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def test_sampled_log_probs_are_those_of_transformers(vllm_engine: VLLMEngine, tied: bool) -> None:
    model = tiny_llama(tied)
    requests = [Request(i, tuple(random_tokens(3 + 37 * i, i)), 4, Sampling(max_tokens=20), seed=i) for i in range(4)]
    for request, response in zip(requests, generate(vllm_engine, requests), strict=True):
        assert len(response.completions) == 4
        for completion in response.completions:
            expected = token_log_probs(model, list(request.prompt), completion)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)
            assert len(completion.policy_versions) == len(completion.token_ids)


@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_log_probs_follow_temperature_and_truncation(vllm_engine: VLLMEngine, tied: bool, min_p: float) -> None:
    prompt = random_tokens(9, seed=5)
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9, max_tokens=6, min_p=min_p)
    (response,) = generate(vllm_engine, [Request(1, tuple(prompt), 8, sampling, seed=3)])
    for completion in response.completions:
        sequence = prompt + completion.token_ids
        rows = model_log_probs(tiny_llama(tied), sequence, temperature=0.7)[len(prompt) - 1 : -1]
        for row, token, log_prob in zip(rows, completion.token_ids, completion.log_probs, strict=True):
            values, ids = row.topk(20)
            values = values.masked_fill(values.softmax(-1) < min_p * values.softmax(-1)[0], -torch.inf)
            probabilities = values.softmax(-1)
            kept = probabilities.cumsum(-1) - probabilities < 0.9
            position = (ids == token).nonzero()
            assert len(position) == 1
            assert kept[position[0, 0]]
            expected = values[kept].log_softmax(-1)[position[0, 0]]
            assert log_prob == pytest.approx(float(expected), abs=1e-4)


def test_greedy_takes_the_likeliest_token_with_log_prob_zero(vllm_engine: VLLMEngine, tied: bool) -> None:
    prompt = random_tokens(5, seed=6)
    (response,) = generate(vllm_engine, [Request(1, tuple(prompt), 1, Sampling(0.0, max_tokens=5), seed=0)])
    (completion,) = response.completions
    rows = model_log_probs(tiny_llama(tied), prompt + completion.token_ids)[len(prompt) - 1 : -1]
    assert completion.token_ids == rows.argmax(-1).tolist()
    assert completion.log_probs == [0.0] * 5


def test_score_is_the_learners_score(vllm_engine: VLLMEngine, tied: bool) -> None:
    sequences = [random_tokens(n, n) for n in (2, 3, 127, 129, 200)]
    assert max_log_prob_gap(tiny_llama(tied), vllm_engine, sequences) < 1e-4
    assert max_log_prob_gap(tiny_llama(tied), vllm_engine, sequences) < 1e-4, "again, now from the prefix cache"


def test_more_prompt_tokens_than_a_step_takes(vllm_engine: VLLMEngine, tied: bool) -> None:
    """Seeded requests whose prompts would be split at the step's token budget."""
    requests = [Request(i, tuple(random_tokens(101, i)), 8, Sampling(max_tokens=2), seed=i) for i in range(12)]
    for request, response in zip(requests, generate(vllm_engine, requests), strict=True):
        expected = token_log_probs(tiny_llama(tied), list(request.prompt), response.completions[7])
        torch.testing.assert_close(torch.tensor(response.completions[7].log_probs), expected, atol=1e-4, rtol=0)


def test_scoring_leaves_running_requests_alone(vllm_engine: VLLMEngine, tied: bool) -> None:
    request = Request(1, tuple(random_tokens(12, seed=2)), 4, Sampling(max_tokens=10), seed=11)
    (alone,) = generate(vllm_engine, [request])
    vllm_engine.submit(request)
    vllm_engine.step()
    assert max_log_prob_gap(tiny_llama(tied), vllm_engine, [random_tokens(150, 1), random_tokens(20, 2)]) < 1e-4
    responses = []
    while vllm_engine.in_flight:
        responses += vllm_engine.step()
    assert [c.token_ids for c in responses[0].completions] == [c.token_ids for c in alone.completions]


def test_scores_after_a_push_come_before_requests_that_wait(vllm_engine: VLLMEngine, tied: bool) -> None:
    size = vllm_engine.settings.max_num_seqs
    for number in range(3):
        vllm_engine.submit(
            Request(number, tuple(random_tokens(12, number)), size, Sampling(max_tokens=10), seed=number)
        )
    assert vllm_engine.step() == []
    vllm_engine.load(perturbed_copy(tiny_llama(tied)).state_dict().items(), version=1)
    score_single_engine(vllm_engine, [random_tokens(20, 1)])
    assert vllm_engine.in_flight == 3 and vllm_engine.step() == []
    while vllm_engine.in_flight:
        vllm_engine.step()


def test_every_weight_arrives(vllm_engine: VLLMEngine, tied: bool) -> None:
    other, sequences = perturbed_copy(tiny_llama(tied)), [random_tokens(200, 1)]
    before = score_single_engine(vllm_engine, sequences)
    vllm_engine.load(other.state_dict().items(), version=1)
    assert max_log_prob_gap(other, vllm_engine, sequences) < 1e-4
    assert max_log_prob_gap(tiny_llama(tied), vllm_engine, sequences) > 0.1
    assert score_single_engine(vllm_engine, sequences) != before


@pytest.fixture(scope="module", params=["keep", "wait", "abort"])
def updating(request: pytest.FixtureRequest, start_engine: StartEngine) -> VLLMEngine:
    return start_engine(update=request.param)


def test_a_push_between_two_tokens(updating: VLLMEngine) -> None:
    """Tokens before the push have the old version and log-probs, later tokens the new."""
    old, prompt = tiny_llama(False), random_tokens(150, seed=8)
    new = perturbed_copy(old)
    updating.submit(Request(7, tuple(prompt), 3, Sampling(max_tokens=12), seed=1))
    for _ in range(4):
        assert updating.step() == []
    updating.load(new.state_dict().items(), version=3)
    finished = []
    while updating.in_flight:
        finished += updating.step()
    (response,) = finished
    drawn_before = 12 if updating.settings.update == "wait" else 4
    for completion in response.completions:
        assert completion.finish_reason == "length"
        assert completion.policy_versions == [0] * drawn_before + [3] * (12 - drawn_before)
        with_old = token_log_probs(old, prompt, completion)[:drawn_before]
        with_new = token_log_probs(new, prompt, completion)[drawn_before:]
        expected = torch.cat([with_old, with_new])
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_a_seed_fixes_the_tokens_whatever_else_runs(vllm_engine: VLLMEngine) -> None:
    request = Request(1, tuple(random_tokens(12, seed=2)), 4, Sampling(max_tokens=10), seed=11)
    (alone,) = generate(vllm_engine, [request])
    others = [Request(i, tuple(random_tokens(20, i)), 3, Sampling(max_tokens=7), seed=i) for i in range(2, 6)]
    crowded = generate(vllm_engine, [*others, request])[-1]
    assert [c.token_ids for c in crowded.completions] == [c.token_ids for c in alone.completions]
    assert len({tuple(c.token_ids) for c in alone.completions}) == 4


def test_neighbouring_seeds_share_no_completion(vllm_engine: VLLMEngine) -> None:
    prompt = tuple(random_tokens(12, seed=2))
    requests = [Request(i, prompt, 4, Sampling(max_tokens=10), seed=i) for i in range(4)]
    samples = [tuple(c.token_ids) for r in generate(vllm_engine, requests) for c in r.completions]
    assert len(set(samples)) == 16


def test_the_end_token_is_kept_and_ends_a_completion(vllm_engine: VLLMEngine, tied: bool) -> None:
    model = tiny_llama(tied)
    with torch.no_grad():
        model.lm_head.weight[EOS] += model.lm_head.weight.mean(0) + 1.0
    vllm_engine.load(model.state_dict().items(), version=1)
    requests = [Request(i, tuple(random_tokens(6, i)), 8, Sampling(max_tokens=24), seed=i) for i in range(8)]
    completions = [c for r in generate(vllm_engine, requests) for c in r.completions]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == EOS and EOS not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 24 and EOS not in c.token_ids[:-1] for c in completions if c not in stopped)


def test_only_the_given_tokens_end_a_completion(start_engine: StartEngine) -> None:
    """The model's config names another end token, which is an ordinary token here."""
    model = tiny_llama(False)
    with torch.no_grad():
        model.lm_head.weight[EOS] += model.lm_head.weight.mean(0) + 1.0
    engine = start_engine(eos_token_ids=(7, 9))
    engine.load(model.state_dict().items(), version=1)
    requests = [Request(i, tuple(random_tokens(6, i)), 8, Sampling(max_tokens=60), seed=i) for i in range(8)]
    completions = [c for r in generate(engine, requests) for c in r.completions]
    assert any(EOS in c.token_ids[:-1] for c in completions)
    stopped = [c.token_ids for c in completions if c.finish_reason == "stop"]
    assert {ids[-1] for ids in stopped} == {7, 9}
    assert all(len(c.token_ids) == 60 for c in completions if c.finish_reason == "length")


def test_the_process_keeps_its_generators_and_threads(start_engine: StartEngine) -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    start_engine()
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_process_state_that_vllm_changes_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets one thread for torch and seeds every GPU's generator."""
    states = {0: torch.tensor([1]), 1: torch.tensor([2])}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in states.values()])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device, state))
    torch.set_num_threads(2)
    with preserve_process_state():
        torch.set_num_threads(1)
        torch.set_num_threads = lambda number: None
        states[0], states[1] = torch.tensor([0]), torch.tensor([0])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    assert [int(state) for state in states.values()] == [1, 2]


def test_too_long_and_repeated_requests_are_refused(vllm_engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match=f"exceed max_model_len={MAX_LEN}"):
        vllm_engine.submit(Request(1, tuple(random_tokens(MAX_LEN - 5, 1)), 1, Sampling(max_tokens=6), seed=0))
    vllm_engine.submit(Request(1, (5, 6), 1, Sampling(max_tokens=2), seed=0))
    with pytest.raises(ValueError, match="already in flight"):
        vllm_engine.submit(Request(1, (5, 6), 1, Sampling(max_tokens=2), seed=0))
    while vllm_engine.in_flight:
        vllm_engine.step()


def test_a_model_that_vllm_cannot_load_is_one_message(start_engine: StartEngine) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=4096[\s\S]*Remedies"):
        start_engine(max_model_len=4096)


def test_a_package_that_vllm_lacks_is_to_be_installed(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU machine, vLLM may be installed without FlashInfer."""

    def fail_import(settings: object) -> None:
        raise ModuleNotFoundError("No module named 'flashinfer'")

    monkeypatch.setattr("torchgrpo.rollout.engines.vllm_engine.engine_arguments", fail_import)
    with pytest.raises(ConfigError, match=r"No module named 'flashinfer'\nRemedies: .* install it \(`make vllm`"):
        start_engine()


def test_the_cache_of_an_engine_is_split_over_its_devices(tiny_folders: dict[bool, Path]) -> None:
    settings = tiny_settings(tiny_folders[False], tensor_parallel_size=2, kv_cache_bytes=32 << 20)
    assert engine_arguments(settings).kv_cache_memory_bytes == 16 << 20


def test_an_adapter_push_acts_at_once_and_in_place(start_engine: StartEngine) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict

    names = ("q_proj", "v_proj", "down_proj")
    policy = get_peft_model(tiny_llama(False), LoraConfig(r=4, lora_alpha=8, target_modules=list(names)))
    engine = start_engine(adapter=AdapterShape(4, 8.0, names))
    sequences = [random_tokens(200, 1), random_tokens(140, 2), random_tokens(9, 3)]
    for version in (1, 2):
        torch.manual_seed(version)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
        engine.load(get_peft_model_state_dict(policy).items(), version)
        engine.submit(Request(version, (5, 6, 7), 2, Sampling(max_tokens=4), seed=0))
        engine.step()
        assert max_log_prob_gap(policy, engine, sequences) < 1e-4, "with requests in flight"
        responses: list[Response] = []
        while engine.in_flight:
            responses += engine.step()
        (response,) = responses
        for completion in response.completions:
            expected = token_log_probs(policy, [5, 6, 7], completion)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)
            assert completion.policy_versions == [version] * len(completion.token_ids)
    assert max_log_prob_gap(tiny_llama(False), engine, sequences) > 0.05


@pytest.mark.long
@pytest.mark.usefixtures("start_engine")  # skips where vLLM is not installed
def test_a_push_reaches_every_shard(tiny_folders: dict[bool, Path], tmp_path: Path) -> None:
    """Two tensor-parallel workers run in processes of their own, under a long TMPDIR."""
    script, out = Path(__file__).parent / "vllm_two_shards.py", tmp_path / "found.json"
    temporary = tmp_path / ("a" * 90)
    temporary.mkdir()
    found_from = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    run = run_python([str(script), str(tiny_folders[True]), str(out)], environment=found_from)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert max(found["gaps"]) < 1e-4 and len(found["gaps"]) == 2
    assert found["versions"] == [2] * 4
    assert (found["shared"], found["left"]) == (shared_memory_files(), [])


ENDING = """
import gc
import subprocess
import sys
import weakref
from pathlib import Path
import torch
from torchgrpo.rollout.engines import vllm_engine
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from envs.group import Sampling
from tests.rollout.conftest import tiny_llama, tiny_settings
from torchgrpo.rollout.engines.interface import Request

class Learner:
    pass

def noted(settings):
    imported.update(sys.modules)
    return engine_arguments(settings)

def watched(command, *arguments, **named):
    commands.append(command)
    return run_command(command, *arguments, **named)

imported, commands = {}, []
run_command, subprocess.run = subprocess.run, watched
engine_arguments, vllm_engine.engine_arguments = vllm_engine.engine_arguments, noted

def run():
    learner = Learner()
    engine = VLLMEngine(tiny_settings(Path(sys.argv[1])))
    model = engine._llm.model_executor.driver_worker.worker.model_runner.model
    layers = [weakref.ref(layer) for layer in model.modules()]
    weights = iter(tiny_llama(True).state_dict().items())
    engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})  # a push on a GPU
    engine.submit(Request(1, (5, 6), 2, Sampling(max_tokens=9), seed=0))
    assert engine.step() == []
    engine.close()
    engine.close()
    assert (engine.step(), engine.in_flight) == ([], 0), "its requests have ended"
    return *layers, weakref.ref(engine), weakref.ref(learner)

held = run()
gc.collect()
print(*{type(one()).__name__ for one in held})
started = [vars(module) for name, module in sys.modules.items() if name not in imported]
print(sum(command[0] == sys.executable for command in commands))
print(len(started), sum(isinstance(value, torch.Tensor) for names in started for value in names.values()))
"""


@pytest.mark.long
@pytest.mark.usefixtures("start_engine")
def test_a_closed_engine_leaves_nothing_behind(tiny_folders: dict[bool, Path], tmp_path: Path) -> None:
    """The run is the first import of vLLM, with a model new to the machine."""
    (tmp_path / "ending.py").write_text(ENDING)
    found_from = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "VLLM_CACHE_ROOT": str(tmp_path)}
    run = run_python([str(tmp_path / "ending.py"), str(tiny_folders[True])], environment=found_from)
    assert run.returncode == 0, run.stderr
    left, processes, started = run.stdout.splitlines()[-3:]
    assert left == "NoneType"
    assert processes == "0" and list(tmp_path.glob("modelinfos/*.json"))
    modules, tensors = map(int, started.split())
    assert (modules > 100, tensors) == (True, 0)


def shared_memory_files() -> int:
    """Returns the number of shared files of two workers, which only AVX-512 builds have."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return 2 if hasattr(torch.ops._C, "init_shm_manager") else 0


def test_memory_taken_by_another_process_is_one_message(
    vllm_engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is vLLM's own, when another process takes memory during the engine's sleep."""

    def sleep(level: int) -> None:
        raise AssertionError("Memory usage increased after sleeping.")

    monkeypatch.setattr(vllm_engine._llm, "sleep", sleep)
    with pytest.raises(RunError, match=r"increased after sleeping\. Another process uses memory of this GPU"):
        vllm_engine.sleep()


def test_an_untested_version_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "installed_vllm", lambda: "0.41.2")
    with pytest.warns(UserWarning, match=r"vLLM 0\.41\.2 is installed; this code was tested with 0\.32"):
        check_version()
