"""Work on the device, in order: in a thread of its own, beside the step loop, or at once in the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class DeviceThread:
    """`has_thread` False: nothing runs in the background, and every future is done when it is returned."""

    def __init__(self, *, has_thread: bool) -> None:
        self._threads = ThreadPoolExecutor(1, "device") if has_thread else None

    def submit(
        self, work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Run it behind everything that was submitted before; a failure is that of the future."""
        if self._threads is not None:
            return self._threads.submit(work, *args, **kwargs)
        future: Future[_Result] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def run(self, work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """The same, and wait for it."""
        return self.submit(work, *args, **kwargs).result()

    def shutdown(self) -> None:
        """Wait for the work that has begun and drop the rest. Safe to call twice."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
