"""`draftsmith run <recipe> --plan`: what would run, without running it."""

from __future__ import annotations

import shlex
from pathlib import Path

from omegaconf import OmegaConf

from trainer.config import RunConfig

from ..placement import LocalPlacement
from ..supervision import roles
from ..supervision.processes import Role
from ..supervision.screen import Screen


def show_plan(config: RunConfig, screen: Screen) -> None:
    """Prints the resolved configuration, the processes with their commands, and the stages."""
    run_dir = Path(config.run_dir)
    screen.line(OmegaConf.to_yaml(OmegaConf.structured(config)).rstrip())
    if config.cluster.launcher == "slurm":
        screen.line("\ndraftsmith slurm … --dry-run shows the job that runs these, ranks and producers on their nodes")
    screen.line(f"\nprocesses, with logs in {run_dir / 'logs'}:")
    for role in planned_roles(config, run_dir):
        environment = "".join(f"{key}={value} " for key, value in role.env.items())
        screen.line(f"  {role.name:<12} {environment}{shlex.join(role.command)}")
    screen.line("\nstages:")
    for name, text in stages(config):
        screen.line(f"  {name:<12} {text}")


def planned_roles(config: RunConfig, run_dir: Path) -> list[Role]:
    """The roles with the ports that the configuration fixes; others are chosen when the run starts."""
    cluster = config.cluster
    placement = LocalPlacement(cluster, cluster.host)
    given = {"ledger": cluster.ledger_port, "store": cluster.store_port, "metrics": cluster.metrics_port}
    ports = {name: port or "ANY_FREE_PORT" for name, port in given.items()}
    connected = roles.connect(config, run_dir, ports)
    planned = []
    if config.has_store:
        planned.append(roles.master(config, ports))
    if config.source.streams:
        planned += [roles.ledger(run_dir), *roles.producers(connected, placement)]
    if config.source.name == "offline":
        planned += roles.captures(config, run_dir, placement)
    return [*planned, roles.trainer(config, run_dir, placement, ports)]


def stages(config: RunConfig) -> list[tuple[str, str]]:
    """(name, what it does) of each stage, in order."""
    asked = {
        "never": "as they are",
        "always": "answered by the target first",
        "sample": f"as they are; {config.data.regenerate.sample} answers generated again to show that they agree",
    }
    steps = f", at most {config.max_steps} steps" if config.max_steps else ""
    planned = [
        ("check", "folder, disk, ports, store"),
        ("target", config.target.path or config.target.kind),
        (
            "data",
            f"{config.data.path}, {asked[config.data.regenerate.mode]}; packs of {config.data.pack_tokens} tokens",
        ),
        ("train", f"{config.drafter.name}, {config.epochs} epochs of steps of {config.global_batch} packs{steps}"),
        ("export", f"{config.export.name}, to {Path(config.run_dir) / 'export'}"),
        ("report", "report.html and summary.json"),
    ]
    if config.evaluate.enabled:
        asked_for = config.evaluate
        judged = f"{asked_for.max_prompts} prompts of {asked_for.prompts}, {asked_for.draft_tokens} drafts a round"
        if asked_for.before:
            planned.insert(3, ("before", f"the untrained drafter on {judged}"))
        planned.insert(2, ("judge", f"where the target fits for judging, evaluate.dtype={asked_for.dtype}"))
        planned.insert(-1, ("after", f"the trained drafter on {judged}"))
    return planned
