"""What cannot be sent to a worker is named, down to the attribute that holds it."""

import threading

import pytest

from nemo_run_ray.errors import CannotBeSent
from nemo_run_ray.work.pickling import pickle_function, pickle_item


class Job:
    def __init__(self) -> None:
        self.guard = threading.Lock()


def test_the_attribute_of_an_item_is_named():
    with pytest.raises(CannotBeSent, match=r"^Item 1 cannot be sent .*guard is of type lock; "):
        pickle_item([Job()], {}, "item 1")


def test_the_variable_of_a_function_is_named():
    lock = threading.Lock()
    with pytest.raises(CannotBeSent, match=r"^The function .*lock is of type lock; "):
        pickle_function(lambda number: lock)
