"""The body of a worker process, which judges batches; forked by `fork_server`, driven by `pool`. No torch here.

A worker reads batches of (completion, example) and sends results, in portions. Before each verification it writes
its index and the time into a page that it shares with the service, which holds it to its deadline.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from envs.example import Completion, CompletionInRun, Example
from envs.judging.outcome import OUT_OF_MEMORY, Judge, Result, judged

PROGRESS = struct.Struct("<qd")
"""Index of the running verification or IDLE, and time.monotonic() of its start."""
IDLE = -1
PORTION_SECONDS = 0.02
RETIRE_AFTER = 50_000
"""Verifications after which a worker makes room for a fresh one: a leak in a verifier never reaches the limit."""
Batch = tuple[list[int], list[tuple[Any, ...]], list[int], list[tuple[Any, ...]]]
"""Indices, fields of each completion, the place of each one's example, fields of each example."""
Portion = tuple[list[int], list[tuple[Any, ...]], bool, bool]
"""Indices, fields of each `Result`, whether the batch is done, whether the worker retires. Plain tuples pickle faster
than objects."""


def pack(items: Sequence[tuple[int, Completion, Example]]) -> Batch:
    """A batch by columns, each example once: it pickles several times faster than its objects."""
    places: dict[int, int] = {}
    examples: list[tuple[Any, ...]] = []
    for _, _, example in items:
        if id(example) not in places:
            places[id(example)] = len(examples)
            examples.append(tuple(vars(example).values()))
    completions = [tuple(vars(each).values()) for _, each, _ in items]
    of_examples = [places[id(example)] for _, _, example in items]
    return [index for index, _, _ in items], completions, of_examples, examples


def unpack(portion: Portion) -> tuple[list[tuple[int, Result]], bool, bool]:
    """The results of a portion with their indices, whether the batch is done, and whether the worker retires."""
    indices, results, done, retires = portion
    return list(zip(indices, map(Result._make, results), strict=True)), done, retires


def work(judge: Judge, connection: Connection, progress: mmap.mmap) -> None:
    """Judge batches until memory has run out or a fresh worker is due. Raises EOFError when the service goes."""
    count, own, out_of_memory = 0, os.getpid(), False
    while count < RETIRE_AFTER and not out_of_memory:
        indices, completions, places, fields = connection.recv()
        examples = [Example(*each) for each in fields]
        finished: list[int] = []
        results: list[tuple[Any, ...]] = []
        sent = time.monotonic()
        for index, completion, place in zip(indices, completions, places, strict=True):
            began = time.monotonic()
            if began - sent > PORTION_SECONDS and results:
                PROGRESS.pack_into(progress, 0, IDLE, 0.0)
                connection.send((finished, results, False, False))
                finished, results = [], []
                sent = began = time.monotonic()
            PROGRESS.pack_into(progress, 0, index, began)
            result = judged(judge, CompletionInRun(*completion), examples[place])
            if os.getpid() != own:
                os._exit(0)  # the verifier forked, and its child came back too: it has no verdict to send
            finished.append(index)
            results.append(tuple(result))
            out_of_memory = result.message == OUT_OF_MEMORY
            if out_of_memory:
                break
        count += len(indices)
        PROGRESS.pack_into(progress, 0, IDLE, 0.0)
        retires = count >= RETIRE_AFTER and not out_of_memory
        connection.send((finished, results, index == indices[-1], retires))
