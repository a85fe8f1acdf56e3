"""A plan for people: tables on a terminal, the same as Markdown in the docs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .plan import Plan

Row = tuple[str, ...]


def print_plan(plan: Plan, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for title, header, rows in tables(plan):
        table = Table(title=title, title_justify="left", show_header=any(header), box=None, pad_edge=False)
        for i, name in enumerate(header):
            numeric = all(row[i][:1].isdigit() or not row[i] for row in rows)
            table.add_column(name, justify="right" if i and numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print()
    for note in plan.notes:
        console.print(f"[yellow]note[/]: {escape(note)}")


def markdown(plan: Plan, command: str) -> str:
    """A page of the docs. command: what prints the same."""
    lines = [
        f"# Plan of `{plan.recipe}`",
        "",
        "Arithmetic, not a measurement. Printed by",
        "",
        "```sh",
        command,
        "```",
        "",
    ]
    for note in plan.notes:
        lines.append(f"* **{note}**")
    for title, header, rows in tables(plan):
        lines += ["", f"## {title}", "", _line(header), _line(["---"] * len(header)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(plan: Plan) -> list[tuple[str, Row, list[Row]]]:
    """(title, header, rows) of each table."""
    return [
        ("What it takes", ("", ""), _summary(plan)),
        ("What bounds it", ("station", "tokens/s", "of the bound"), _stations(plan)),
        ("Memory, GB", ("part", *(_ROLES[role] for role in plan.memory)), _memory(plan)),
        ("Assumptions", ("what", "value", "source"), _assumptions(plan)),
    ]


def _summary(plan: Plan) -> list[Row]:
    target, drafter, data, roles = plan.target, plan.drafter, plan.data, plan.roles
    hardware, best = plan.hardware, plan.balance["recommended"]
    vocabulary = f"{drafter['draft_vocabulary']:,} tokens"
    forward, put = plan.inference["seconds_per_pack"], plan.inference["put_seconds_per_pack"]
    share = put / (forward + put)
    putting = f", {share:.0%} of its time encoding and putting" if share > 0.005 else ""
    spread = f" of {roles['devices_per_producer']} devices" if roles["devices_per_producer"] > 1 else ""
    rows = [
        (
            "target",
            f"{target['name']}: {count(target['parameters'])} parameters, {count(target['active_parameters'])} active",
        ),
        (
            "drafter",
            f"{drafter['name']}: {count(drafter['parameters'])} trained, {drafter['steps']} drafts, {vocabulary}",
        ),
        (
            "data",
            f"{count(data['samples'])} documents of {data['mean_tokens']:,.0f} tokens"
            f" ({data['supervised_share']:.0%} trained on), {count(data['tokens'])} tokens × {data['epochs']} epochs;"
            f" {data['steps']:,} steps of {data['global_batch']} packs",
        ),
        ("machine", f"{hardware['nodes']} × {hardware['devices_per_node']} {hardware['name']} ({hardware['source']})"),
        ("roles", f"{roles['producers']} producers{spread}, {roles['ranks']} ranks, source={roles['source']}"),
        (
            "inference",
            f"{count(plan.inference['flops_per_token'])}FLOP a token,"
            f" {plan.inference['tokens_per_second_per_producer']:,.0f} tokens/s a producer{putting}",
        ),
        (
            "training",
            f"{count(plan.training['flops_per_token'])}FLOP a token,"
            f" {plan.training['attention_share']:.0%} of it attention in float32;"
            f" {plan.training['tokens_per_second_per_rank']:,.0f} tokens/s a rank",
        ),
        (
            "features",
            f"{plan.features['bytes_per_token'] / 1e3:,.1f} kB a token, {size(plan.features['bytes_per_pack'])} a pack,"
            f" {size(plan.features['bytes_per_epoch'])} an epoch",
        ),
    ]
    if plan.window:
        links, window = plan.links, plan.window
        rows += [
            (
                "stream",
                f"{size(links['stream'])}/s; out of each inference node {size(links['out_of_each_inference_node'])}/s,"
                f" into each trainer node {size(links['into_each_trainer_node'])}/s;"
                f" {plan.ledger['requests_per_second']:,.0f} requests/s to the ledger",
            ),
            (
                "window",
                f"{window['packs']:,.0f} packs, {size(window['bytes'])}; {window['needed_packs']:,} are under way",
            ),
        ]
    cost = f", {plan.cost:,.0f} at {hardware['price_per_hour']:g} an hour" if plan.cost is not None else ""
    phases = "; ".join(f"{p['name']} {duration(p['seconds'])} ({p['bottleneck']})" for p in plan.phases)
    rows += [
        ("speed", f"{plan.tokens_per_second:,.0f} tokens/s, bounded by: {plan.bottleneck}"),
        ("time", f"{duration(plan.seconds)}: {phases}"),
        ("price", f"{plan.device_hours:,.1f} device-hours{cost}"),
        ("balance", f"{plan.balance['ranks_per_producer']:.2f} ranks a producer"),
    ]
    if best is None:
        rows.append(("recommended", "no split of these devices holds the run"))
    else:
        rows.append(
            (
                "recommended",
                f"with {hardware['nodes'] * hardware['devices_per_node']} devices: {best['producers']} producers,"
                f" {best['ranks']} ranks: {best['tokens_per_second']:,.0f} tokens/s, {duration(best['seconds'])}",
            )
        )
    return rows


def _stations(plan: Plan) -> list[Row]:
    least = min(plan.limits.values())
    ordered = sorted(plan.limits.items(), key=lambda item: item[1])
    return [(name, f"{rate:,.0f}", f"{rate / least:.2f} ×") for name, rate in ordered]


_ROLES = {"rank": "a rank", "rank_host": "its host", "producer": "a device of a producer", "producer_host": "its host"}


def _memory(plan: Plan) -> list[Row]:
    """A row for each part, a column for each role."""
    parts = list(dict.fromkeys(name for found in plan.memory.values() for name in found))
    shown = [n for n in parts if any(found.get(n, 0) >= 5e6 for found in plan.memory.values())]
    rows = [(name, *(_gb(found.get(name)) for found in plan.memory.values())) for name in shown]
    return [*rows, ("in all", *(_gb(sum(found.values())) for found in plan.memory.values()))]


def _gb(value: float | None) -> str:
    return "" if not value else f"{value / 1e9:,.2f}"


def _assumptions(plan: Plan) -> list[Row]:
    return [(a["name"], f"{a['value']:g}", a["source"]) for a in plan.assumptions]


def count(value: float) -> str:
    """1234567 → 1.23 M"""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} "


def size(value: float) -> str:
    return f"{count(value)}B"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
