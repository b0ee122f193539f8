"""A result that may still be on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """What an asynchronous step returns: :meth:`wait`, or a call, gives the result.

    ``finish`` is called once, by the first :meth:`wait`.  On a GPU it makes the current stream wait, not the host.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    @staticmethod
    def done(result: T) -> Pending[T]:
        """A result that is there."""
        # every call of a layer makes some: no function that only returns it is made and called
        pending: Pending[T] = object.__new__(Pending)
        pending._finish, pending._result = None, [result]
        return pending

    def wait(self) -> T:
        """The result.  Raises what the step raised, CommunicationError too, and again when it is asked again."""
        if self._finish is not None:
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    __call__ = wait
