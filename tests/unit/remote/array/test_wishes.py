"""What clients want of an array: whose it is, and what is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_run_ray.remote.array.driver import Wishes, wish_name, wish_to_cancel


class Store:
    """Ray's internal store, in memory."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.is_away = False

    def put(self, name: str, data: bytes) -> None:
        self.data[f"gcs://{name}".encode()] = data

    def _internal_kv_list(self, prefix: bytes) -> list[bytes]:
        if self.is_away:
            raise ConnectionError("the store is away")
        return [key for key in self.data if key.startswith(prefix)]

    def _internal_kv_get(self, key: bytes) -> bytes | None:
        return self.data.get(key)

    def _internal_kv_del(self, key: bytes) -> None:
        self.data.pop(key, None)


@pytest.fixture
def store() -> Store:
    return Store()


def wishes_of(store: Store, submission_id: str) -> Wishes:
    experimental = SimpleNamespace(internal_kv=store)
    exceptions = SimpleNamespace(RayError=ConnectionError)
    return Wishes(SimpleNamespace(experimental=experimental, exceptions=exceptions), submission_id)


def test_a_wish_is_the_array_s_whose_name_it_has(store):
    data = wish_to_cancel([(3, 9)], only_waiting=False)
    store.put(wish_name("e_17.sweep_1", "n"), data)
    assert list(wishes_of(store, "e_17.sweep").find(100)) == []
    (wish,) = wishes_of(store, "e_17.sweep_1@2").find(100)
    assert (wish.ranges, wish.only_waiting) == ([(3, 9)], False)
    wishes_of(store, "e_17.sweep_1").remove(wish.key)
    assert store.data == {}


def test_a_wish_asks_for_no_element_that_is_not_there(store):
    data = wish_to_cancel([(-5, 3), (7, 10**12)], only_waiting=True)
    store.put(wish_name("e.a", "n"), data)
    (wish,) = wishes_of(store, "e.a").find(10)
    assert (wish.ranges, wish.only_waiting) == ([(0, 3), (7, 9)], True)


@pytest.mark.parametrize("data", [b"", b"x", b"[]", b'{"cancel": 3}', b'{"cancel": [["a", 1]]}'])
def test_what_is_no_wish_is_removed(store, data):
    store.put(wish_name("e.a", "n"), data)
    assert list(wishes_of(store, "e.a").find(10)) == []
    assert store.data == {}


def test_a_store_that_is_away_for_a_moment_loses_no_wish(store):
    store.put(wish_name("e.a", "n"), wish_to_cancel([(0, 1)], only_waiting=False))
    wishes = wishes_of(store, "e.a")
    store.is_away = True
    assert list(wishes.find(10)) == []
    store.is_away = False
    assert len(list(wishes.find(10))) == 1


def test_wishes_that_come_too_late_are_removed(store):
    store.put(wish_name("e.a", "n"), wish_to_cancel([(0, 1)], only_waiting=False))
    wishes_of(store, "e.a").remove_all()
    assert store.data == {}
