"""Values that are computed once, and of several instances at a time."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from lightformers_hf.conversion.lazy import lazy_property

pytestmark = pytest.mark.quick


class Lazy:
    """Notes who computed."""

    def __init__(self, meeting):
        self.meeting, self.computed = meeting, 0

    @lazy_property
    def value(self) -> int:
        """A number."""
        self.computed += 1
        self.meeting.wait(20)
        return 7


def test_two_instances_are_computed_at_once_and_each_once():
    meeting = Barrier(2)  # broken, if the second comes only after the first
    both = [Lazy(meeting), Lazy(meeting)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.value, both)) == [7, 7]
    assert [one.value + one.computed for one in both] == [8, 8]
    assert Lazy.value.__doc__ == "A number."
