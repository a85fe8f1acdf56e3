"""Stores: where the features of a pack are between the producer that computed them and the rank that trains on them.

All stores keep byte strings under keys. A key names one object for ever: it is made of a pack id and a lease id and is
never used twice, because Mooncake ignores a put on an existing key (it reports success and keeps the old bytes).
Exactly one consumer owns an object; it removes it after its own get has returned.
"""

from __future__ import annotations

from typing import Literal

from .config import StoreConfig
from .store import STORES, Full, Missing, Store, StoreError

__all__ = ["STORES", "Full", "Missing", "Store", "StoreConfig", "StoreError", "build_store"]


def build_store(config: StoreConfig, *, role: Literal["producer", "consumer"]) -> Store:
    """The store that `config` names. A producer lends memory to the pool (Mooncake), a consumer does not.

    Raises UserError when the store cannot be reached or its libraries are missing.
    """
    return STORES.choose(config.name)(config, role)
