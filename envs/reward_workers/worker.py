"""Main loop of a reward worker process, which scores batches of completions.

`fork_server` forks the worker, `worker_pool` drives it. A worker reads batches of (completion, example) and
sends results in chunks. Before each verification the worker writes the verification's index and the time into a
page shared with the service, which enforces the deadline. This module does not import torch.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from envs.example import Completion, CompletionInRun, Example
from envs.reward_workers.scoring import OUT_OF_MEMORY, Scorer, ScoringResult, score_completion

PROGRESS = struct.Struct("<qd")
"""Index of the running verification or IDLE, and time.monotonic() of its start."""
IDLE = -1
CHUNK_SECONDS = 0.02
"""Time after which the finished results of a batch are sent."""
RETIRE_AFTER = 50_000
"""Verifications after which a fresh worker replaces this one, so that a verifier's leaks stay small."""
PackedBatch = tuple[list[int], list[tuple[Any, ...]], list[int], list[tuple[Any, ...]]]
"""Indices, fields of each completion, position of each completion's example, fields of each example."""
ResultChunk = tuple[list[int], list[tuple[Any, ...]], bool, bool]
"""Indices, fields of each `ScoringResult`, whether the batch is done, whether the worker retires.

Plain tuples pickle faster than objects.
"""


def pack_batch(items: Sequence[tuple[int, Completion, Example]]) -> PackedBatch:
    """Packs a batch into columns, each example once, which pickle faster than objects."""
    positions: dict[int, int] = {}
    examples: list[tuple[Any, ...]] = []
    for _, _, example in items:
        if id(example) not in positions:
            positions[id(example)] = len(examples)
            examples.append(tuple(vars(example).values()))
    completions = [tuple(vars(each).values()) for _, each, _ in items]
    example_positions = [positions[id(example)] for _, _, example in items]
    return [index for index, _, _ in items], completions, example_positions, examples


def unpack_results(chunk: ResultChunk) -> tuple[list[tuple[int, ScoringResult]], bool, bool]:
    """Unpacks a chunk: results by index, whether the batch is done, whether the worker retires."""
    indices, results, done, retires = chunk
    return list(zip(indices, map(ScoringResult._make, results), strict=True)), done, retires


def run_worker(scorer: Scorer, connection: Connection, progress: mmap.mmap) -> None:
    """Scores batches until memory has run out or a fresh worker is due.

    Raises:
        EOFError: the service has ended.
    """
    count, own_pid, out_of_memory = 0, os.getpid(), False
    while count < RETIRE_AFTER and not out_of_memory:
        indices, completions, positions, fields = connection.recv()
        examples = [Example(*each) for each in fields]
        finished: list[int] = []
        results: list[tuple[Any, ...]] = []
        send_time = time.monotonic()
        for index, completion, position in zip(indices, completions, positions, strict=True):
            start_time = time.monotonic()
            if start_time - send_time > CHUNK_SECONDS and results:
                PROGRESS.pack_into(progress, 0, IDLE, 0.0)
                connection.send((finished, results, False, False))
                finished, results = [], []
                send_time = start_time = time.monotonic()
            PROGRESS.pack_into(progress, 0, index, start_time)
            result = score_completion(scorer, CompletionInRun(*completion), examples[position])
            if os.getpid() != own_pid:
                os._exit(0)  # a child that the verifier forked returned here too; only the parent sends a verdict
            finished.append(index)
            results.append(tuple(result))
            out_of_memory = result.message == OUT_OF_MEMORY
            if out_of_memory:
                break
        count += len(indices)
        PROGRESS.pack_into(progress, 0, IDLE, 0.0)
        retires = count >= RETIRE_AFTER and not out_of_memory
        connection.send((finished, results, index == indices[-1], retires))
