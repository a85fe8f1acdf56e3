"""`python -m tests.benchmarks.scale` (make scale): one run in every parallel mode, on 1, 2 and 4 ranks.

The trainer's own entry point on the tiny recipe, in processes that are forked from one that has imported everything (a
torchrun of its own for each would be minutes of imports). Shown: the same losses and weights; every checkpoint is loaded in
every mode and size, weights and moments bit for bit; a run that changes mode and size at every step; what a rank holds, and
how much memory it takes. Prints tables; exit status 1 when something does not hold.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trainer.train
from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from tests.trainer.parallel.ranks import forked, on_ranks
from tests.trainer.parallel.runs import held, whole
from trainer.batch import Batch
from trainer.checkpoint import find_checkpoint, load_checkpoint, load_weights
from trainer.config import load_config
from trainer.drafters import build_drafter
from trainer.drafters.eagle3 import Eagle3Config
from trainer.loop import PREEMPTED, Trainer
from trainer.optim import OptimConfig
from trainer.parallel import World, parallelize
from trainer.result import weights_sha256
from trainer.setup import RunSetup, prepare_run
from trainer.target import FrozenTarget

from .processes import markdown

STEPS = 6
OVERRIDES = [
    "source=colocated", "data.max_rows=60", "data.regenerate.max_new_tokens=40", "epochs=2", "global_batch=8",
    f"max_steps={STEPS}", "checkpoint.every=0", "checkpoint.keep=9", "parallel.compute_dtype=float32",
]  # fmt: skip
MODES = {
    "fsdp2": ["parallel=fsdp2"],
    "hsdp": ["parallel=hsdp", "parallel.replicas=2"],
    "ddp": ["parallel=ddp"],
    "zero1": ["parallel=deepspeed", "parallel.zero_stage=1"],
    "zero2": ["parallel=deepspeed", "parallel.zero_stage=2"],
    "zero3": ["parallel=deepspeed", "parallel.zero_stage=3"],
}
WAYS = [(m, n) for m in ("fsdp2", "hsdp", "ddp", "zero1", "zero2") for n in (1, 2, 4) if (m, n) != ("hsdp", 1)]
OTHERS = {
    "ci_dflash": [("fsdp2", 1), ("fsdp2", 2), ("hsdp", 4), ("ddp", 2), ("zero2", 2), ("zero3", 2), ("zero3", 4)],
    "ci_mtp": [("fsdp2", 1), ("fsdp2", 2), ("hsdp", 4), ("ddp", 2), ("zero2", 2)],
}
SAME = [[("fsdp2", 1), ("ddp", 1)], [("ddp", 2), ("hsdp", 2)]]  # to the bit
CHANGES = [("zero1", 4), ("ddp", 1), ("fsdp2", 4), ("zero2", 2), ("hsdp", 4), ("fsdp2", 2)]
# Rounding of float32, which AdamW raises where a gradient is small: relative for losses, of the largest weight for weights.
LOSS, WEIGHT = 1e-6, 1e-4
WIDTH, TAPS = 1024, (2, 4, 5)  # of the target whose drafter is weighed


class Verdict:
    """What did not hold."""

    def __init__(self):
        self.failed: list[str] = []

    def check(self, holds: bool, what: str) -> str:
        if not holds:
            self.failed.append(what)
        return "yes" if holds else "**no**"


def main() -> int:
    began, verdict = time.monotonic(), Verdict()
    # What is freed goes back to the system at once (glibc reads it when the first rank starts): memory is looked at.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-scale-"))
    same_run("ci_eagle3", WAYS, folder, verdict)
    resumed(folder / "ci_eagle3", verdict)
    changing(folder / "ci_eagle3", verdict)
    for recipe, ways in OTHERS.items():
        same_run(recipe, ways, folder, verdict)
    memory(verdict)
    print(f"\n{time.monotonic() - began:.0f} s; runs in {folder}")
    for what in verdict.failed:
        print(f"does not hold: {what}")
    print(f"scale_holds={'no' if verdict.failed else 'yes'}")
    return bool(verdict.failed)


def train(recipe: str, run_dir: Path, mode: str, size: int, *, one_step: bool = False) -> dict:
    """From where its checkpoints end to the end of the run, or one step. Returns training.json."""
    status = forked(size, one_rank, recipe, str(run_dir), MODES[mode], one_step)
    done = (run_dir / "training.json").exists()
    if set(status) != {0 if done else PREEMPTED}:
        raise SystemExit(f"{recipe}, {mode} on {size} ranks, ended with {status}")
    return json.loads((run_dir / "training.json").read_text()) if done else {}


def one_rank(recipe: str, run_dir: str, mode: list[str], one_step: bool) -> int:
    run = Trainer.run

    def stopped_at_once(self, packs, start):
        self.request_stop()  # the step that has begun is done, and in a checkpoint
        return run(self, packs, start)

    if one_step:
        Trainer.run = stopped_at_once
    overrides = [f"run_dir={run_dir}", f"cluster.ranks={os.environ['WORLD_SIZE']}", *OVERRIDES, *mode]
    return trainer.train.main(["--config-name", recipe, *overrides])


def losses(run_dir: Path) -> np.ndarray:
    return np.array([json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()])


def final_weights(recipe: str, run_dir: Path) -> dict[str, torch.Tensor]:
    setup = prepare(recipe, run_dir)
    drafter = setup.build_drafter(FrozenTarget.load(setup.target, torch.float32))
    load_weights(find_checkpoint(run_dir), drafter)
    return {name: tensor for name, tensor in drafter.state_dict().items() if tensor.is_floating_point()}


def prepare(recipe: str, run_dir: Path) -> RunSetup:
    return prepare_run(load_config(recipe, [f"run_dir={run_dir}", *OVERRIDES]))


def furthest(run_dir: Path, other: Path, recipe: str) -> tuple[float, float]:
    """How far the losses (relative) and the weights (of the largest in their tensor) of two runs are apart."""
    one, two = losses(run_dir), losses(other)
    mine, theirs = final_weights(recipe, run_dir), final_weights(recipe, other)
    apart = max(((mine[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)
    return float(np.abs(one / two - 1).max()), apart


def same_run(recipe: str, ways: list[tuple[str, int]], folder: Path, verdict: Verdict) -> None:
    rows: list[list] = []
    bits: dict[str, str] = {}
    for mode, size in ways:
        run_dir, began = folder / recipe / f"{mode}-{size}", time.monotonic()
        done = train(recipe, run_dir, mode, size)
        loss, weight = furthest(run_dir, folder / recipe / "fsdp2-1", recipe)
        letter = bits.setdefault(done["weights_sha256"], chr(ord("A") + len(bits)))
        holds = verdict.check(loss <= LOSS and weight <= WEIGHT, f"{recipe}: {mode} on {size} gives the same run")
        seconds = time.monotonic() - began
        rows.append(
            [mode, size, f"{done['loss']['last']:.6f}", f"{loss:.0e}", f"{weight:.0e}", letter, holds, f"{seconds:.0f}"]
        )
        print(*rows[-1], flush=True, file=sys.stderr)
    print(f"\n{recipe}: {STEPS} steps, against fsdp2 on 1 rank (same letter: the same bits)\n")
    print(
        markdown(["mode", "ranks", "last loss", "losses apart", "weights apart", "bits", "holds", "s"], rows),
        flush=True,
    )
    for group in SAME:
        letters = {row[5] for row in rows if tuple(row[:2]) in group}
        verdict.check(len(letters) == 1, f"{recipe}: the same bits from those of {group} that were run")


def resumed(folder: Path, verdict: Verdict) -> None:
    """Every checkpoint into every mode and size."""
    origins, everyones = [f"{mode}-{size}" for mode, size in WAYS], {}
    for mode, size in WAYS:
        everyones[f"{mode}-{size}"] = on_ranks(size, loaded, str(folder), mode, origins)[0]
    first = everyones["fsdp2-1"]
    agree = sum(found[o] == first[o] for found in everyones.values() for o in origins)
    for origin in origins:
        weights = json.loads((folder / origin / "training.json").read_text())["weights_sha256"]
        verdict.check(first[origin][0] == weights, f"the weights of {origin} are those that were trained")
    verdict.check(agree == len(origins) ** 2, "weights and moments of every checkpoint in every mode and size")
    print(
        f"\nLoaded bit for bit, weights and moments: {agree} of {len(origins) ** 2} pairs of (mode, ranks)", flush=True
    )


def loaded(world: World, folder: str, mode: str, origins: list[str]) -> dict[str, tuple[str, str]]:
    """Of each checkpoint the hashes of weights and moments, as they are in memory. All-zero moments never agree."""
    setup = prepare("ci_eagle3", Path(folder) / "loading")
    config = load_config("ci_eagle3", [f"cluster.ranks={world.size}", *OVERRIDES, *MODES[mode]])
    drafter = setup.build_drafter(FrozenTarget.load(setup.target, torch.float32))
    strategy = parallelize(drafter, config.parallel, config.optim, world)
    found = {}
    for origin in origins:
        load_checkpoint(find_checkpoint(Path(folder) / origin), strategy)
        weights, moments = whole(strategy)
        digest = hashlib.sha256()
        for name in sorted(moments):
            digest.update(moments[name].tobytes() if moments[name].any() else os.urandom(8))
        sha = weights_sha256({name: torch.from_numpy(weight) for name, weight in weights.items()})
        found[origin] = (sha, digest.hexdigest())
    return found


def changing(folder: Path, verdict: Verdict) -> None:
    for mode, size in CHANGES:
        train("ci_eagle3", folder / "changing", mode, size, one_step=True)
    loss, weight = furthest(folder / "changing", folder / "fsdp2-1", "ci_eagle3")
    holds = verdict.check(loss <= LOSS and weight <= WEIGHT, "a run that changes at every step is the same run")
    path = " → ".join(f"{mode} on {size}" for mode, size in CHANGES)
    print(f"\nOne step each of {path}: losses apart {loss:.0e}, weights {weight:.0e}; holds: {holds}", flush=True)


def memory(verdict: Verdict) -> None:
    rows, peaks = [], {}
    for mode in ("ddp", "zero1", "zero2", "hsdp", "fsdp2"):
        for size in (1, 2, 4):
            if (mode, size) != ("hsdp", 1):
                held, resident, peak = np.max(on_ranks(size, measured, mode), axis=0) / 1e6
                peaks[mode, size] = (held, resident)
                rows.append([mode, size, f"{held:.0f}", f"{resident:.0f}", f"{peak:.0f}"])
                print(*rows[-1], flush=True, file=sys.stderr)
    print(
        "\nA drafter of 21 million parameters in fp32, MB per rank (the most of all ranks), beyond what the imports take\n"
    )
    print(markdown(["mode", "ranks", "masters and moments", "resident after a step", "at the peak"], rows), flush=True)
    for mode in ("zero1", "zero2", "fsdp2"):
        for kind in (0, 1):
            falling = [peaks[mode, size][kind] for size in (1, 2, 4)]
            what = ("masters and moments", "resident memory")[kind]
            verdict.check(
                all(a > 1.1 * b for a, b in pairwise(falling)), f"{what} of {mode} fall with the ranks: {falling}"
            )
        verdict.check(
            abs(4 * peaks[mode, 4][0] / peaks[mode, 1][0] - 1) < 0.02, f"{mode} on 4 ranks holds a quarter on each"
        )
    verdict.check(abs(peaks["ddp", 4][0] / peaks["ddp", 1][0] - 1) < 0.01, "ddp holds everything on every rank")


def measured(world: World, mode: str) -> tuple[int, int, int]:
    """Bytes of masters and moments, resident bytes after a step, and at the peak; both beyond what they were before."""
    options = load_config("ci_eagle3", [f"cluster.ranks={world.size}", *OVERRIDES, *MODES[mode]]).parallel
    target = LlamaConfig(
        vocab_size=512, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    frozen = FrozenTarget(
        LlamaForCausalLM(LlamaConfig(**{**target.to_dict(), "num_hidden_layers": 0})).requires_grad_(False)
    )
    rows = Pack((Document(np.arange(64, dtype=np.int32), np.ones(64, dtype=bool)),))
    features = Features(torch.randn(64, len(TAPS), WIDTH), torch.randn(64, WIDTH))
    batch = Batch.of(rows, features, dtype=torch.float32, device="cpu", address=(0,))
    gc.collect()
    before = psutil.Process().memory_info().rss
    torch.manual_seed(0)
    strategy = parallelize(
        build_drafter(Eagle3Config(steps=1, taps=list(TAPS)), target, None), options, OptimConfig(), world
    )
    targets = strategy.drafter.targets(batch, frozen)
    for last in (False, True):
        strategy.backward(strategy(batch, targets, frozen, torch.ones(1))[0], last=last)
    strategy.step(1e-3)
    gc.collect()
    after, peak = psutil.Process().memory_info().rss, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held(strategy), after - before, peak - before


if __name__ == "__main__":
    sys.exit(main())
