"""`draftsmith judge`, and the table that it and `draftsmith evaluate` end with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from data_pipelines.errors import UserError
from data_pipelines.plugins import load_plugins

from ..stages.results import domains


def command(arguments: argparse.Namespace) -> None:
    from data_pipelines.engines import resolve_target
    from data_pipelines.engines.targets import TargetConfig
    from trainer.decoding.config import EvaluateConfig
    from trainer.decoding.judge import judge_saved

    given = ("prompts", "max_prompts", "max_new_tokens", "batch_size")
    asked = {key: getattr(arguments, key) for key in given if getattr(arguments, key) is not None}
    for key in ("max_prompts", "max_new_tokens", "batch_size", "draft_tokens"):
        value = getattr(arguments, key)
        if value is not None and value < 1:
            raise UserError(f"--{key.replace('_', '-')} {value}; it must be at least 1")
    prompts = arguments.prompts
    if prompts and not prompts.startswith(("builtin:", "hf:")) and not Path(prompts).exists():
        raise UserError(f"--prompts {prompts} does not exist", fix="name a .jsonl file of rows with `messages`")
    load_plugins(arguments.plugins)
    target = resolve_target(TargetConfig.named(arguments.target))
    judged = judge_saved(target, arguments.draft, EvaluateConfig(**asked), arguments.seed, arguments.draft_tokens)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(judged, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(judged, indent=2))
        return
    print(f"{judged['drafter']} drafter {judged['draft']} for {judged['target']}")
    print("\n".join(table(judged)))


def table(judged: dict[str, Any]) -> list[str]:
    """Lines: acceptance per domain and over all, the shares of rounds whose first k drafts were all accepted, lossless."""
    numbers = range(1, judged["draft_tokens"] + 1)
    lines = [
        f"{'domain':<16} {'acceptance':>10} {'rounds':>8}  "
        + "".join(f"{f'1…{k}' if k > 1 else '1':>6}" for k in numbers)
    ]
    for name, found in domains(judged).items():
        rates = "".join(f"{'–' if rate is None else f'{rate:.0%}':>6}" for rate in found["prefix_rate"])
        lines.append(f"{name:<16} {found['acceptance_length']:>10.3f} {found['rounds']:>8,}  {rates}")
    lines.append(
        "acceptance: tokens a forward of the target, bonus included; 1…k: rounds in which drafts 1 to k were accepted"
    )
    if judged["skipped"]:
        first = judged["skipped"][0]
        lines.append(f"{len(judged['skipped'])} prompts were skipped; the first, {first['id']}: {first['reason']}")
    differ = len(judged["mismatches"])
    lines.append(f"lossless: {'yes' if judged['lossless'] else f'NO, {differ} texts differ from plain decoding'}")
    return lines
