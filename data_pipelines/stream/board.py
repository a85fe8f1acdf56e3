"""What the ledger keeps only to show it: how the ranks stand, the curve of the loss, rates, the last errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .messages import Report, Row

_RATE_SECONDS = 30.0
_MAX_ROWS = 1000
_MAX_MESSAGE = 500


class Board:
    """`clock` gives seconds that never go back. Everything is bounded."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._ranks: dict[int, tuple[float, Report]] = {}
        self._rows: dict[int, Row] = {}  # step → the row that was reported last
        self._consumed: deque[tuple[float, int, int]] = deque()  # time, bytes, tokens
        self._errors: deque[tuple[float, str, str]] = deque(maxlen=20)

    def report(self, report: Report) -> None:
        self._ranks[report.rank] = self._clock(), report
        for row in report.rows:
            self._rows[row.step] = row
        while len(self._rows) > _MAX_ROWS:
            *others, last = sorted(self._rows)
            self._rows = {step: self._rows[step] for step in [*others[::2], last]}

    def begin(self, session: str) -> None:
        """A new session of the trainer, perhaps from an older checkpoint: rank 0 reports its rows again."""
        self._ranks = {rank: kept for rank, kept in self._ranks.items() if kept[1].session == session}
        self._rows.clear()

    def consumed(self, bytes: int, tokens: int) -> None:
        self._consumed.append((self._clock(), bytes, tokens))
        self._trim()

    def error(self, who: str, message: str) -> None:
        self._errors.append((self._clock(), who, message[:_MAX_MESSAGE]))

    def rates(self) -> dict[str, float]:
        """Of what was consumed in the last 30 seconds."""
        self._trim()
        return {
            "packs_per_second": len(self._consumed) / _RATE_SECONDS,
            "bytes_per_second": sum(size for _, size, _ in self._consumed) / _RATE_SECONDS,
            "tokens_per_second": sum(tokens for _, _, tokens in self._consumed) / _RATE_SECONDS,
        }

    def ranks(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            {**report.model_dump(exclude={"rows", "session"}), "seen": now - seen}
            for _, (seen, report) in sorted(self._ranks.items())
        ]

    def curve(self) -> list[dict[str, Any]]:
        return [
            {
                "step": row.step,
                "loss": row.loss,
                "expected_length": row.expected_length,
                "wait_fraction": _ratio(row.wait_seconds, row.seconds),
                "tokens_per_second": _ratio(row.tokens, row.seconds),
            }
            for _, row in sorted(self._rows.items())
        ]

    def errors(self) -> list[dict[str, Any]]:
        """Oldest first; `ago` in seconds."""
        now = self._clock()
        return [{"ago": now - moment, "who": who, "message": message} for moment, who, message in self._errors]

    def _trim(self) -> None:
        while self._consumed and self._consumed[0][0] < self._clock() - _RATE_SECONDS:
            self._consumed.popleft()


def _ratio(part: float | None, whole: float | None) -> float | None:
    if part is None or not whole:
        return None
    ratio = part / whole
    return ratio if abs(ratio) < float("inf") else None
