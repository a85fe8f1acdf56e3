"""How much there is to train on: given, or measured on the rows when they are on this machine."""

from __future__ import annotations

from dataclasses import dataclass

# Documents of which two fit into a pack leave a little of it empty. Measured here on best-fit packing: 0.3 to 3 % of a pack
# (`padding_share` of the demo's data, 1,000 rows, packs of 512).
FILL = 0.97


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
        """Documents fill a pack where two or more fit into it; longer ones are alone in theirs."""
        if self.mean_tokens > pack_tokens / 2:
            return min(self.mean_tokens, float(pack_tokens))
        return min(FILL * pack_tokens, self.tokens)

    def packs(self, pack_tokens: int) -> float:
        return max(1.0, self.tokens / self.tokens_per_pack(pack_tokens))
