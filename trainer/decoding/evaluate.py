"""A drafter is judged by decoding with it: greedy chains on held-out prompts, against plain decoding by the target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from data_pipelines.conversations.quarantine import Unrenderable
from data_pipelines.conversations.rendering import prompt_ids, stop_ids
from data_pipelines.conversations.rows import Row, conversation
from data_pipelines.errors import UserError

from ..drafters.base import Drafter
from ..target import FrozenTarget
from .chain import Decoded, context_limit, decode_chain, decode_plain
from .config import EvaluateConfig
from .judges import BATCHED, find_way
from .statistics import acceptance, first_difference


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: tokens up to and including the header of the answer."""

    id: str
    domain: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """Plain greedy decoding of the prompts: texts in their order, and how long it took."""

    seconds: float
    texts: list[Decoded]


def evaluate(
    model: nn.Module,
    tokenizer,
    drafter: Drafter,
    frozen: FrozenTarget,
    rows: Sequence[Row],
    cfg: EvaluateConfig,
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Decode every prompt with the drafter and compare with plain decoding. Deterministic but for the seconds.

    rows: with `messages` and, optionally, `id` and `domain`; what follows the last user turn is ignored.
    reference: plain decoding of the same prompts, if it has been done already (`decode_reference`).

    Returns a JSON-serialisable dict: `overall` and `domains` (of each: see `statistics.acceptance`), `lossless` (every
    text token-identical to plain decoding), `mismatches`, `skipped` (prompts that could not be decoded, with the
    reason), `seconds` and `speedup` (wall clock, plain over speculative, batched alike; None for a target whose state is
    replayed, since that time is the judge's own), `dtype`, `way` (how the target was decoded, see `judges.WAYS`) and the
    settings. Raises NotJudged for a target that no judge can decode.
    """
    way = find_way(model)
    prompts, skipped = render_prompts(rows, tokenizer, context_limit(model))
    eos_ids = stop_ids(tokenizer, model.generation_config)
    if reference is None:
        reference = decode_reference(model, prompts, cfg, eos_ids)
    texts, seconds = decode_speculatively(model, drafter, frozen, prompts, cfg, cfg.draft_tokens, eos_ids)
    mismatches = [
        {"id": prompt.id, "domain": prompt.domain, **difference}
        for prompt, expected, got in zip(prompts, reference.texts, texts)
        if (difference := first_difference(expected, got))
    ]
    domains: dict[str, list[Decoded]] = {}
    for prompt, text in zip(prompts, texts):
        domains.setdefault(prompt.domain, []).append(text)
    return {
        "method": "greedy chain",
        "dtype": str(model.dtype).removeprefix("torch."),
        "way": way,
        **{key: getattr(cfg, key) for key in ("prompts", "draft_tokens", "max_new_tokens", "batch_size")},
        "overall": acceptance(texts, cfg.draft_tokens),
        "domains": {name: acceptance(domains[name], cfg.draft_tokens) for name in sorted(domains)},
        "lossless": not mismatches,
        "mismatches": mismatches,
        "skipped": skipped,
        "seconds": {"plain": reference.seconds, "speculative": seconds},
        "speedup": reference.seconds / seconds if seconds and way == BATCHED else None,
    }


def render_prompts(
    rows: Sequence[Row], tokenizer, max_context: int | None
) -> tuple[list[Prompt], list[dict[str, str]]]:
    """Rows → prompts, and what could not be rendered or leaves no room for an answer: {"id", "reason"}.

    Raises UserError if nothing is left.
    """
    prompts, skipped = [], []
    for row in rows:
        data = row.data if isinstance(row.data, dict) else {}
        name = str(data.get("id", row.origin))
        try:
            asked = conversation(row, answered=False)
            messages = asked.messages
            last = max(i for i, message in enumerate(messages) if message["role"] == "user")
            tokens = prompt_ids(tokenizer, messages[: last + 1], asked.tools)
        except Unrenderable as error:
            skipped.append({"id": name, "reason": str(error)})
            continue
        if max_context and len(tokens) >= max_context:
            skipped.append({"id": name, "reason": f"{len(tokens)} tokens; the target's context is {max_context}"})
            continue
        prompts.append(Prompt(name, str(data.get("domain", "other")), tuple(tokens)))
    if not prompts:
        reason = f"the first was skipped: {skipped[0]['reason']}" if skipped else "there is no row"
        raise UserError(f"no prompt to evaluate on; {reason}", fix="look at evaluate.prompts")
    return prompts, skipped


def decode_reference(model: nn.Module, prompts: Sequence[Prompt], cfg: EvaluateConfig, eos_ids: list[int]) -> Reference:
    """Plain greedy decoding of the prompts, batched as the speculative decoding will be."""

    def plain(batch: list[list[int]]) -> list[Decoded]:
        return decode_plain(model, batch, max_new_tokens=cfg.max_new_tokens, eos_ids=eos_ids)

    texts, seconds = _decode_all(prompts, cfg.batch_size, plain, "plain decoding")
    return Reference(seconds, texts)


def decode_speculatively(
    model: nn.Module,
    drafter: Drafter,
    frozen: FrozenTarget,
    prompts: Sequence[Prompt],
    cfg: EvaluateConfig,
    draft_tokens: int,
    eos_ids: list[int],
) -> tuple[list[Decoded], float]:
    """Every prompt with `draft_tokens` drafts a round; texts in the prompts' order, wall seconds."""

    def speculate(batch: list[list[int]]) -> list[Decoded]:
        limits = {"draft_tokens": draft_tokens, "max_new_tokens": cfg.max_new_tokens, "eos_ids": eos_ids}
        return decode_chain(model, batch, drafter, frozen, **limits)

    return _decode_all(prompts, cfg.batch_size, speculate, "speculative decoding")


def _decode_all(
    prompts: Sequence[Prompt], batch_size: int, decode: Callable[[list[list[int]]], list[Decoded]], name: str
) -> tuple[list[Decoded], float]:
    """Batches of prompts of similar lengths, decoded one after another; texts in the prompts' order, wall seconds."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    texts: list[Decoded] = [Decoded()] * len(prompts)
    start = time.perf_counter()
    with tqdm(total=len(prompts), desc=name, unit="prompt", dynamic_ncols=True, leave=False, disable=None) as bar:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            for i, text in zip(batch, decode([list(prompts[i].tokens) for i in batch])):
                texts[i] = text
            bar.update(len(batch))
    return texts, time.perf_counter() - start
