"""What ranks tell each other beside the script's own traffic."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import distributed

from advisor.distributed.board import Board, Lost


def test_each_rank_reads_what_all_have_written() -> None:
    store, found = distributed.HashStore(), {}

    def rank(number: int) -> None:
        own = Board(store, number, 3, patience_s=60.0)
        found[number] = [own.exchange(number), own.exchange({"at": number})]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [[0, 1, 2], [{"at": 0}, {"at": 1}, {"at": 2}]] for number in range(3)}


class Store:
    """A store in which nobody else writes, and waiting is over at once."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.values.keys()

    def wait(self, keys: list[str], timeout: object) -> None:
        if not self.check(keys):
            raise distributed.DistStoreError("wait timeout")


def test_who_does_not_come_is_known_by_name() -> None:
    store = Store()
    store.set("advisor/1/2", "0")
    with pytest.raises(Lost, match="rank 1 did not come") as lost:
        Board(store, 0, 3, patience_s=1.0).exchange(0)
    assert lost.value.ranks == [1]
