"""The report of a run: summary.json for programs, report.html for people (one file that needs nothing else)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from omegaconf import OmegaConf
from rich.table import Table

from data_pipelines.files import write_text_atomically
from data_pipelines.run_folder import RunFolder
from trainer.config import RunConfig
from trainer.tracking import read_metrics

ALL = "all"  # the row over all domains
UNMOVED = 0.01  # acceptance lengths that differ by less are the same


def write_report(summary: dict[str, Any], config: RunConfig, data: dict[str, Any], run_dir: Path) -> None:
    """summary.json and report.html. data: the counts of the preparation and, if made, the `agreement` of a sample."""
    write_text_atomically(RunFolder(run_dir).summary, json.dumps(summary, indent=2) + "\n")
    page = resources.files("launch.stages").joinpath("report.html.j2").read_text()
    template = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(page)
    html = template.render(
        title=_title(summary),
        lead=f"{_lead(summary)[0].upper()}{_lead(summary)[1:]}.",
        facts=_facts(summary),
        warnings=warnings(summary),
        acceptance=_acceptance(summary["acceptance"]),
        draft_tokens=config.evaluate.draft_tokens,
        lossless=summary["lossless"],
        not_judged=summary["not_judged"],
        curves=draw_curves(read_metrics(run_dir)),
        data=_data(data),
        expectations=expectations(data["counts"]["documents"], config.data.regenerate.mode),
        configuration=OmegaConf.to_yaml(OmegaConf.structured(config)),
    )
    write_text_atomically(RunFolder(run_dir).report, html)


def table(summary: dict[str, Any]) -> Table:
    """The small table at the end of a run."""
    title = f"{_title(summary)}: {_lead(summary)}"
    rows = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in _facts(summary):
        rows.add_row(name, value)
    accepted = _acceptance(summary["acceptance"])["rows"]
    for row in sorted(accepted, key=lambda row: row["domain"] != ALL):  # the whole first, then its parts
        rows.add_row(
            "acceptance" if row["domain"] == ALL else f"  {row['domain']}", f"{row['before']} → {row['after']}"
        )
    if summary["not_judged"]:
        rows.add_row("acceptance", f"not judged: {summary['not_judged']}")
    if summary["lossless"] is not None:
        rows.add_row("lossless", "yes" if summary["lossless"] else "NO: a text differs from the target's own")
    return rows


def warnings(summary: dict[str, Any]) -> list[str]:
    """What a person should know of a training that did nothing, or next to nothing."""
    said, share = [], summary["trained_share"]
    if not share:
        said.append("no draft was trained: not one that counts lies in the draft vocabulary (drafter.draft_vocab_size)")
    elif share < 0.5:
        said.append(f"only {share:.0%} of the drafts that count were trained: the draft vocabulary lacks the others")
    before, after = (summary["acceptance"][when].get(ALL) for when in ("before", "after"))
    if before and after and abs(after["acceptance_length"] - before["acceptance_length"]) < UNMOVED:
        said.append(
            f"acceptance did not move: {before['acceptance_length']:.2f} before, {after['acceptance_length']:.2f} after."
            " Nothing that decoding shows was learnt: look at loss and trained_share in metrics.jsonl, at optim.lr, and at"
            " how many tokens were trained on"
        )
    return said


def draw_curves(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """Inline SVGs over the steps: loss, estimated acceptance length, share of time spent waiting for features."""
    wanted = [
        ("loss", "loss"),
        ("expected_length", "acceptance length, expected from training"),
        ("wait_fraction", "share of time waiting for features"),
    ]
    rows = [{**row, "wait_fraction": row["wait_seconds"] / row["seconds"]} for row in metrics]
    if len(rows) < 2:
        return []
    series = [(key, title, [(r["step"], r[key]) for r in rows if r[key] is not None]) for key, title in wanted]
    return [_curve(title, points, from_zero=key == "wait_fraction") for key, title, points in series if points]


def _curve(title: str, points: list[tuple[int, float]], *, from_zero: bool) -> str:
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(4.2, 2.6), layout="constrained")
    axes = figure.add_subplot()
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, linewidth=0.6 if len(points) > 60 else 1.4, color="#8fb3e0")
    axes.plot(steps, _smooth(values, max(1, len(points) // 25)), linewidth=1.6, color="#1f5fae")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if from_zero:
        axes.set_ylim(0, max(0.05, *values) * 1.05)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean over the last `window` values."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(values))]


def expectations(documents: int, regenerate: str) -> list[str]:
    """What a drafter trained on this much, and on whose answers, can be expected to do."""
    if documents < 10_000:
        amount = (
            f"{documents:,} conversations show that everything works; they do not make a drafter to serve with. It has"
            " learnt the habits of these prompts, and other prompts will be accepted less. Tens of thousands of varied"
            " conversations are where a drafter begins to be useful, hundreds of thousands are usual."
        )
    elif documents < 100_000:
        amount = (
            f"{documents:,} conversations make a useful first drafter on prompts of their kind. Published ones are"
            " trained on several times as many; acceptance keeps growing with varied data."
        )
    else:
        amount = f"{documents:,} conversations are as many as published drafters are trained on."
    if regenerate == "never":
        whose = (
            "The answers are the data's own, not the target's. Where the target would have said something else, the"
            " drafter learns what it will never be asked for: data.regenerate.mode=always has the target answer first,"
            " and usually brings about a tenth more acceptance length and much better first drafts."
        )
    else:
        whose = "The answers are the target's own, which is what a drafter is asked to foresee."
    compare = (
        "Compare acceptance lengths only between runs with the same number of drafts, chain with chain, on the same"
        " domain: arithmetic and code are accepted far more easily than free conversation."
    )
    return [amount, whose, compare]


def _title(summary: dict[str, Any]) -> str:
    return f"{summary['drafter']} drafter for {summary['target']}"


def _lead(summary: dict[str, Any]) -> str:
    lead = f"{summary['steps']:,} steps on {summary['tokens']:,} tokens in {_duration(summary['seconds'])}"
    before, after = (summary["acceptance"][when].get(ALL) for when in ("before", "after"))
    if not after:
        return lead
    first = f"{before['acceptance_length']:.2f} → " if before else ""
    return f"acceptance length {first}{after['acceptance_length']:.2f} after {lead}"


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    processes = f"{summary['world_size']} trainer ranks"
    if summary["producers"]:
        processes += f", {summary['producers']} producers"
    facts = [
        ("recipe", summary["recipe"]),
        ("processes", processes),
        ("trained on", f"{summary['packs']:,} packs, {summary['tokens']:,} tokens"),
        ("speed", f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['wait_fraction']:.0%} of it waiting"),
        ("loss", _loss(summary)),
        ("weights", f"sha256 {summary['weights_sha256'][:16]}…"),
    ]
    return [*facts, ("export", str(summary["export"]))] if summary["export"] else facts


def _loss(summary: dict[str, Any]) -> str:
    first, last, share = *(summary["loss"][when] for when in ("first", "last")), summary["trained_share"]
    if first is None:
        return "none: nothing was trained"
    part = f", of {share:.1%} of the drafts that count" if share < 0.9995 else ""
    return f"{first:.3f} → {last:.3f}{part}"


def _acceptance(acceptance: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    before, after = acceptance["before"], acceptance["after"]
    domains = sorted(after, key=lambda d: (d == ALL, d))
    rows, positions = [], []
    for domain in domains:
        new, old = after[domain], before.get(domain)
        rows.append(
            {
                "domain": domain,
                "before": f"{old['acceptance_length']:.2f}" if old else "–",
                "after": f"{new['acceptance_length']:.2f}",
                "rounds": f"{new['rounds']:,}",
                "tokens": f"{new['tokens']:,}",
            }
        )
        for kind in ("prefix", "conditional"):
            rates = [f"{rate:.0%}" if rate is not None else "–" for rate in new[f"{kind}_rate"]]
            positions.append({"domain": domain, "kind": kind, "rates": rates})
    return {"rows": rows, "positions": positions}


def _data(data: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name.replace("_", " "), _number(value)) for name, value in data["counts"].items()]
    if agreement := data.get("agreement"):
        rows.append(("answers generated again", f"{agreement['same']} of {agreement['of']} the same, token for token"))
    return rows


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_number(count)}" for name, count in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
