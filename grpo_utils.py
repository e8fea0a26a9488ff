"""From a typed config to the parts of a run, and the run's life around the schedule.

    launch ─▶ Hydra ─▶ Config (checked) ─▶ build: task, tokenizer, model, engines, learner ─▶ train(config, parts)
                                                                                             └─▶ close, always

The only file that knows two rooms at once. The schedules themselves are grpo.py and grpo_async.py.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from config.errors import ConfigError
from config.messages import readable
from config.schema import Config, register_schema, to_config

PROJECT = Path(__file__).resolve().parent


def launch(train: "Callable[[Config, Parts], None]", overlapped: bool = False) -> None:
    """The command line: compose, check, build, train, close. Exits with 2 and one message on bad input.

    overlapped: the schedule generates while it trains, so engines need devices of their own.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions reach us; we print the one readable message
    register_schema()

    @hydra.main(version_base=None, config_path=str(PROJECT / "config"), config_name="grpo_gsm8k")
    def main(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        run_dir = Path(HydraConfig.get().runtime.output_dir)
        try:
            run(to_config(composed), run_dir, train, overlapped)
        except (ConfigError, OmegaConfBaseException) as error:
            _remove_if_unused(run_dir)
            sys.exit(_complain(readable(error)))

    try:
        main()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_complain(readable(error)))


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _remove_if_unused(run_dir: Path) -> None:
    """A run that never began leaves no folder behind."""
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / "checkpoints").exists():
        shutil.rmtree(run_dir, ignore_errors=True)


def run(
    config: Config, run_dir: Path, train: "Callable[[Config, Parts], None]", overlapped: bool = False
) -> None:
    """One job: what `run=` says."""
    if config.run in ALONE:
        ALONE[config.run](config, run_dir, overlapped)
        return
    parts = build(config, run_dir, overlapped)
    outcome = "failed"
    try:
        train(config, parts)
        outcome = "interrupted" if parts.stop.requested else "finished"
    finally:
        parts.close(outcome)


def print_plan(config: Config, run_dir: Path, overlapped: bool) -> None:
    """`run=plan`: touches no device, leaves no folder."""
    from config.plan import report
    from grpo_engines import plan_run

    print(report(plan_run(config, overlapped, run_dir)))
    _remove_if_unused(run_dir)


def run_evaluation(config: Config, run_dir: Path, overlapped: bool) -> None:
    """`run=eval`: neither learner nor training data."""
    from grpo_engines import plan_run
    from grpo_eval import evaluate_alone

    seed_everything(config)
    evaluate_alone(config, run_dir, plan_run(config, overlapped, run_dir))


def grade_samples(config: Config, run_dir: Path, overlapped: bool) -> None:
    """`run=rewards`: judges saved completions; no model."""
    from envs.grade import grade

    code = grade(config.env)
    _remove_if_unused(run_dir)
    sys.exit(code)


ALONE: dict[str, Callable[[Config, Path, bool], None]] = {
    "plan": print_plan,
    "eval": run_evaluation,
    "rewards": grade_samples,
}


@dataclass
class Stop:
    """Ctrl-C or SIGTERM asks the run to finish its iteration; a second one ends it at once."""

    requested: bool = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def uninstall(self) -> None:
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
        ):
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(
            f"\n{signal.Signals(number).name}: finishing this iteration, then a checkpoint; once more ends at once",
            file=sys.stderr,
        )


@dataclass
class Parts:
    """Everything a schedule needs. Built by `build`, closed by `run`."""

    config: Config
    run_dir: Path
    learner: Any
    rollouts: Any
    weights: Any
    prompts: Any
    rewards: Any
    monitor: Any
    generator: Any
    stop: Stop = field(default_factory=Stop)
    first_iteration: int = 0
    last_iteration: int = 0
    stream: Any = None
    evaluation: Any = None

    def iterations(self) -> Iterator[int]:
        """grpo.py: iteration numbers from 1 (or after the resumed one), until the last or a stop."""
        return self._count(self.config.total_iterations)

    def optimizer_batches(self) -> Iterator[int]:
        """grpo_async.py: numbers of the batches that the learner takes, likewise."""
        return self._count(self.config.total_optimizer_batches)

    def _count(self, total: int) -> Iterator[int]:
        self.last_iteration = total
        if self.first_iteration == 0:
            self.evaluate(0)
        for iteration in range(self.first_iteration + 1, total + 1):
            if self.stop.requested:
                return
            yield iteration

    @contextmanager
    def streaming(self, keep: Any = None) -> Iterator[None]:
        """grpo_async.py: generation runs beside the block, in a thread of its own; `keep` as in `collect`."""
        from rollout.group_buffer import GroupBuffer
        from rollout.streaming import Stream

        train, groups = self.config.train, self.config.optim_batch_groups
        buffer: Any = GroupBuffer(
            batch_groups=groups,
            max_age=train.max_policy_age,
            batches_per_version=self.config.batches_per_version,
            capacity=train.buffer_groups or 2 * groups,
            keep_order=train.stale_groups == "wait",
            first_batch=self.first_iteration,
            version=self.weights.version,
        )
        engines = self.config.inference_model.num_engines
        in_flight = self.config.env.num_envs * engines
        if not self.config.policy.dynamic_batching:
            keep = None  # it would keep every group, and could only say so of tensors
        with Stream(self.rollouts, self.prompts, buffer, in_flight, train.wait_timeout_s, keep) as stream:
            self.stream = stream
            yield
        self.stream = None

    def take(self) -> Any:
        """grpo_async.py: the next batch of finished groups, none too old; adds age int64 [N, R]."""
        stream = self.stream
        batch = stream.take()
        batch["age"] = self.weights.version - batch["policy_version"]
        self.monitor.note(
            {
                "idle/engines": stream.idle_share(),
                "groups/in_flight": float(stream.groups_in_flight),
                "groups/ready": float(stream.buffer.ready),
                "groups/dropped_stale": float(stream.buffer.dropped),
            }
        )
        return batch

    def push_due(self, optimizer_batch: int) -> bool:
        return optimizer_batch % self.config.batches_per_version == 0

    def push_weights(self) -> None:
        """Learner to engines; beside running generation the push happens between two engine steps."""
        with self.monitor.timed("push"):
            if self.stream is None:
                self.monitor.note(self._push())
            else:
                self.monitor.note(self.stream.call(self._push))
                self.stream.buffer.pushed(self.weights.version)

    def _push(self) -> Any:
        """What is generated from now on has the new weights and the temperature of this part of the run."""
        steps = self.config.total_optimizer_steps - self.config.optimizer_steps_per_iteration
        progress = self.learner.optimizer_steps / max(steps, 1)
        self.rollouts.policy.set_temperature(self.config.inference_model.temperature_at(progress))
        return self.weights.push()

    def minibatches(self, batch: Any) -> Iterator[Any]:
        from training.minibatches import minibatches

        repeats, epochs = self.config.env.repeats, self.config.train.epochs
        return minibatches(batch, repeats, self.config.optim_batch_groups, epochs, self.generator)

    def optimized(self, batch: Any, report: Any) -> None:
        """Log one optimizer step."""
        self.monitor.note({"prompts/left_out": float(self.prompts.source.left_out)})
        self.monitor.optimized(batch, report.metrics | self.rewards.metrics(), self.weights.version)
        if report.skipped:
            self.monitor.say(f"optimizer step {self.monitor.optimizer_step}: not finite, skipped")

    def iteration_done(self, iteration: int, batch: Any) -> None:
        """A checkpoint when one is due, and a printed sample now and then."""
        self.evaluate(iteration)
        frequency = self.config.train.checkpoint_frequency
        last = iteration == self.last_iteration or self.stop.requested
        if last or (frequency and iteration % frequency == 0):
            self.checkpoint(iteration)
        self._tell_of_groups_unwanted(batch)
        every = self.config.logging.sample_frequency
        if every and (iteration % every == 0 or iteration == 1):
            group, env = batch[: self.config.env.repeats], self.rollouts.env
            self.monitor.sample(
                env.prompt_texts(group[:1])[0], env.texts(group), group["next", "reward"][:, 0].tolist()
            )

    def _tell_of_groups_unwanted(self, batch: Any) -> None:
        wanted, policy = self.learner.wants(batch), self.config.policy
        if not wanted.all():
            self.monitor.say(
                f"dynamic sampling: {int((~wanted).sum())} of {len(wanted)} groups lie outside policy.filter_range="
                f"{policy.filter_range} ({policy.filter_on}) even after policy.filter_attempts="
                f"{policy.filter_attempts} replacements each; this batch was trained on without them. Prompts of a "
                "fitting difficulty, a larger env.repeats, or env.oversample help"
            )

    def evaluate(self, iteration: int) -> None:
        """Run `eval.sets` when it is time; beside running generation, in slices between two engine steps."""
        if self.evaluation is None or self.stop.requested:
            return
        if not self.evaluation.due(iteration, self.last_iteration):
            return
        if iteration == self.last_iteration and self.stream is not None and not self.push_due(iteration):
            self.push_weights()
        in_engine_thread = self.stream.call if self.stream is not None else lambda function: function()
        for table in self.evaluation.run(iteration, in_engine_thread, lambda: self.stop.requested):
            self.monitor.say(table)

    def checkpoint(self, iteration: int) -> None:
        from training.checkpoint import checkpoint_path, random_state, save_checkpoint

        state = {
            "iteration": iteration,
            "learner": self.learner.state_dict(),
            "policy_version": self.weights.version,
            "generator": self.generator.get_state(),
            "random": random_state(),
            "config": asdict(self.config),
            **(self._prompt_state() if self.stream is None else self.stream.call(self._prompt_state)),
        }
        save_checkpoint(checkpoint_path(self.run_dir, iteration), state, self.config.train.keep_checkpoints)

    def _prompt_state(self) -> dict[str, Any]:
        outstanding = self.stream.outstanding() if self.stream is not None else []
        return {
            "prompts": self.prompts.state_dict(outstanding),
            "next_group_id": self.rollouts.env.next_group_id,
        }

    def restore(self, state: dict[str, Any]) -> None:
        from training.checkpoint import restore_random_state

        self.first_iteration = state["iteration"]
        self.learner.load_state_dict(state["learner"])
        self.prompts.load_state_dict(state["prompts"])
        self.rollouts.env.next_group_id = state["next_group_id"]
        self.weights.version = state["policy_version"] - 1
        self.generator.set_state(state["generator"])
        restore_random_state(state["random"])

    def close(self, outcome: str) -> None:
        self.stop.uninstall()
        self.rollouts.policy.engine.close()
        self.rewards.close()
        self.monitor.close(outcome)


def find_checkpoint(config: Config, run_dir: Path) -> Path | None:
    """What `train.resume` means: a path, or with `auto` the newest checkpoint of this very run.

    `auto` looks in this run's own folder first (`hydra.run.dir=` names it), then in its sibling runs for the
    newest one with the same config. None: start from the beginning.
    """
    from training.checkpoint import newest_checkpoint

    if config.train.resume is None:
        return None
    if config.train.resume != "auto":
        return Path(config.train.resume)
    own = newest_checkpoint(run_dir)
    if own is not None:
        return own
    others = sorted((PROJECT / "outputs").glob("*/*/checkpoints"), reverse=True)
    candidates = (newest_checkpoint(folder.parent) for folder in others)
    return next((path for path in candidates if path is not None and _same_run(path, config)), None)


def _same_run(path: Path, config: Config) -> bool:
    from training.checkpoint import load_checkpoint

    saved = load_checkpoint(path)["config"]
    ours = asdict(config)
    for either in (saved, ours):
        either["train"].pop("resume")
        either["train"].pop("total_dialog_turns")
        either.pop("logging")
    return bool(saved == ours)


def build(config: Config, run_dir: Path, overlapped: bool = False) -> Parts:
    """Cheap checks first: data and tokenizer before weights, weights before engines."""
    import torch

    from envs.prompts import PromptSource
    from envs.reward_service import RewardService
    from envs.task import make_task
    from envs.token_env import TokenEnv, prompt_fits
    from envs.turns import with_instructions
    from grpo_engines import build_engine, build_weights, in_turns, make_conversation, plan_run
    from grpo_eval import Evaluation, load_sets
    from monitoring.monitor import Monitor
    from monitoring.trackers import MetricsFile, make_tracker
    from rollout.collector import EnginePolicy, Rollouts
    from rollout.engine import Sampling
    from rollout.engine_views import SharedEngine
    from rollout.streaming import PromptQueue
    from training.checkpoint import load_checkpoint
    from training.learner import Learner
    from training.model import load_model, load_tokenizer

    found = find_checkpoint(config, run_dir)
    saved = load_checkpoint(found) if found else None
    plan = plan_run(config, overlapped, run_dir)
    seed_everything(config)
    task = make_task(config.env)
    tokenizer = load_tokenizer(config.model.name)
    limit = config.env.max_prompt_tokens
    prompts = PromptQueue(
        PromptSource(
            with_instructions(task.examples(config.env.split), config.env.tools),
            seed=config.train.seed,
            keep=lambda example: prompt_fits(tokenizer, example, limit),
            difficulty=config.env.difficulty,
        )
    )
    eval_sets = load_sets(config, tokenizer)
    conversation = make_conversation(config, tokenizer)
    model = load_model(config.model, torch_devices(plan.devices.train))
    engine = build_engine(config, model, tokenizer, plan)
    model, scorer, reference = build_models(config, model, plan)
    learner = Learner(model, scorer, reference, config, run_dir)
    inference = config.inference_model
    sampling = Sampling(inference.temperature, inference.top_p, inference.top_k, inference.max_tokens)
    rewards = RewardService(task, config.env)
    candidates = config.env.candidates
    env = TokenEnv(prompts.draw, tokenizer, rewards, candidates, prompts.observe)
    generating = in_turns(engine, conversation)
    shared = SharedEngine(generating)
    own = shared.view() if eval_sets else generating
    policy = EnginePolicy(own, sampling, candidates, config.train.seed, inference.request_timeout_s)
    tracker = make_tracker(config.logging, run_dir, asdict(config))
    if saved is not None and found is not None:
        earlier = MetricsFile(found.parent.parent / "metrics.jsonl")
        MetricsFile(run_dir / "metrics.jsonl").continue_from(earlier, saved["learner"]["optimizer_steps"])
    monitor = Monitor(
        run_dir,
        config.logging,
        tracker,
        config.env.repeats,
        config.total_optimizer_steps,
        first_step=saved["learner"]["optimizer_steps"] if saved else 0,
    )
    generator = torch.Generator().manual_seed(config.train.seed)
    parts = Parts(
        config,
        run_dir,
        learner,
        Rollouts(env, policy, config.env.repeats, config.policy.filter_attempts),
        build_weights(config, model, engine, plan),
        prompts,
        rewards,
        monitor,
        generator,
    )
    if eval_sets:
        parts.evaluation = Evaluation(config, eval_sets, tokenizer, shared.view(), monitor, run_dir)
    if saved is not None:
        parts.restore(saved)
        monitor.say(f"resumed from {found} at iteration {saved['iteration']}")
    elif config.train.resume == "auto":
        monitor.say("train.resume=auto: no checkpoint of this run, starting from the beginning")
    parts.stop.install()
    return parts


def seed_everything(config: Config) -> None:
    import random

    import numpy as np
    import torch

    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    if config.train_model.num_threads is not None:
        torch.set_num_threads(config.train_model.num_threads)


def torch_devices(indices: Sequence[int]) -> list[Any]:
    """GPUs by index; the CPU where there are none."""
    import torch

    return [torch.device("cuda", index) for index in indices] or [torch.device("cpu")]


def build_models(config: Config, model: Any, plan: Any) -> tuple[Any, Any, Any]:
    """The policy, its scorer, and the reference or None."""
    import torch

    from training.forward import ResponseScorer
    from training.model import add_lora, copy_model
    from training.reference import AdapterOff, Reference

    autocast = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.mixed_precision]
    inference = config.inference_model

    def scorer(scored: Any) -> ResponseScorer:
        return ResponseScorer(
            scored,
            config.env.repeats,
            share_prompt=config.train.share_prompt and not config.train.gradient_checkpointing,
            chunk_size=config.train.log_prob_chunk_size,
            temperature=inference.temperature if inference.temperature_end is None else None,
            top_p=inference.top_p,
            top_k=inference.top_k,
            autocast_dtype=autocast,
        )

    rows = config.optim_batch_size // config.train.gradient_accumulation_steps
    home = plan.devices.reference_home
    frozen: Reference | AdapterOff | None = None
    if home in ("own devices", "host memory"):
        device = torch_devices(plan.devices.reference)[0]
        frozen = Reference(scorer(copy_model(model, model.dtype, device)), rows)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    policy = add_lora(model, config.train_model.lora) if config.train_model.lora.enabled else model
    if home == "base of the LoRA policy":
        frozen = AdapterOff(scorer(policy), rows)
    return policy, scorer(policy), frozen
