"""Scores queued microbatches with frozen-model copies on other devices, and replaces lost copies.

    learner's thread      submit(microbatch) ──▶ queue ──▶ thread of copy 0 ──▶ its ranks ──▶ Future ──▶ wait
    or the rollout's                               └─────▶ thread of copy 1 ──▶ its ranks ──▶ Future

A copy of the model is one Ray actor, or several actors with shards of its parameters. Copies have no state: a
lost copy is replaced, and its microbatch goes to the first free copy.
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
from torchgrpo.cluster.runtime import DeviceSlot, start_ray
from torchgrpo.plan.plan import Plan
from torchgrpo.training.microbatches import assemble_rows, partition_rows
from torchgrpo.training.ranks import LOADING_PATIENCE, Ranks, RankSettings
from torchgrpo.training.scorer_actor import ScorerActor

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_LOSSES = 3
"""Consecutive losses of a copy, or of copies with the same microbatch, that end the run."""
WAIT_TIMEOUTS = MAX_CONSECUTIVE_LOSSES * (LOADING_PATIENCE + 5)
"""Limit of `wait_for_log_probs` in units of `train.wait_timeout_s`, which covers replacing lost copies."""
CLOSE_S = 30.0
"""Seconds that the threads of copies may take to end. Ray must not be shut down while a thread calls it."""


@dataclass(order=True)
class _ScoringTask:
    """Microbatch to score, or the stop signal of a thread.

    number: position in the order of scoring, infinite for the stop signal. batch: None for the stop signal.
    losses: number of copies that were lost while they scored the microbatch.
    """

    number: float
    batch: Batch | None = field(default=None, compare=False)
    future: "Future[Tensor]" = field(default_factory=Future, compare=False)
    losses: int = field(default=0, compare=False)


class FrozenScorers:
    """Copies of the frozen model, each with a thread that takes microbatches from a queue.

    Microbatches may be submitted before the copies are loaded.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config = config
        self._numbers = itertools.count()
        self._tasks: PriorityQueue[_ScoringTask] = PriorityQueue()
        self._failure: BaseException | None = None
        self._is_closing = False
        self._owns_ray = start_ray(config.ray.address, plan.ray_cpus)
        self.copies = [ModelCopy(config, plan, slots) for slots in scorer_slots(plan)]
        self._load_futures: list[Future[None]] = [Future() for _ in self.copies]
        self._threads = [
            threading.Thread(target=self._run_copy, args=pair, name=str(pair[0]), daemon=True)
            for pair in zip(self.copies, self._load_futures, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_loaded(self) -> None:
        """Waits until all copies are loaded; raises ConfigError or RankLost if loading fails."""
        for load_future in wait(self._load_futures, return_when=FIRST_EXCEPTION).done:
            load_future.result()

    def submit(self, batch: Batch) -> "Future[Tensor]":
        """Queues a batch; returns the future of its log-probs, float32 [N, R].

        Thread-safe. A batch whose future is cancelled before its turn is not scored.
        """
        task = _ScoringTask(next(self._numbers), batch)
        self._tasks.put(task)
        if self._failure is not None:
            self._fail_queue(self._failure)
        return task.future

    def wait_for_log_probs(self, future: "Future[Tensor]") -> Tensor:
        """Waits for the result of a future of `submit`.

        Raises:
            DeadlineError: there is no result within the limit.
            RankLost: copies were lost too often.
        """
        limit = WAIT_TIMEOUTS * self.config.train.wait_timeout_s
        try:
            return future.result(timeout=limit)
        except TimeoutError:
            raise DeadlineError(
                f"the learner waited {limit:.0f} s ({WAIT_TIMEOUTS} x train.wait_timeout_s) for "
                f"{', '.join(map(str, self.copies))} to score a microbatch; raise train.wait_timeout_s if the "
                "scorers are only slow"
            ) from None

    def close(self) -> None:
        """Ends all copies and their threads."""
        self._is_closing = True
        for copy in self.copies:
            copy.end()
        self._fail(RunError("the run has ended"))
        for _ in self._threads:
            self._tasks.put(_ScoringTask(math.inf))
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    def _run_copy(self, copy: "ModelCopy", load_future: "Future[None]") -> None:
        try:
            copy.load()
            load_future.set_result(None)
            while (task := self._tasks.get()).batch is not None:
                self._score(copy, task, task.batch)
        except BaseException as error:
            self._fail(error)
            with suppress(InvalidStateError):
                load_future.set_exception(error)
        finally:
            copy.close()

    def _score(self, copy: "ModelCopy", task: _ScoringTask, batch: Batch) -> None:
        """Scores a microbatch; if the copy is lost, requeues the microbatch and replaces the copy."""
        if not task.losses and not task.future.set_running_or_notify_cancel():
            return
        try:
            task.future.set_result(copy.log_prob(batch))
            copy.losses = 0
        except RankLost as error:
            task.losses, copy.losses = task.losses + 1, copy.losses + 1
            if self._is_closing or max(task.losses, copy.losses) >= MAX_CONSECUTIVE_LOSSES:
                task.future.set_exception(error)
                raise
            log.warning("a copy of the frozen model (%s) is lost and replaced: %s", copy, error)
            self._tasks.put(task)
            copy.close()
            copy.load()
            log.warning("the copy of the frozen model (%s) is back", copy)
        except BaseException as error:
            task.future.set_exception(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Fails queued and future microbatches with `error`."""
        self._failure = error
        self._fail_queue(error)

    def _fail_queue(self, error: BaseException) -> None:
        """Sets `error` on the futures of all queued microbatches; stop signals stay queued."""
        stop_signals = []
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if task.batch is None:
                    stop_signals.append(task)
                    continue
                with suppress(InvalidStateError):  # the future was cancelled
                    task.future.set_exception(error)
        for stop_signal in stop_signals:
            self._tasks.put(stop_signal)


class ModelCopy:
    """Copy of the frozen model, on one rank or sharded over several.

    losses: consecutive losses of its ranks. Only the copy's own thread calls its methods, except `end`.
    """

    def __init__(self, config: Config, plan: Plan, slots: list[DeviceSlot]) -> None:
        self.config = config
        self.plan = plan
        self.slots = slots
        self.ranks: Ranks | None = None
        self.losses = 0
        self._has_loaded = False
        self._packs = False
        self._is_ended = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.slots))

    def load(self) -> None:
        """Starts the ranks and loads their model.

        Raises:
            ConfigError: the devices for the ranks are missing, or the model cannot be loaded.
            RankLost: a rank does not start.
        """
        while True:
            try:
                settings = RankSettings(
                    nodes=1,
                    ray_cpus=self.plan.ray_cpus,
                    on_gpu=not self.plan.devices.on_cpu,
                    timeout_s=self.config.train.wait_timeout_s,
                    address=self.config.ray.address,
                    settings_text=f"ref_model.num_devices={self.plan.reference.ranks}, {len(self.slots)} to a copy",
                )
                self.ranks = ranks = Ranks(self.slots, settings, ScorerActor)
                ranks.start()
                if self._is_ended:
                    raise RankLost(f"{self} ended with the run")
                calls = ranks.begin_same_call("build", self.config, self.plan)
                self._packs = bool(ranks.wait_for_answers(calls, "the model", LOADING_PATIENCE)[0])
                self._has_loaded = True
                return
            except (RankLost, ConfigError) as error:
                self.close()
                self.losses += 1
                if isinstance(error, ConfigError) and not self._has_loaded:
                    raise  # a copy that was loaded before may wait for its cluster node to return
                if self._is_ended or self.losses >= MAX_CONSECUTIVE_LOSSES:
                    raise RankLost(str(error)) from error
                log.warning("a copy of the frozen model (%s) is lost while it loads, and replaced: %s", self, error)

    def log_prob(self, batch: Batch) -> Tensor:
        """Computes the log-probs float32 [N, R] of a batch's response tokens."""
        assert self.ranks is not None
        ranks, rows = len(self.slots), self.plan.learner.microbatch_rows
        count = math.ceil(len(batch) / (ranks * rows))
        limit = self.config.train.max_tokens_per_microbatch  # the learner's limit
        shares = partition_rows(batch.for_reference(), ranks, count, limit, self._packs)
        calls = self.ranks.begin_call(
            "log_prob", [([(one.batch.tokens, one.batch.temperature) for one in share],) for share in shares]
        )
        answers = self.ranks.wait_for_answers(calls, "log-probs", 1 + max(map(len, shares)))
        return assemble_rows(shares, answers, batch.sample_log_prob)

    def end(self) -> None:
        """Kills the ranks, even while the copy's thread waits for them. Thread-safe."""
        self._is_ended = True
        ranks = self.ranks
        for actor in [] if ranks is None else list(ranks.actors):
            ray.kill(actor)

    def close(self) -> None:
        """Ends the ranks and releases their devices."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.close()


def scorer_slots(plan: Plan) -> list[list[DeviceSlot]]:
    """Returns the device slots of each copy's ranks; on a cluster Ray selects their GPUs."""
    reference, devices = plan.reference, plan.devices
    names = [f"scorer rank {number}" for number in range(reference.ranks)]
    if devices.on_cpu:
        slots = [DeviceSlot(name) for name in names]
    elif devices.on_cluster:
        slots = [DeviceSlot(name, num_gpus=1) for name in names]
    else:
        gpus = zip(names, reference.devices, strict=True)
        slots = [DeviceSlot(name, plan.machine.physical_gpus((gpu,))) for name, gpu in gpus]
    size = reference.shard_size
    return [slots[start : start + size] for start in range(0, len(slots), size)]
