"""Reads ahead in a thread, so that reading and tokenizing overlap."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator


def ahead[T](items: Iterable[T], count: int) -> Iterator[T]:
    """The same items, up to `count` of them made before they are asked for; what is raised in there is raised here."""
    waiting: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(count)
    stop = threading.Event()

    def put(item: T | None, error: BaseException | None) -> bool:
        while not stop.is_set():
            try:
                waiting.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            for item in items:
                if not put(item, None):
                    return
        except BaseException as error:
            put(None, error)
        else:
            put(None, StopIteration())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # an item comes without an error
    finally:
        stop.set()
        thread.join()
