"""What is computed when it is first asked for, in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class lazy_property(Generic[Value]):  # noqa: N801, used as `property` is
    """As `functools.cached_property`, which before Python 3.12 lets one thread at a time compute it, of all instances.

    Matrices are weighed in several threads. Two that ask one instance at once both compute, and get equal values.
    """

    def __init__(self, compute: Callable[[Any], Value]):
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Value:
        if instance is None:  # asked of the class, as `help` does
            return self  # type: ignore[return-value]
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
