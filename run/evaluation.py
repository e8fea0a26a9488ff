"""Evaluation: from `eval.sets` to numbers and completions in the run folder, beside training or alone.

    eval.sets ─▶ problems ─▶ the engines of training ─▶ rewards ─▶ eval/SET/iteration_N.jsonl, eval/SET/pass@k

Evaluation uses the engines as a second user and asks the training environment, prompts, generators and learner
for nothing, so a run trains on the same bits with it and without it. Every problem has seeds of its own, the
same in every evaluation of a run: differences between two of them are differences between two policies.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from transformers import PreTrainedTokenizerBase

from config.env import EnvConfig
from config.errors import ConfigError
from config.evaluation import EvalSetConfig
from config.outcome import RunOutcome
from config.schema import Config
from envs.attempts import attempts
from envs.duplicates import distinct_examples
from envs.judging.service import RewardService
from envs.prompt_length import PromptLimit
from envs.task import Task, make_task
from envs.token_env import LENGTH, TokenEnv
from envs.turns import with_instructions
from envs.verdicts import judged, success
from evaluation.problems import Problems, choose_problems
from evaluation.statistics import Tally, summarize, table
from monitoring.monitor import Monitor
from monitoring.progress import Progress
from monitoring.trackers import make_tracker
from plan.plan import Plan
from rollout.collector import EnginePolicy, Rollouts
from rollout.engine_views import EngineView, SharedEngine
from rollout.engines.sampler import Sampling
from rollout.evaluator import Evaluator
from run.engines import build_engine, in_turns, make_conversation
from training.model import load_tokenizer, saved_eos_token_ids

_SLICE_S = 0.5  # generation between two returns to the learner's thread: progress, and a look at Ctrl-C


@dataclass(frozen=True)
class EvalSet:
    """One of `eval.sets`, with its prompts."""

    name: str
    settings: EvalSetConfig
    env: EnvConfig
    task: Task
    problems: Problems


def load_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[EvalSet]:
    """Raises ConfigError for data that cannot be read, or a set without a prompt that fits; it names the set."""
    return [_load_set(config, tokenizer, name, settings) for name, settings in config.eval.sets.items()]


def _load_set(
    config: Config, tokenizer: PreTrainedTokenizerBase, name: str, settings: EvalSetConfig
) -> EvalSet:
    place, limit = f"eval.sets.{name}", PromptLimit(tokenizer, config.env.max_prompt_tokens)
    env = settings.env(place, config.env)
    try:
        task = make_task(env)
        examples = with_instructions(distinct_examples(task, env.split), env)
    except ConfigError as error:  # it speaks of `env`, which is that of this set
        raise ConfigError(f"{place}: {error}") from error
    if not examples:
        raise ConfigError(f"{place}: the data set has no rows; check {place}.data_files and {place}.split")
    problems = choose_problems(examples, settings.limit, limit)
    if not problems.examples:
        raise ConfigError(
            f"{place}: all {problems.too_long} prompts are longer than env.max_prompt_tokens={limit.limit} "
            f"({limit.told(examples)}); raise it"
        )
    return EvalSet(name, settings, env, task, problems)


class Evaluation:
    """Runs all sets, writes what they say.

    Args:
        engine: its own view of the engines.
        first_version: of the weights that the engines started with, where nobody pushes others.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        sets: list[EvalSet],
        tokenizer: PreTrainedTokenizerBase,
        engine: EngineView,
        monitor: Monitor,
        run_dir: Path,
        first_version: int = 0,
    ) -> None:
        self.config = config
        self.plan = plan
        self.first_version = first_version
        self.sets = sets
        self.tokenizer = tokenizer
        self.ends = saved_eos_token_ids(config.model.name, tokenizer)
        self.engine = engine
        self.monitor = monitor
        self.folder = run_dir / "eval"
        for chosen in sets:
            if chosen.problems.repeated or chosen.problems.too_long:
                monitor.say(
                    f"eval.sets.{chosen.name}: {len(chosen.problems.examples)} problems; left out: "
                    f"{chosen.problems.repeated} that repeat another, {chosen.problems.too_long} longer than "
                    "env.max_prompt_tokens"
                )

    def due(self, iteration: int, last: int) -> bool:
        """Whether there is an evaluation after this iteration; 0 is before the first."""
        frequency = self.config.eval.frequency
        return iteration in (0, last) or bool(frequency and iteration % frequency == 0)

    def run(
        self,
        iteration: int,
        in_engine_thread: Callable[[Callable[[], Any]], Any],
        stopped: Callable[[], bool],
    ) -> list[str]:
        """Evaluate every set and log it; a table for each. None of it is logged if `stopped` becomes true.

        in_engine_thread: calls a function where the engines may be used, and returns what it returns.
        """
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        tables = []
        for chosen in self.sets:
            found = self._one(chosen, iteration, in_engine_thread, stopped)
            if found is None:
                in_engine_thread(self.engine.give_up)
                self.monitor.say(f"the evaluation of {chosen.name} was given up")
                return []
            metrics |= {f"eval/{chosen.name}/{key}": value for key, value in found.items()}
            tables.append(table(chosen.name, found, chosen.settings.n))
        seconds = time.perf_counter() - began
        version = self.first_version + self.engine.policy_version
        self.monitor.evaluated(metrics, iteration, version, seconds)
        return tables

    def _one(
        self,
        chosen: EvalSet,
        iteration: int,
        in_engine_thread: Callable[[Callable[[], Any]], Any],
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        examples = chosen.problems.examples
        tallies: dict[int, Tally] = {}
        rewards = RewardService(chosen.task, chosen.env)
        path = self.folder / chosen.name / f"iteration_{iteration}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".partial")
        began = time.perf_counter()
        try:
            evaluator = self._evaluator(chosen, rewards)
            with (
                unfinished.open("w", encoding="utf-8") as file,
                self.monitor.live.second(len(examples), f"eval {chosen.name}", "problem") as bar,
            ):
                while not evaluator.done:
                    if stopped():
                        return None
                    for index, group in in_engine_thread(lambda: evaluator.advance(_SLICE_S)):
                        for line in attempts(examples[index], group, evaluator.rollouts.env):
                            file.write(json.dumps(line) + "\n")
                        tallies[index] = tally(group)
                        bar.update()
        finally:
            rewards.close()
        unfinished.replace(path)
        ordered = [tallies[index] for index in sorted(tallies)]
        found = summarize(ordered, chosen.settings.n, self.config.train.seed)
        return found | {"seconds": time.perf_counter() - began}

    def _evaluator(self, chosen: EvalSet, rewards: RewardService) -> Evaluator:
        settings, inference = chosen.settings, self.config.inference_model
        left = iter(chosen.problems.examples)
        env = TokenEnv(
            lambda count: [next(left) for _ in range(count)],
            self.tokenizer,
            rewards,
            settings.n,
            ends=self.ends,
        )
        sampling = Sampling(
            settings.temperature, settings.top_p, settings.top_k, settings.max_tokens or inference.max_tokens
        )
        policy = EnginePolicy(
            self.engine,
            sampling,
            settings.n,
            set_seed(self.config.train.seed, chosen.name),
            inference.request_timeout_s,
        )
        rows = 2 * self.plan.engine.max_num_seqs * len(self.plan.devices.engines)
        return Evaluator(
            Rollouts(env, policy),
            len(chosen.problems.examples),
            max(1, rows // settings.n),
            inference.request_timeout_s,
        )


def set_seed(seed: int, name: str) -> int:
    """24 bits; with a problem's group id they fix its draws, whatever other sets there are."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=3).digest(), "little")


def tally(group: TensorDictBase) -> Tally:
    """What the statistics need of a scored group; a completion that could not be judged is an error."""
    valid = judged(group)
    lengths = group["tokens", "loss_mask"].sum(-1)
    return Tally(
        correct=tuple((success(group) >= 1)[valid].tolist()),
        scores=tuple(group["next", "reward"][valid, 0].tolist()),
        lengths=tuple(lengths[valid].tolist()),
        truncated=tuple((group["finish_reason"][valid, 0] == LENGTH).tolist()),
        errors=int((~valid).sum()),
    )


def evaluate_alone(
    config: Config,
    run_dir: Path,
    plan: Plan,
    saved: dict[str, Any] | None,
    begun: Callable[[], None],
) -> RunOutcome:
    """`run=eval`: engines with the weights of `model.name`, a tokenizer, and nothing that learns.

    saved: the checkpoint that these weights are of; its iteration, optimizer step and version name the evaluation.
    begun: called when everything is there.
    """
    tokenizer = load_tokenizer(config.model.name)
    sets = load_sets(config, tokenizer)
    conversation = make_conversation(config, tokenizer)
    iteration, version = (0, 0) if saved is None else (saved["iteration"], saved["policy_version"])
    steps = 0 if saved is None else saved["learner"]["optimizer_steps"]
    outcome: RunOutcome = "failed"
    with ExitStack() as ending:  # from the last to the first, each even where another one fails
        engine = in_turns(build_engine(config, None, tokenizer, plan, run_dir), conversation)
        ending.callback(engine.close)
        tracker = make_tracker(config.logging, run_dir, asdict(config))
        monitor = Monitor(run_dir, tracker, live=Progress(config.logging, total_steps=0), first_step=steps)
        ending.callback(lambda: monitor.close(outcome))
        begun()
        monitor.file.begin()
        try:
            evaluation = Evaluation(
                config, plan, sets, tokenizer, SharedEngine(engine).view(), monitor, run_dir, version
            )
            tables = evaluation.run(iteration, lambda function: function(), lambda: False)
            print("\n".join(tables), flush=True)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
    return outcome
