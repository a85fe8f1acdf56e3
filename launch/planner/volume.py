"""How much there is to train on: given, or measured on the rows when they are on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from .assumptions import Assumption

FILL = Assumption(
    "share of a pack's room that documents of different lengths fill",
    0.97,
    "measured here on best-fit packing: 0.97 to 0.997 of the demo's data; 0.94 where the mean is three quarters of a pack",
)


@dataclass
class Volume:
    """samples: documents. mean_tokens: of one. supervised: the share of the tokens that is trained on. runs: trained
    stretches of a document (assistant turns). spread: standard deviation of the lengths, in means."""

    samples: int
    mean_tokens: float
    supervised: float
    runs: float = 1.0
    spread: float = 0.5
    measured: bool = False

    @property
    def tokens(self) -> float:
        return self.samples * self.mean_tokens

    @property
    def typical_tokens(self) -> float:
        """The length of the document that a token of the data lies in, on average."""
        return self.mean_tokens * (1 + self.spread**2)

    def tokens_per_pack(self, pack_tokens: int) -> float:
        """Short documents fill the room that long ones leave; where all are of one length, nothing does."""
        full = FILL.value * pack_tokens if self.spread else pack_tokens // self.mean_tokens * self.mean_tokens
        return min(full or float(pack_tokens), self.tokens)

    def packs(self, pack_tokens: int) -> float:
        return max(1.0, self.tokens / self.tokens_per_pack(pack_tokens))
