"""The ledger of tasks: each nonce is good for one reply of one client."""

import sys
from dataclasses import replace

import pytest

from fedcover.server.task_ledger import LATE_ROUNDS_KEPT, TaskLedger
from fedcover.types import Update
from tests.helpers.replies import asked_and_trained, honest


def test_nonce_is_good_for_one_reply():
    _, _, pending, update = asked_and_trained("slices")
    ledger = TaskLedger()
    tasks = [ledger.issue(lambda nonce: replace(pending, nonce=nonce)) for _ in range(4)]
    assert len({task.nonce for task in tasks}) == 4
    assert len({task.nonce[16:] for task in tasks}) == 4
    assert all(len(bytes.fromhex(task.nonce[16:])) == 16 for task in tasks)
    raws = [honest(task, update) for task in tasks]
    assert isinstance(ledger.receive(raws[0]), Update)
    assert ledger.receive(raws[0]).reason == "replayed nonce"
    assert ledger.receive(replace(raws[1], metrics={})).reason == "malformed metrics"
    assert ledger.receive(raws[1]).reason == "replayed nonce"  # a second try is none
    for wrong in (None, 7, "", "00" * 16, b"x", ["x"], {}, "x" * 10**6, "\n"):
        accepted_update = ledger.receive(replace(raws[2], nonce=wrong))
        assert accepted_update.reason == "unknown nonce"
        assert accepted_update.detail.isprintable()
        assert len(accepted_update.detail) < 250
    for wrong in (
        pending.client.id + 1,
        None,
        str(pending.client.id),
        1.5,
        True,
    ):  # another client's nonce
        assert ledger.receive(replace(raws[2], client=wrong)).reason == "unknown nonce"
    assert isinstance(ledger.receive(raws[2]), Update)  # and that has not used it up
    assert [task.nonce for task in ledger.close()] == [tasks[3].nonce]
    assert ledger.receive(raws[3]).reason == "round closed"
    assert ledger.close() == ()


def test_rejection_names_the_claimed_client_and_nonce():
    _, _, pending, update = asked_and_trained("slices")
    ledger = TaskLedger()
    raw = honest(ledger.issue(lambda nonce: replace(pending, nonce=nonce)), update)
    accepted_update = ledger.receive(replace(raw, nonce="gone", client=41))
    assert (accepted_update.client, accepted_update.detail) == (41, "nonce 'gone' of client 41")
    accepted_update = ledger.receive(replace(raw, client="41"))
    assert accepted_update.client is None
    assert accepted_update.detail.endswith("of client '41'")


def test_nonce_of_the_hundredth_task_is_known():
    _, _, pending, update = asked_and_trained("slices")
    ledger = TaskLedger()
    tasks = [ledger.issue(lambda nonce: replace(pending, nonce=nonce)) for _ in range(100)]
    assert isinstance(ledger.receive(honest(tasks[99], update)), Update)
    assert ledger.receive(honest(tasks[99], update)).reason == "replayed nonce"


def test_ledger_gives_names_of_open_tasks_only():
    _, _, pending, update = asked_and_trained("slices")
    ledger = TaskLedger()
    task = ledger.issue(lambda nonce: replace(pending, nonce=nonce))
    names = ledger.expected_names(task.nonce)
    assert "params/head.weight" in names
    assert "params/nosuch" not in names
    assert all(ledger.expected_names(nonce) is None for nonce in ("gone", None, 7, ["x"]))
    ledger.receive(honest(task, update))
    assert ledger.expected_names(task.nonce) is None


def test_ledger_does_not_grow():
    _, _, pending, update = asked_and_trained("slices")
    ledger = TaskLedger()
    earliest = ledger.issue(lambda nonce: replace(pending, nonce=nonce))
    assert isinstance(ledger.receive(honest(earliest, update)), Update)
    for _ in range(LATE_ROUNDS_KEPT):
        assert ledger.receive(honest(earliest, update)).reason == "replayed nonce"
        missed = ledger.issue(lambda nonce: replace(pending, nonce=nonce))
        ledger.close()
        assert ledger.receive(honest(missed, update)).reason == "round closed"
    size = sys.getsizeof(ledger._pending) + sum(map(sys.getsizeof, ledger._late_nonces_by_round))
    for _ in range(3 * LATE_ROUNDS_KEPT):
        ledger.issue(lambda nonce: replace(pending, nonce=nonce))
        ledger.close()
    assert (
        sys.getsizeof(ledger._pending) + sum(map(sys.getsizeof, ledger._late_nonces_by_round))
        == size
    )
    for raw_reply in (earliest, missed):  # its seal is ours, and it is not open
        assert ledger.receive(honest(raw_reply, update)).reason == "replayed nonce"


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda n: n[:-1],
        lambda n: "0" + n,
        lambda n: f"{9:016x}{n[16:]}",
        lambda n: n[::-1],
        lambda n: "é" * 48,
        lambda n: "٣" * 48,
    ],
)
def test_nonce_that_was_never_issued_is_unknown(change):
    _, _, pending, update = asked_and_trained("slices")
    ledger = TaskLedger()
    tasks = [ledger.issue(lambda nonce: replace(pending, nonce=nonce)) for _ in range(10)]
    ledger.close()
    assert (
        ledger.receive(honest(replace(tasks[4], nonce=change(tasks[4].nonce)), update)).reason
        == "unknown nonce"
    )
    other = TaskLedger()
    assert other.receive(honest(tasks[0], update)).reason == "unknown nonce"
