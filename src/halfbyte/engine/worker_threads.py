"""A few threads that take jobs in turn, for as long as their owner lives.

Python's own pool takes no job once the main thread has ended, though an engine still serves the other threads of its
program then. These threads end when their owner stops them. Their owner must join them before the interpreter ends,
because they run native code.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]


class WorkerThreads:
    """Starts its threads with the first job. `begin` is called first in each of them."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        arguments = (self._jobs, begin)
        self._threads = [
            threading.Thread(target=_work, args=arguments, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        self._lock = threading.Lock()
        self._started = False

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
        self._jobs.put((future, lambda: function(*args, **kwargs)))
        return future

    def end(self) -> None:
        """Jobs that have not begun are cancelled; those that run are not waited for."""
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Wait for the jobs that run."""
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()


def _work(jobs: queue.SimpleQueue[Job | None], begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    while (job := jobs.get()) is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as e:  # native code panics past Exception
                future.set_exception(e)
        del job, future, call  # an idle thread keeps nothing alive
