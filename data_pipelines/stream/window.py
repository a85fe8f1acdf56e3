"""The ledger's window in bytes: what is, or soon may be, in the store."""

from __future__ import annotations

from collections.abc import Iterable

_SHARE_OF_STORE = 0.9  # of what producers lend: objects of different sizes leave gaps


class Window:
    """`used`: bytes of the objects that are under way or stored, and will be read.

    Garbage: objects that nobody will read, until their producer has said that they are gone, or is gone itself.
    limit_bytes: 0 for nine tenths of what the producers lend to the store, without limit if they lend nothing.
    """

    def __init__(self, limit_bytes: int):
        self.used = 0
        self._limit = limit_bytes
        self._garbage: dict[str, dict[str, int]] = {}  # producer → key → bytes
        self._untidy: set[str] = set()  # producers with garbage that they have not been told of

    @property
    def garbage(self) -> int:
        return sum(sum(sizes.values()) for sizes in self._garbage.values())

    def limit(self, lent: int) -> int:
        """In bytes, 0 for none. lent: by all producers together."""
        return self._limit or int(_SHARE_OF_STORE * lent)

    def throw_away(self, producer: str, key: str, size: int) -> None:
        self._garbage.setdefault(producer, {})[key] = size
        self._untidy.add(producer)

    def untidy(self, producer: str) -> bool:
        return producer in self._untidy

    def tidy(self, producer: str, held: Iterable[str]) -> None:
        """held: keys of all objects that the producer may still have. Other garbage of it is gone."""
        left = {key: size for key, size in self._garbage.pop(producer, {}).items() if key in held}
        if left:
            self._garbage[producer] = left
        self._untidy.discard(producer)

    def forget(self, producer: str) -> None:
        """The store has dropped what this producer held."""
        self._garbage.pop(producer, None)
        self._untidy.discard(producer)
