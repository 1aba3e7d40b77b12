"""Processes that train the virtual clients of the inline engine, so that it uses all cores.

Each process has one torch thread, and trains the same clients in every round. What a client keeps goes through its
folder, where this process and the other one see which of them wrote last. So the result is that of one process with one
thread, to the bit.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context

import torch
from flwr.app import Context, Message

from hyperbloom.common.errors import HyperbloomError, attempt
from hyperbloom.common.program.signals import end_with
from hyperbloom.server.grids.inline import TrainAll


@contextmanager
def workers(count: int) -> Iterator[TrainAll]:
    """Start so many processes; yield the function that lets them answer orders to train."""
    with ExitStack() as stack:
        start = get_context("spawn")  # a fork would inherit torch's threads half
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, start, initializer=_begin, initargs=(os.getpid(),)))
            for _ in range(count)
        ]

        def train_all(tasks: Sequence[tuple[Message, Context]]) -> list[Message | Exception]:
            try:
                begun = [pools[context.node_id % count].submit(_answer, message, context) for message, context in tasks]
                answers = [attempt(future.result) for future in begun]
            except BrokenProcessPool as error:
                answers = [error]
            if any(isinstance(answer, BrokenProcessPool) for answer in answers):
                raise HyperbloomError("a worker process has ended, perhaps for lack of memory; go on with --resume")
            return answers

        yield train_all


def _begin(server: int) -> None:
    """Prepare a new process: one thread, no end by Ctrl-C but by its server, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    end_with(server)


def _answer(message: Message, context: Context) -> Message | Exception:
    from hyperbloom.client.app import app

    return attempt(app, message, context)
