"""Everything before the drafter, in the order in which data flows: conversations → packs → target features → stream."""

__version__ = "0.1.0"
