"""The tasks that are waiting for a reply, and the nonces that tie a reply to its task."""

import hmac
import re
import secrets
from collections import deque
from collections.abc import Callable, Container

from fedcover.server.raw_arrays import safe_repr
from fedcover.server.reply_format import PendingTask, RawReply
from fedcover.server.reply_validation import Rejection, validate_reply
from fedcover.types import Update

LATE_ROUNDS_KEPT = 4
"""For how many rounds a late reply is recognised as late; after that it counts as a replay."""
_UNKNOWN = "unknown nonce"


def nonce_of(number: int, secret: bytes) -> str:
    """Return the number of a task followed by its 128-bit signature.

    Nobody without the secret can guess the nonce of another task.

    >>> len(nonce_of(7, b"secret")), nonce_of(7, b"secret")[:16]
    (48, '0000000000000007')
    """
    signature = hmac.new(secret, str(number).encode(), "sha256").hexdigest()
    return f"{number:016x}{signature[:32]}"


class TaskLedger:
    """Issue tasks and accept at most one reply to each, valid or not.

    >>> from fedcover.submodels.reductions import Masks
    >>> from fedcover.types import Client
    >>> ledger = TaskLedger()
    >>> client = Client(id=7, capacity=1.0, slot=0, samples=10, labels=())
    >>> task = ledger.issue(lambda nonce: PendingTask(nonce, client, Masks({}), {}))
    >>> raw = RawReply(task.nonce, 7, {}, {"loss": 0.5})
    >>> ledger.receive(raw).loss, ledger.receive(raw).reason
    (0.5, 'replayed nonce')
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._issued = 0
        self._pending: dict[str, PendingTask] = {}
        self._late_nonces_by_round: deque[frozenset[str]] = deque(maxlen=LATE_ROUNDS_KEPT)

    def issue(self, make: Callable[[str], PendingTask]) -> PendingTask:
        """Register the task that `make` returns for a fresh nonce."""
        self._issued += 1
        task = make(nonce_of(self._issued, self._secret))
        self._pending[task.nonce] = task
        return task

    def expected_names(self, nonce: object) -> Container[str] | None:
        """Return the names of arrays that a reply may have; None if no such task is pending."""
        task = self._find(nonce)
        return None if task is None else task.expected_arrays

    def receive(self, raw: RawReply) -> Update | Rejection:
        """Validate a reply against the task of its nonce, and use up the nonce."""
        task = self._find(raw.nonce)
        if task is None or type(raw.client) is not int or raw.client != task.client.id:
            return self._reject_nonce(raw)
        del self._pending[task.nonce]
        return validate_reply(raw, task)

    def close(self) -> tuple[PendingTask, ...]:
        """End the round: replies to tasks that are still pending will be late."""
        unanswered = tuple(self._pending.values())
        self._pending.clear()
        self._late_nonces_by_round.append(frozenset(task.nonce for task in unanswered))
        return unanswered

    def _find(self, nonce: object) -> PendingTask | None:
        return self._pending.get(nonce) if isinstance(nonce, str) else None

    def _reject_nonce(self, raw: RawReply) -> Rejection:
        reason = self._rejection_reason(raw.nonce) if isinstance(raw.nonce, str) else _UNKNOWN
        claimed_client = raw.client if type(raw.client) is int else None
        detail = f"nonce {safe_repr(raw.nonce)} of client {safe_repr(raw.client)}"
        return Rejection(claimed_client, reason, detail)

    def _rejection_reason(self, nonce: str) -> str:
        """Say why no task is pending for this nonce and this client."""
        if nonce in self._pending:
            return _UNKNOWN  # to this client: the task is another client's
        if any(nonce in late_nonces for late_nonces in self._late_nonces_by_round):
            return "round closed"
        return "replayed nonce" if self._has_issued(nonce) else _UNKNOWN

    def _has_issued(self, nonce: str) -> bool:
        if not re.fullmatch("[0-9a-f]{48}", nonce):
            return False
        number = int(nonce[:16], 16)
        if not 0 < number <= self._issued:
            return False
        return hmac.compare_digest(nonce, nonce_of(number, self._secret))
