"""Workers as threads that share a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from unisono.cluster import Membership, SimpleClusterResolver, WorkerCard, meet, was_left
from unisono.errors import JobMismatchError, WorkerTimeoutError


def cards(size: int, **facts: Any) -> list[WorkerCard]:
    cluster = {"worker": [f"host{rank}:1" for rank in range(size)]}
    resolvers = [
        SimpleClusterResolver(cluster, task_type="worker", task_id=rank) for rank in range(size)
    ]
    own = [WorkerCard.of(Membership.of(resolver), num_devices=1) for resolver in resolvers]
    return [replace(card, process_id=1000 + card.rank, **facts) for card in own]


def outcomes(workers: Sequence[WorkerCard], timeout_seconds: float = 60) -> list[Any]:
    """What `meet` returns or raises for each worker, all at the same time."""
    store = HashStore()
    together = threading.Barrier(len(workers))

    def come(card: WorkerCard) -> object:
        # On a busy machine threads start long after each other.
        together.wait(60)
        try:
            return meet(PrefixStore("test", store), card, timeout_seconds)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(come, workers))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_workers_that_belong_together_get_all_cards_by_rank(size: int) -> None:
    workers = cards(size)

    assert outcomes(workers) == [tuple(workers)] * size
    assert outcomes(workers[::-1]) == [tuple(workers)] * size


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [
        ("size", 4, "number of workers: 3 on ranks 0 and 1, 4 on rank 2"),
        ("size", 2, "number of workers: 3 on ranks 0 and 1, 2 on rank 2"),
        ("num_replicas", 2, "`num_replicas`: None on ranks 0 and 1, 2 on rank 2"),
        ("script", "other.py (12)", "script: .* on ranks 0 and 1, other.py .12. on rank 2"),
        ("library", "0.0", "version of unisono: .*, 0.0 on rank 2"),
        ("python", "3.0", "version of Python: .*, 3.0 on rank 2"),
        ("torch", "1.0", "version of torch: .*, 1.0 on rank 2"),
    ],
)
def test_every_worker_is_told_who_differs_in_what(fact: str, value: Any, message: str) -> None:
    *workers, odd = cards(3)

    errors = outcomes([*workers, replace(odd, **{fact: value})])

    assert [type(error) for error in errors] == [JobMismatchError] * 3
    for error in errors:
        assert error.ranks == (2,)
        with pytest.raises(JobMismatchError, match=message):
            raise error


def test_if_rank_0_is_the_odd_one_it_is_named() -> None:
    odd, *workers = cards(4)

    errors = outcomes([replace(odd, size=8), *workers])

    for error in errors:
        assert isinstance(error, JobMismatchError)
        assert error.ranks == (0,)
        assert "8 on rank 0, 4 on ranks 1, 2 and 3" in str(error)


def test_a_rank_beyond_the_job_is_told_to_all_who_still_wait() -> None:
    first, second, _ = cards(3)
    stray = cards(7)[6]

    errors = outcomes([first, second, stray])

    for error in errors:
        assert isinstance(error, JobMismatchError)
        assert error.ranks == (6,)
        assert "7 on rank 6" in str(error)


def test_a_rank_that_is_taken_already_is_told_to_all_who_still_wait() -> None:
    first, second, _ = cards(3)

    errors = outcomes([first, second, replace(second, process_id=77)])

    for error in errors:
        assert isinstance(error, JobMismatchError)
        assert error.ranks == (1,)
        assert "rank 1, which is there twice" in str(error)
        assert "process 1001" in str(error)
        assert "process 77" in str(error)


def test_ranks_that_do_not_come_are_named() -> None:
    workers = cards(5)

    errors = outcomes([workers[0], workers[2], workers[3]], timeout_seconds=10)

    for error in errors:
        assert isinstance(error, WorkerTimeoutError)
        assert error.ranks == (1, 4)
        assert "ranks 1 and 4 have not connected" in str(error)


def test_if_rank_0_does_not_come_it_is_named() -> None:
    _, second, third = cards(3)

    errors = outcomes([second, third], timeout_seconds=10)

    for error in errors:
        assert isinstance(error, WorkerTimeoutError)
        assert error.ranks == (0,)
        assert "rank 0 has not connected" in str(error)


def test_when_one_gives_up_all_do() -> None:
    first, second, _ = cards(3)
    store = HashStore()

    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(meet, store, second, 200)
        # Or the first one finds that the second has not connected either.
        store.wait(["claim/1"], timedelta(seconds=60))
        with pytest.raises(WorkerTimeoutError, match="rank 2 has not connected"):
            meet(store, first, 10)
        with pytest.raises(WorkerTimeoutError, match="rank 2 has not connected"):
            patient.result(100)


def test_who_comes_when_the_others_have_given_up_is_told_so() -> None:
    store = HashStore()
    first, last = cards(2)
    assert not was_left(store)
    with pytest.raises(WorkerTimeoutError, match="rank 1 has not connected"):
        meet(store, first, 0.1)

    assert was_left(store)
    with pytest.raises(WorkerTimeoutError, match="some gave up") as error:
        meet(store, last, 60)
    assert error.value.ranks == ()


def test_who_ends_after_it_came_is_named() -> None:
    store = HashStore()
    first, second = cards(2)
    store.set("card/1", second.to_text())
    store.add("claim/1", 1)
    store.add("present", 1)
    with pytest.raises(WorkerTimeoutError, match="rank 1 of 2, which started") as caught:
        meet(store, first, timeout_seconds=0.2)
    assert caught.value.ranks == (1,)


def test_who_was_refused_is_told_to_those_who_wait_for_it() -> None:
    store = HashStore()
    store.set("refused/1", "a process at 10.0.0.7")

    with pytest.raises(WorkerTimeoutError, match=r"Rank 1, a process at .*, was"):
        meet(PrefixStore("test", store), cards(2)[0], 0.2)


def test_a_script_is_told_by_its_name_and_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = Membership.of(SimpleClusterResolver({}))
    files = [tmp_path / "a" / "train.py", tmp_path / "b" / "train.py", tmp_path / "c" / "train.py"]
    for file, content in zip(files, ["x = 1", "x = 1", "x = 2"], strict=True):
        file.parent.mkdir()
        file.write_text(content)

    def script_of(path: object) -> str:
        monkeypatch.setattr("sys.argv", [str(path)])
        return WorkerCard.of(membership, 1).script

    here, copy, other = map(script_of, files)

    assert here == copy != other
    assert here.startswith("train.py (")
    assert script_of("-c") == "-c"


def test_a_card_is_read_as_it_was_written() -> None:
    (card,) = cards(1)

    assert WorkerCard.from_text(card.to_text()) == card
