"""Result of an asynchronous step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AsyncResult(Generic[T]):
    """Result of an asynchronous step; :meth:`wait`, or a call, returns it.

    Args:
        finish: Completes the step and returns the result. The first :meth:`wait` calls it once. On a GPU it makes the
            current stream wait, not the host.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    @staticmethod
    def done(result: T) -> AsyncResult[T]:
        """Wrap a result that is already available.

        Args:
            result: The result.

        Returns:
            A pending result whose :meth:`wait` returns immediately.
        """
        # Every call of a layer makes several of these, so this avoids creating and calling a function.
        pending: AsyncResult[T] = object.__new__(AsyncResult)
        pending._finish, pending._result = None, [result]
        return pending

    def wait(self) -> T:
        """Return the result.

        Raises what the step raised, including CommunicationError, again on every call.
        """
        if self._finish is not None:
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    __call__ = wait
