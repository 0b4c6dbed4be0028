"""Parts of a source over the processes of one machine.

Where there are many parts, a process makes one after another by itself: no process waits for another. A part that is
larger than a process's share of the work is read and written by the process that was started, and all the others
tokenize batches of it; but for bytes, which are made in less time than they are sent. Both give the same part.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from data.config import DataConfig, DataError
from data.encoding import BATCH_CHARACTERS, Batch, EncodedBatch, batch_size, encode_batch
from data.parts import Advance, Part, PartInfo, build_part
from data.progress import Progress
from data.readers import LARGEST_DOCUMENT
from data.sources import Source
from data.tokenizers import BYTE, load_tokenizer

BYTES_A_PROCESS = 1 << 23  # of files: less is done before another process has started
BATCHES_A_PROCESS = 2  # under way: one being tokenized, one waiting


def number_of_processes(config: DataConfig, parts: Sequence[Part]) -> int:
    """`data.processes`, or one a core where there is enough to do (a data set of the hub has no size)."""
    size = sum(part.size for part in parts)
    worthwhile = [] if size == 0 else [max(1, size // BYTES_A_PROCESS)]
    count = config.processes or min([len(os.sched_getaffinity(0)), *worthwhile])
    return min(count, len(parts)) if config.tokenizer == BYTE else count


def build_parts(source: Source, parts: Sequence[Part], config: DataConfig, progress: Progress) -> Iterator[PartInfo]:
    """Makes parts, in an order of its own; what is in them comes in the order of the source.

    Raises:
        DataError: the first mistake that was met; other processes stop at once, and what they were at is lost.
    """
    processes = number_of_processes(config, parts)
    if processes > 1 and parts:
        yield from _Processes(processes, source, config, progress).build(parts)
        return
    tokenizer = load_tokenizer(config.tokenizer)
    for part in parts:
        yield build_part(source, part, config, tokenizer, partial(map, partial(encode_batch, tokenizer)), progress.add)


def divide(parts: Sequence[Part], processes: int) -> tuple[list[Part], list[Part]]:
    """Parts that a process makes alone, as many for each, and those that are made together, one after another."""
    alone = sorted(parts, key=lambda part: part.size)
    together = []
    size = sum(part.size for part in parts)
    while alone and (len(alone) % processes or alone[-1].size * processes > size):
        together.append(alone.pop())
        size -= together[-1].size
    return alone[::-1], together


class _Processes:
    """`count` of them, which end when the parts are made, when one fails, and when this process dies."""

    def __init__(self, count: int, source: Source, config: DataConfig, progress: Progress) -> None:
        self._source, self._config, self._progress = source, config, progress
        self._workers = [_Worker(source, config) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)  # each waits for a worker

    def build(self, parts: Sequence[Part]) -> Iterator[PartInfo]:
        """As `build_parts`."""
        alone, together = divide(parts, 1 if self._config.tokenizer == BYTE else len(self._workers))
        try:
            made = {part: self._build_together(part) for part in together}
            asked = {self._threads.submit(self._ask, part): part for part in alone}
            made |= {asked[future]: future.result() for future in as_completed(asked)}
        except _Killed as error:
            raise DataError(
                f"data.path: a process that prepared {self._source.name} was killed, most likely for want of memory. "
                f"What is done is kept: prepare again with data.processes={max(1, len(self._workers) // 2)}."
            ) from error
        finally:
            for worker in self._workers:
                worker.stop()
            self._threads.shutdown(cancel_futures=True)
            for worker in self._workers:
                worker.join()
        for part in parts:
            yield made[part]

    def _build_together(self, part: Part) -> PartInfo:
        tokenizer = load_tokenizer(self._config.tokenizer)
        return build_part(self._source, part, self._config, tokenizer, self._encode, self._progress.add)

    def _encode(self, batches: Iterable[Batch]) -> Iterator[EncodedBatch]:
        """Batches as ids, in order. What is under way is bounded in number and in characters."""
        most = len(self._workers) * BATCHES_A_PROCESS
        most_characters = max(most * BATCH_CHARACTERS, LARGEST_DOCUMENT)
        asked: deque[tuple[int, Future[EncodedBatch]]] = deque()
        characters = 0
        for batch in batches:
            size = batch_size(batch)
            while asked and (len(asked) >= most or characters + size > most_characters):
                oldest, future = asked.popleft()
                characters -= oldest
                yield future.result()
            asked.append((size, self._threads.submit(self._ask, batch)))
            characters += size
        for _, future in asked:
            yield future.result()

    def _ask(self, question: Part | Batch) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(question, self._progress.add)
        finally:
            self._idle.put(worker)


class _Killed(Exception):
    """A process ended that was not told to."""


class _Stopped(Exception):
    """A process is to stop, in the middle of its work."""


class _Worker:
    """A process that does one thing after another: a part is made, a batch is encoded.

    It ends when it is told to, and when nobody holds the other end of its pipe any more. (A pool of the standard
    library leaves its processes behind where the one that started them was killed, and may wait for ever for one that
    was killed itself.)
    """

    def __init__(self, source: Source, config: DataConfig) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit the threads of torch and of the tokenizer
        self._pipe, theirs = context.Pipe()
        self._sending = threading.Lock()  # a message takes several writes
        self._process = context.Process(target=_serve, args=(theirs, source, config), daemon=True)
        with _without_main(), _without_interrupts():
            self._process.start()
        theirs.close()

    def ask(self, question: Part | Batch, advance: Advance) -> Any:
        """What it makes of it; what it raises is raised here. Raises _Killed where it ends instead."""
        try:
            with self._sending:
                self._pipe.send(question)
            while isinstance(answer := self._pipe.recv(), int):
                advance(answer)
        except (EOFError, ConnectionError) as error:
            raise _Killed from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """Tells it to end, whatever it is at, while another thread may be asking it."""
        with suppress(ConnectionError), self._sending:
            self._pipe.send(None)

    def join(self) -> None:
        """Waits for its end."""
        self._process.join()
        self._pipe.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that are started in here do not run the user's script once more, which may call `prepare` unguarded."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started in here never hear of Ctrl-C, which a terminal tells all of them: the one that was
    started decides, and hears of it afterwards."""
    resource_tracker.ensure_running()  # its start would unblock the signal
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _serve(pipe: Connection, source: Source, config: DataConfig) -> None:
    """A worker's whole life."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    tokenizer = load_tokenizer(config.tokenizer)
    encode = partial(encode_batch, tokenizer)

    def advance(count: int) -> None:
        if pipe.poll():  # nothing else is asked of it before it has answered: it is to stop, or nobody is there
            raise _Stopped
        pipe.send(count)

    with suppress(EOFError, ConnectionError, _Stopped):
        while (question := pipe.recv()) is not None:
            answer: Any
            try:
                is_part = isinstance(question, Part)
                answer = (
                    build_part(source, question, config, tokenizer, partial(map, encode), advance)
                    if is_part
                    else encode(question)
                )
            except (EOFError, ConnectionError, _Stopped):
                raise
            except (DataError, OSError) as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            pipe.send(answer)
