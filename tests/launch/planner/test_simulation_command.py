"""A recipe, planned and simulated: the same run, said twice."""

from __future__ import annotations

import json

import pytest

from data_pipelines.errors import UserError
from launch.cli import main
from launch.planner.command import read_recipe
from launch.planner.job import make_job
from launch.planner.simulation import simulate
from launch.planner.simulation.command import scenario_of

RECIPE, VOLUME = "llama31_8b_eagle3", {"samples": 120e3, "mean_tokens": 1000.0}


def job_of(*overrides: str):
    return make_job(*read_recipe(RECIPE, list(overrides), **VOLUME))


def test_a_run_without_chance_is_as_fast_as_its_plan_says():
    job = job_of("cluster.producers=8", "cluster.ranks=4", "checkpoint.every=0")
    result = simulate(scenario_of(job, steps=20), skipped=4)
    planned = job.limits(8, 4)
    assert min(planned, key=planned.__getitem__) == "training"
    assert result.tokens_per_second == pytest.approx(planned["training"], rel=0.02)


def test_the_command_prints_it(capsys):
    arguments = [
        "simulate",
        RECIPE,
        "--samples",
        "120e3",
        "--mean-tokens",
        "1000",
        "--steps",
        "4",
        "--producer-mtbf",
        "1",
    ]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 8 and 0 < told["ledger"] < 1 and told["tokens_per_second"] > 1e4
    assert 0 <= told["wait_fraction"] <= told["lost_fraction"] < 1
    assert main(arguments) == 0
    assert f"{told['tokens_per_second']:,.0f}" in capsys.readouterr().out


def test_what_has_no_stream_or_does_not_divide_is_refused():
    with pytest.raises(UserError, match="no stream"):
        scenario_of(job_of("source=colocated"), steps=1)
    with pytest.raises(UserError, match="ledgers"):
        scenario_of(job_of(), steps=1, ledgers=9)


def test_ranks_that_die_before_the_first_checkpoint_are_refused():
    for every, fix in ((1000, "--steps 10000"), (0, "checkpoint.every")):
        with pytest.raises(UserError, match=f"checkpoint.every={every}: no checkpoint") as refused:
            scenario_of(job_of(f"checkpoint.every={every}"), steps=999, rank_mtbf=3600.0)
        assert fix in refused.value.fix
    assert scenario_of(job_of("checkpoint.every=1000"), steps=1000, rank_mtbf=3600.0).checkpoint_every == 1000


@pytest.mark.parametrize(
    "given",
    [("--steps", "0"), ("--steps", "-3"), ("--producer-mtbf", "-1"), ("--rank-mtbf", "nan"), ("--rank-mtbf", "inf")],
)
def test_a_number_that_means_nothing_is_named(given, capsys):
    volume = ["--samples", "120e3", "--mean-tokens", "1000"]
    assert main(["simulate", RECIPE, *volume, "=".join(given)]) == 2
    assert " ".join(given) in capsys.readouterr().err
