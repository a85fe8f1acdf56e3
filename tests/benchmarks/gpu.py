"""What one GPU makes of it: every drafter at the size of an 8B target, then the demo's whole run.

    python -m tests.benchmarks.gpu [--minutes 9] [--device cpu --size tiny --skip-demo]

The drafters of the 8B recipes are trained for some steps on made-up features with random weights: the time of a step
depends on neither. Floating-point operations are counted while a step runs, not estimated. Prints markdown, each row when it
is known, and judges nothing. The recipes have half of the minutes, each as much, the demo has what is left.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from data_pipelines.engines import resolve_dtype
from data_pipelines.features import Features
from data_pipelines.packing import Document, Pack
from trainer.batch import Batch
from trainer.config import RunConfig, load_config
from trainer.drafters import Drafter, build_drafter
from trainer.parallel import World, parallelize, process_group
from trainer.target import FrozenTarget

from .processes import markdown

# From the models' own config.json.
LLAMA31_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=131072,
)  # fmt: skip
QWEN3_8B = dict(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
)  # fmt: skip
TARGETS = {
    "llama31_8b_eagle3": (LlamaConfig, LLAMA31_8B),
    "qwen3_8b_mtp": (Qwen3Config, QWEN3_8B),
    "qwen3_8b_dflash": (Qwen3Config, QWEN3_8B),
    "qwen3_8b_dspark": (Qwen3Config, QWEN3_8B),
}
TINY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TINY |= dict(vocab_size=1024)
DOCUMENTS = 4  # of equal length in a pack, the second half of each supervised
WARM_UP = 3
HEADER = ["recipe", "trained, M", "tokens/s", "MFLOP a token", "of the ceiling (MFU)", "peak, GB", "steps measured"]


def shrink(config: RunConfig, target: PretrainedConfig) -> RunConfig:
    """The same drafter where a pack has 256 tokens and a vocabulary 1,024."""
    config.data.pack_tokens = 256
    for key, most in (("draft_vocab_size", 256), ("anchors", 32), ("markov_rank", 8)):
        if getattr(config.drafter, key, 0):
            setattr(config.drafter, key, min(most, getattr(config.drafter, key)))
    if hasattr(config.drafter, "mask_token"):
        config.drafter.mask_token = target.vocab_size - 1
    return config


def frozen_parts(target: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> FrozenTarget:
    without_layers = copy.deepcopy(target)
    without_layers.num_hidden_layers, without_layers.layer_types = 0, []
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(without_layers, dtype=dtype)
    return FrozenTarget(model.eval().requires_grad_(False))


def made_up_batch(drafter: Drafter, target: PretrainedConfig, tokens: int, dtype, device) -> Batch:
    rng, length = np.random.default_rng(0), tokens // DOCUMENTS
    mask = np.arange(length) >= length // 2
    documents = [
        Document(rng.integers(0, target.vocab_size - 1, length, dtype=np.int32), mask, origin=str(i))
        for i in range(DOCUMENTS)
    ]
    pack, width = Pack(tuple(documents)), target.hidden_size
    taps = len(drafter.contract(drafter.config, target.num_hidden_layers).taps)
    features = Features(torch.randn(len(pack), taps, width), torch.randn(len(pack), width))
    return Batch.of(pack, features, dtype=dtype, device=device, address=(0, 0))


def measure(recipe: str, world: World, size: str, steps: int, until: float) -> dict[str, float]:
    """Of one micro-batch a step, forward to optimizer: seconds, tokens, operations, bytes at the peak, parameters, and the
    steps that were measured until time.monotonic() was `until`, one at least."""
    kind, shape = TARGETS[recipe]
    target = kind(**shape | (TINY if size == "tiny" else {}))
    config = load_config(recipe, ["data=prompts"])  # no rows are read
    if size == "tiny":
        config = shrink(config, target)
    dtype, device = resolve_dtype(config.parallel.compute_dtype), world.device
    frozen = frozen_parts(target, dtype, device)
    kept = config.drafter.draft_vocab_size
    drafter = build_drafter(config.drafter, target, torch.arange(kept) if kept else None)
    drafter.start_head(frozen)
    parameters = sum(p.numel() for p in drafter.parameters())
    strategy = parallelize(drafter, config.parallel, config.optim, world)
    batch = made_up_batch(strategy.drafter, target, config.data.pack_tokens, dtype, device)

    def step() -> None:
        targets = strategy.drafter.targets(batch, frozen)
        divisors = strategy.drafter.divisors(targets.denominators).clamp(min=1)
        weights = torch.tensor(strategy.drafter.step_weights, device=device) / divisors.to(device)
        loss, _ = strategy(batch, targets, frozen, weights.float())
        strategy.backward(loss, last=True)
        strategy.step(1e-5)

    cuda = device.type == "cuda"
    seconds: list[float] = []
    while len(seconds) < WARM_UP + steps and (len(seconds) < 2 or time.monotonic() < until):
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    measured = seconds[min(WARM_UP, len(seconds) - 1) :]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    with FlopCounterMode(display=False) as counter:
        step()
    return {
        "seconds": statistics.median(measured),
        "steps": len(measured),
        "tokens": len(batch.input_ids),
        "flops": counter.get_total_flops(),
        "peak": peak,
        "parameters": parameters,
    }


def matmul_rate(device: torch.device, size: int) -> float:
    """Operations a second of one large product in bfloat16 (float32 where that is what the machine computes in)."""
    dtype = resolve_dtype("auto")
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def row_of(recipe: str, world: World, size: str, steps: int, until: float, ceiling: float) -> list[str]:
    """A row of the table: what `measure` says, or that the GPU's memory was not enough."""
    gc.collect()  # what FSDP keeps of the recipe before refers to itself, weights and all
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        found = measure(recipe, world, size, steps, until)
    except torch.OutOfMemoryError as error:
        print(f"{recipe}: {error}", file=sys.stderr, flush=True)
        return [recipe, "out of memory", *[""] * (len(HEADER) - 2)]
    kept_to_it = "" if found["steps"] == steps else f" of {steps}: its time was over"
    return [
        recipe, f"{found['parameters'] / 1e6:,.1f}", f"{found['tokens'] / found['seconds']:,.0f}",
        f"{found['flops'] / found['tokens'] / 1e6:,.1f}", f"{found['flops'] / found['seconds'] / ceiling:.1%}",
        f"{found['peak'] / 1e9:,.1f}", f"{found['steps']}{kept_to_it}",
    ]  # fmt: skip


def demo_overrides(gpus: int) -> list[str]:
    """As many of the demo's two ranks as there are GPUs for; one where there is none."""
    return [f"cluster.ranks={max(1, min(2, gpus))}"]


def run_demo(run_dir: Path, seconds: float) -> int:
    """Its exit status; 0 too when it had to be stopped because its time was over."""
    arguments = ["run", "demo", f"run_dir={run_dir}", *demo_overrides(torch.cuda.device_count())]
    demo = subprocess.Popen([sys.executable, "-m", "launch.cli", *arguments])
    try:
        status = demo.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        demo.terminate()  # it ends the processes of its run itself, and goes on from there when it is started again
        demo.wait()
        print(f"\n### The demo\n\nNot done: its time was over after {seconds:,.0f} s (--minutes)", flush=True)
        return 0
    if status:
        return status
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = (summary["acceptance"][when]["all"]["acceptance_length"] for when in ("before", "after"))
    rows = [["tokens/s", f"{summary['tokens_per_second']:,.0f}"], ["waiting", f"{summary['wait_fraction']:.1%}"]]
    rows += [["acceptance length", f"{before:.2f} → {after:.2f}"], ["lossless", summary["lossless"]]]
    print("\n### The demo\n\n" + markdown(["", ""], rows), flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument(
        "--peak-tflops", type=float, default=0.0, help="of the GPU's data sheet; default: a product's own"
    )
    parser.add_argument("--skip-demo", action="store_true")
    parser.add_argument("--run-dir", type=Path, default=Path("outputs/gpu_demo"))
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: this machine shows no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES); --device cpu --size tiny tries the script"
        )
        return 2
    began, seconds = time.monotonic(), 60 * options.minutes
    with process_group(900) as world:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        product = matmul_rate(world.device, 8192 if options.size == "8b" else 512)
        ceiling = options.peak_tflops * 1e12 or product
        print(f"{name}, torch {torch.__version__}; a product alone: {product / 1e12:,.2f} TFLOP/s")
        print(f"\n### Training alone, one pack a step, size {options.size}\n\n{markdown(HEADER, [])}", flush=True)
        for recipe in TARGETS:
            until = time.monotonic() + seconds / 2 / len(TARGETS)
            row = row_of(recipe, world, options.size, options.steps, until, ceiling)
            print(f"| {' | '.join(row)} |", flush=True)
    if options.skip_demo:
        return 0
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    return run_demo(options.run_dir, began + seconds - time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
