"""Properties of plans: they move as the world does, balance what they say they balance, and name what holds a run up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipelines.errors import UserError
from data_pipelines.packing import best_fit
from launch.planner.command import plan_recipe, read_recipe
from launch.planner.hardware import TABLE, resolve_hardware
from launch.planner.job import make_job
from launch.planner.pages import pages, planned
from launch.planner.show import markdown, print_plan, tables
from launch.planner.simulation import simulate
from launch.planner.simulation.command import scenario_of
from launch.planner.volume import Volume
from trainer.cluster import HardwareConfig
from trainer.config import load_config

ROOT = Path(__file__).parents[3]
GIVEN = {"samples": 120e3, "mean_tokens": 1000}


def job_of(*overrides, recipe="llama31_8b_eagle3", volume=None):
    config = load_config(recipe, ["data.path=x", *overrides])
    return make_job(config, volume or Volume(120_000, 1000, 0.6))


def test_more_devices_never_make_a_run_slower():
    job = job_of("cluster.hardware.nodes=4", "global_batch=16")
    rates = {(p, r): job.total_tokens / job.seconds(p, r) for p in (1, 2, 4, 8) for r in (1, 2, 4, 8, 16)}
    for (p, r), rate in rates.items():
        assert rate <= rates.get((2 * p, r), rate) * 1.0001
        assert rate <= rates.get((p, 2 * r), rate) * 1.0001
    best = [
        plan_recipe("llama31_8b_eagle3", [f"cluster.hardware.nodes={n}"], **GIVEN).balance["recommended"]
        for n in (1, 2)
    ]
    assert best[0]["seconds"] >= best[1]["seconds"]


def test_the_balanced_ratio_balances():
    plan = plan_recipe("llama31_8b_eagle3", ["cluster.ranks=4"], **GIVEN)
    ratio = plan.balance["ranks_per_producer"]
    fed = plan.inference["tokens_per_second_per_producer"]
    assert fed == pytest.approx(ratio * plan.training["tokens_per_second_per_rank"])
    best, rates = plan.balance["recommended"], []
    job = job_of()
    for producers in range(1, 8):
        ranks = [r for r in range(1, 9 - producers) if job.config.global_batch % r == 0]
        rates += [job.total_tokens / job.seconds(producers, r) for r in ranks]
    assert best["tokens_per_second"] == pytest.approx(max(rates))
    assert best["producers"] + best["ranks"] <= 8


@pytest.mark.parametrize(
    ("bottleneck", "overrides"),
    [
        ("inference", ["cluster.producers=1", "cluster.ranks=4"]),
        ("training", ["cluster.producers=7", "cluster.ranks=1", "source.prefetch=8"]),
        ("prefetch", ["cluster.producers=4", "cluster.ranks=1"]),
        ("window", ["source.prefetch=1", "cluster.ranks=2", "cluster.producers=64", "cluster.hardware.nodes=10",
                    "global_batch=2"]),
        (
            "network of the trainer nodes",
            ["cluster.hardware.nodes=3", "cluster.producers=16", "cluster.ranks=8",
             "cluster.hardware.link_bytes_per_second=1e9"],
        ),
    ],
)  # fmt: skip
def test_what_holds_a_run_up_is_named(bottleneck, overrides):
    plan = plan_recipe("llama31_8b_eagle3", overrides, **GIVEN)
    assert plan.bottleneck == bottleneck
    assert plan.limits[bottleneck] == min(plan.limits.values())
    assert any(bottleneck in cell for row in tables(plan)[0][2] for cell in row)


@pytest.mark.parametrize(
    ("recipe", "volume", "overrides"),
    [
        *((recipe, volume, []) for recipe, _, volume in planned()),
        ("qwen3_8b_mtp", GIVEN, ["source.prefetch=4"]),  # producers wait for ranks, ranks for producers
        ("kimi_k2_eagle3", GIVEN, ["cluster.producers=2"]),
        ("llama31_8b_eagle3", GIVEN, ["source.prefetch=1", "global_batch=4"]),  # the window is full
    ],
)  # fmt: skip
def test_a_plan_is_what_its_simulation_says(recipe, volume, overrides):
    plan = plan_recipe(recipe, overrides, **volume)
    job = make_job(*read_recipe(recipe, overrides, **volume))
    simulated = simulate(scenario_of(job, steps=4), skipped=4)
    assert plan.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.08)
    assert overrides or plan.bottleneck != "prefetch", f"{recipe} lets its producers idle: raise source.prefetch"


def test_producers_are_told_to_wait_by_too_little_prefetch():
    few, enough = (plan_recipe("qwen3_8b_mtp", [f"source.prefetch={n}"], **GIVEN) for n in (4, 16))
    assert few.bottleneck == "prefetch" and any("source.prefetch=16" in note for note in few.notes)
    assert enough.tokens_per_second > 1.5 * few.tokens_per_second and "prefetch" not in enough.limits


def test_time_is_made_of_phases_and_money_of_time():
    streamed = plan_recipe("demo", ["cluster.hardware.price_per_hour=3"], samples=1000, tokens=96298)
    assert [phase["name"] for phase in streamed.phases] == ["streamed", "from the cache"]
    assert streamed.seconds == pytest.approx(sum(phase["seconds"] for phase in streamed.phases))
    assert streamed.cost == pytest.approx(3 * streamed.device_hours)
    assert streamed.device_hours == pytest.approx(streamed.seconds / 3600 * streamed.roles["devices"])
    for source in ("colocated", "offline"):
        other = plan_recipe("demo", [f"source={source}"], samples=1000, tokens=96298)
        assert other.data["trained_tokens"] == streamed.data["trained_tokens"]
        assert other.ledger["requests_per_second"] == 0


def test_captures_and_ranks_take_turns_on_their_devices():
    def plan(*more):
        return plan_recipe("llama31_8b_eagle3", ["source=offline", *more], **GIVEN)

    best = plan().balance["recommended"]
    chosen = plan(f"cluster.producers={best['producers']}", f"cluster.ranks={best['ranks']}")
    assert (chosen.seconds, chosen.device_hours) == pytest.approx((best["seconds"], best["device_hours"]))
    assert chosen.device_hours <= plan().device_hours and chosen.seconds <= plan().seconds
    everybody = plan("cluster.producers=8", "cluster.ranks=8", "cluster.hardware.price_per_hour=2")
    assert not any("take" in note for note in everybody.notes)  # 8 devices, one after the other
    assert everybody.device_hours == pytest.approx(8 * everybody.seconds / 3600)
    assert everybody.cost == pytest.approx(2 * everybody.device_hours)


def test_what_is_given_is_listed_as_given():
    overrides = ["cluster.hardware.inference_mfu=0.95", "cluster.hardware.training_mfu=0.9", "source=offline"]
    plan = plan_recipe("llama31_8b_eagle3", overrides, **GIVEN)
    assert {a["value"] for a in plan.assumptions if a["source"].startswith("given: cluster")} == {0.95, 0.9}
    assert any(a["value"] == 2e9 and "disk" in a["name"] for a in plan.assumptions)


def test_memory_of_the_host_is_checked():
    def plan(*more):
        return plan_recipe("llama31_8b_eagle3", [*more], **GIVEN)

    assert not any("host memory" in note for note in plan().notes)
    crowded = plan("store.segment_bytes=600000000000")  # four of them on a node of 2 TB
    assert any("host memory" in note and "store's segment" in note for note in crowded.notes)
    assert crowded.balance["recommended"]["producers"] == 3
    here, there = plan().memory, plan("parallel.cpu_offload=true").memory
    states = {part for part in here["rank"] if part.startswith("drafter's ") and "gathered" not in part}
    assert len(states) == 3 and not states & set(there["rank"])
    assert {part: here["rank"][part] for part in states} == {part: there["rank_host"][part] for part in states}


@pytest.mark.parametrize("mean", [300, 1000, 2000, 2049, 3000])
def test_packs_are_as_full_as_best_fit_makes_them(mean):
    draw, spread, room = np.random.default_rng(0), 0.5, 4096
    sigma = np.log(1 + spread**2) ** 0.5
    lengths = np.minimum(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, 4000).astype(int) + 1, room)
    packs = best_fit(lengths.tolist(), room).max() + 1
    assert Volume(len(lengths), mean, 0.6, spread=spread).tokens_per_pack(room) == pytest.approx(
        lengths.sum() / packs, rel=0.04
    )
    assert Volume(99, mean, 0.6, spread=0.0).tokens_per_pack(room) == room // mean * mean


def test_memory_follows_the_parallel_mode():
    ranks = ["cluster.ranks=8", "cluster.producers=8", "cluster.hardware.nodes=2"]

    def rank(*more):
        return plan_recipe("llama31_8b_eagle3", [*ranks, *more], **GIVEN).memory["rank"]

    sharded, whole = rank(), rank("parallel=ddp")
    assert whole["drafter's moments"] == pytest.approx(8 * sharded["drafter's moments"])
    assert rank("parallel.recompute=true")["activations"] < sharded["activations"]
    halved = rank("parallel.context=2", "global_batch=16")
    assert halved["activations"] == pytest.approx(sharded["activations"] / 2)


def test_a_target_that_does_not_fit_takes_more_devices():
    kimi = plan_recipe("kimi_k2_eagle3", [], samples=600e3, tokens=6e9)
    assert kimi.roles["devices_per_producer"] == 8
    assert any("tensor parallelism" in note for note in kimi.notes)
    crowded = plan_recipe("kimi_k2_eagle3", ["cluster.hardware.devices_per_producer=4"], samples=600e3, tokens=6e9)
    assert any("a producer needs" in note and "target's weights" in note for note in crowded.notes)


def test_the_features_of_a_published_run():
    """TorchSpec: about 7 GB for a sequence of 128K tokens of Kimi-K2.5 (7168 wide, three taps and the final state)."""
    long = ["data.pack_tokens=131072", "data.max_document_tokens=131072", "store.segment_bytes=68719476736"]
    job = job_of(*long, recipe="kimi_k2_eagle3", volume=Volume(1000, 131072, 0.6, spread=0.0))
    assert job.pack_bytes / 2**30 == pytest.approx(7.0, rel=0.01)


def test_hardware_comes_from_the_table_or_from_a_file(tmp_path):
    rows = yaml.safe_load(TABLE.read_text())
    for name in rows:
        hardware = resolve_hardware(HardwareConfig(device=name, nodes=3))
        assert hardware.source and hardware.devices == 3 * hardware.devices_per_node
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump({**rows["h100"], "mfu": {"inference": 0.5}, "ledger_requests_per_second": 10.0}))
    overrides = [f"cluster.hardware.device={file}"]
    plan = plan_recipe("llama31_8b_eagle3", overrides, **GIVEN)
    assert plan.limits["ledger"] < plan.limits["training"] and plan.bottleneck == "ledger"
    simulated = simulate(scenario_of(make_job(*read_recipe("llama31_8b_eagle3", overrides, **GIVEN)), steps=20))
    assert plan.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.15)  # a full ledger wakes fewer
    assert not any("prefill" in a["name"] for a in plan.assumptions)  # what was measured is no assumption
    given = resolve_hardware(HardwareConfig(device=str(file), inference_mfu=0.7, training_mfu=0.1))
    assert (given.efficiency("inference"), given.efficiency("mtp")) == (0.7, 0.1)


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (["cluster.hardware.device=h900"], GIVEN, "neither a row of the table nor a file"),
        (["cluster.hardware.nodes=0"], GIVEN, "cluster.hardware.nodes=0"),
        (["target.path=no/where"], GIVEN, "has no target 'no/where'"),
        ([], {}, "names no data, and nothing says how much"),
        ([], {"samples": 10.0, "mean_tokens": 10.0, "tokens": 10.0}, "are all given"),
        ([], {"samples": 0.0, "mean_tokens": 10.0}, "--samples 0"),
        ([], {"samples": float("inf"), "mean_tokens": 10.0}, "--samples inf"),
        ([], {"samples": 10.0, "mean_tokens": float("nan")}, "--mean-tokens nan"),
        ([], {"tokens": 1e12}, "--tokens alone"),
        ([], {"mean_tokens": 10.0}, "--mean-tokens alone"),
        ([], {"samples": 100.0, "tokens": 10.0}, "100 documents of 0.1 tokens"),
        ([], {**GIVEN, "supervised": 2.0}, "not a share"),
        (["store.segment_bytes=1000000"], GIVEN, "more than the window"),
        (["target.path=deepseek-ai/DeepSeek-V3", "cluster.hardware.device=small"], GIVEN, "do not hold it"),
    ],
)
def test_errors_are_for_people(overrides, options, says, tmp_path, monkeypatch):
    row = {**yaml.safe_load(TABLE.read_text())["a100"], "memory_bytes": 1.0e9}
    (tmp_path / "small").write_text(yaml.safe_dump(row))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        plan_recipe("llama31_8b_eagle3", overrides, **options)
    assert says in str(refused.value)


def test_data_on_this_machine_are_measured(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"count to {n}"}, {"role": "assistant", "content": "one two " * n}]}
        for n in range(1, 40)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.path={data}", "data.regenerate.mode=never", "data.max_rows=0"]
    plan = plan_recipe("ci_eagle3", overrides)
    assert plan.data["measured"] and plan.data["samples"] == 39
    assert 0.3 < plan.data["supervised_share"] < 1
    asked = plan_recipe("ci_eagle3", [])  # prompts that the target has yet to answer
    assert not asked.data["measured"] and asked.data["samples"] == 200


def test_the_pages_of_the_docs_are_current(capsys):
    """After a change: python -m launch.planner.pages docs/plans"""
    written = dict(pages())
    folder = ROOT / "docs" / "plans"
    assert sorted(written) == sorted(path.name for path in folder.glob("*.md"))
    for name, text in written.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"docs/plans/{name} is not what the planner prints"
    plan = plan_recipe("llama31_8b_eagle3", [], **GIVEN)
    print_plan(plan)
    assert "with 8 devices" in " ".join(capsys.readouterr().out.split())
    assert markdown(plan, "x").count("## ") == 4
    json.dumps(asdict(plan))
