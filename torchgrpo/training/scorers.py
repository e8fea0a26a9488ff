"""Scorers: a frozen model on devices of its own that scores while the learner works.

    learner's thread      begin(microbatch) ──▶ queue ──▶ thread of copy 0 ──▶ its ranks ──▶ Future ──▶ wait
    or the rollout's                              └─────▶ thread of copy 1 ──▶ its ranks ──▶ Future

A copy of the model is one Ray actor, or several that share its parameters. It has no state: one that is lost is
replaced, and its microbatch goes to the copy that is free first.
"""

import itertools
import logging
import math
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue

import ray
from torch import Tensor

from config.schema.config import Config
from config.schema.errors import ConfigError, DeadlineError, RankLost, RunError
from torchgrpo.batches.batch import Batch
from torchgrpo.cluster.runtime import Place, start_ray
from torchgrpo.plan.plan import Plan
from torchgrpo.training.microbatches import assemble, share_out
from torchgrpo.training.ranks import LOADING, Ranks, RankSettings
from torchgrpo.training.scorer_actor import ScorerActor

log = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Losses in a row, of one copy or with one microbatch, that end the run."""
PATIENCE = MAX_LOSSES * (LOADING + 5)
"""Times `train.wait_timeout_s` that `wait` allows, for copies that are lost, placed, loaded and asked once more."""
CLOSE_S = 30.0
"""That copies may take to end: Ray must not be shut down while one of them calls it."""


@dataclass(order=True)
class _Task:
    """A microbatch to score; without one, the signal to stop.

    number: its place in the order of scoring, infinite for the signal. losses: copies that were lost with it.
    """

    number: float
    batch: Batch | None = field(default=None, compare=False)
    scored: "Future[Tensor]" = field(default_factory=Future, compare=False)
    losses: int = field(default=0, compare=False)


class Scorers:
    """The copies of the frozen model, one thread for each.

    `wait_ready` returns when every copy is loaded; microbatches may be begun before.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config = config
        self._numbers = itertools.count()
        self._tasks: PriorityQueue[_Task] = PriorityQueue()
        self._failure: BaseException | None = None
        self._closing = False
        self._owns_ray = start_ray(config.ray.address, plan.ray_cpus)
        self.copies = [Copy(config, plan, of_copy) for of_copy in places(plan)]
        self._loaded: list[Future[None]] = [Future() for _ in self.copies]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name=str(pair[0]), daemon=True)
            for pair in zip(self.copies, self._loaded, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait until every copy is loaded.

        Raises:
            ConfigError, RankLost: one of them cannot be.
        """
        for loaded in wait(self._loaded, return_when=FIRST_EXCEPTION).done:
            loaded.result()

    def begin(self, batch: Batch) -> "Future[Tensor]":
        """Queue a batch; its future gives log-probs float32 [N, R].

        Any thread may call it. A batch whose future is cancelled before its turn is not scored.
        """
        task = _Task(next(self._numbers), batch)
        self._tasks.put(task)
        if self._failure is not None:
            self._fail_queue(self._failure)
        return task.scored

    def wait(self, scored: "Future[Tensor]") -> Tensor:
        """Wait for a future of `begin`.

        Raises:
            DeadlineError: there is no answer within the limit. RankLost: they were lost too often.
        """
        limit = PATIENCE * self.config.train.wait_timeout_s
        try:
            return scored.result(timeout=limit)
        except TimeoutError:
            raise DeadlineError(
                f"the learner waited {limit:.0f} s ({PATIENCE} x train.wait_timeout_s) for "
                f"{', '.join(map(str, self.copies))} to score a microbatch; raise train.wait_timeout_s if "
                "they are only slow"
            ) from None

    def close(self) -> None:
        """End all copies, and their threads."""
        self._closing = True
        for copy in self.copies:
            copy.end()
        self._fail(RunError("the run has ended"))
        for _ in self._threads:
            self._tasks.put(_Task(math.inf))
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    def _serve(self, copy: "Copy", loaded: "Future[None]") -> None:
        try:
            copy.load()
            loaded.set_result(None)
            while (task := self._tasks.get()).batch is not None:
                self._score(copy, task, task.batch)
        except BaseException as error:
            self._fail(error)
            with suppress(InvalidStateError):
                loaded.set_exception(error)
        finally:
            copy.close()

    def _score(self, copy: "Copy", task: _Task, batch: Batch) -> None:
        """Score a microbatch; if the copy is lost, requeue the microbatch and replace the copy."""
        if not task.losses and not task.scored.set_running_or_notify_cancel():
            return
        try:
            task.scored.set_result(copy.log_prob(batch))
            copy.losses = 0
        except RankLost as error:
            task.losses, copy.losses = task.losses + 1, copy.losses + 1
            if self._closing or max(task.losses, copy.losses) >= MAX_LOSSES:
                task.scored.set_exception(error)
                raise
            log.warning("a copy of the frozen model (%s) is lost and replaced: %s", copy, error)
            self._tasks.put(task)
            copy.close()
            copy.load()
            log.warning("the copy of the frozen model (%s) is back", copy)
        except BaseException as error:
            task.scored.set_exception(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._fail_queue(error)

    def _fail_queue(self, error: BaseException) -> None:
        ends = []
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if task.batch is None:
                    ends.append(task)
                    continue
                with suppress(InvalidStateError):  # it was cancelled
                    task.scored.set_exception(error)
        for end in ends:
            self._tasks.put(end)


class Copy:
    """A copy of the frozen model, on one rank or sharded over several.

    losses: of its ranks, in a row. Only its own thread calls it, except `end`.
    """

    def __init__(self, config: Config, plan: Plan, places: list[Place]) -> None:
        self.config = config
        self.plan = plan
        self.places = places
        self.ranks: Ranks | None = None
        self.losses = 0
        self._served = False
        self._packs = False
        self._ended = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.places))

    def load(self) -> None:
        """Start the ranks and load their model.

        Raises:
            ConfigError: there is no room for them, or the model cannot be loaded. RankLost: one of them does not start.
        """
        while True:
            try:
                settings = RankSettings(
                    nodes=1,
                    ray_cpus=self.plan.ray_cpus,
                    on_gpu=not self.plan.devices.on_cpu,
                    timeout_s=self.config.train.wait_timeout_s,
                    address=self.config.ray.address,
                    asked=f"ref_model.num_devices={self.plan.reference.ranks}, {len(self.places)} to a copy",
                )
                self.ranks = ranks = Ranks(self.places, settings, ScorerActor)
                ranks.start()
                if self._ended:
                    raise RankLost(f"{self} ended with the run")
                calls = ranks.begin_same("build", self.config, self.plan)
                self._packs = bool(ranks.answers(calls, "its model", LOADING)[0])
                return
            except (RankLost, ConfigError) as error:
                self.close()
                self.losses += 1
                if isinstance(error, ConfigError) and not self._served:
                    raise  # a copy that has scored before waits for its node of the cluster to come back
                if self._ended or self.losses >= MAX_LOSSES:
                    raise RankLost(str(error)) from error
                log.warning(
                    "a copy of the frozen model (%s) is lost while it loads, and replaced: %s", self, error
                )

    def log_prob(self, batch: Batch) -> Tensor:
        """Log-probs float32 [N, R] of a batch's response tokens."""
        assert self.ranks is not None
        ranks, rows = len(self.places), self.plan.learner.microbatch_rows
        count = math.ceil(len(batch) / (ranks * rows))
        limit = self.config.train.max_tokens_per_microbatch  # no larger than the learner's
        shares = share_out(batch.for_reference(), ranks, count, limit, self._packs)
        calls = self.ranks.begin(
            "log_prob", [([(one.batch.tokens, one.batch.temperature) for one in share],) for share in shares]
        )
        answers = self.ranks.answers(calls, "log-probs", 1 + max(map(len, shares)))
        self._served = True
        return assemble(shares, answers, batch.sample_log_prob)

    def end(self) -> None:
        """Kill the ranks, even while the copy's thread waits for them.

        Any thread may call it.
        """
        self._ended = True
        ranks = self.ranks
        for actor in [] if ranks is None else list(ranks.actors):
            ray.kill(actor)

    def close(self) -> None:
        """End the ranks and give their places back."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.close()


def places(plan: Plan) -> list[list[Place]]:
    """Places of each copy's ranks; on a cluster Ray chooses their GPUs."""
    reference, devices = plan.reference, plan.devices
    names = [f"scorer rank {number}" for number in range(reference.ranks)]
    if devices.on_cpu:
        places = [Place(name) for name in names]
    elif devices.on_cluster:
        places = [Place(name, num_gpus=1) for name in names]
    else:
        gpus = zip(names, reference.devices, strict=True)
        places = [Place(name, plan.machine.physical((gpu,))) for name, gpu in gpus]
    size = reference.shard_size
    return [places[start : start + size] for start in range(0, len(places), size)]
