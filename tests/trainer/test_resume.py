"""What disturbs a run and must not change it: another world size, a broken checkpoint, packs that do not come."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from data_pipelines.engines import build_engine
from data_pipelines.packing import pack_id
from data_pipelines.run_folder import RunFolder
from data_pipelines.stream.cache import capture
from trainer.checkpoint import saved_checkpoints, whole_checkpoints
from trainer.config import load_config, read_config
from trainer.loop import PREEMPTED
from trainer.setup import prepare_run

from .running import RECIPE, ROOT, metrics, packs_by_step, result, start, train
from .test_checkpoint import flip_a_bit

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resumed_at_another_world_size_it_trains_on_the_same_packs(undisturbed, two_ranks, tmp_path, before, after):
    """From the same checkpoint, which is not even the newest: that one has a flipped bit."""
    origin = two_ranks if before == 2 else undisturbed
    shutil.copytree(origin / "checkpoints", tmp_path / "checkpoints")
    shutil.copy(origin / "metrics.jsonl", tmp_path)
    last = whole_checkpoints(tmp_path / "checkpoints")[-1]
    flip_a_bit(last / "__0_0.distcp")
    said = train(tmp_path, ranks=after)
    assert f"broken and passed over: {last.name}: __0_0.distcp is corrupt" in said
    first = min(saved_checkpoints(origin / "checkpoints"))
    total, batch = result(origin)["steps"], 4
    assert packs_by_step(said) == {s: list(range(s * batch, (s + 1) * batch)) for s in range(first, total)}
    for resumed, whole in zip(metrics(tmp_path), metrics(origin), strict=True):
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert resumed["tokens"] == whole["tokens"]
    assert whole_checkpoints(tmp_path / "checkpoints")[-1].name == last.name, "made again, over the broken one"


def test_told_where_to_begin_it_does_so_once(undisturbed, tmp_path):
    """Ranks that torchrun starts again read the run's config.yaml: they go on from the newest."""
    shutil.copytree(undisturbed / "checkpoints", tmp_path / "checkpoints")
    shutil.copy(undisturbed / "metrics.jsonl", tmp_path)
    first, *later = whole_checkpoints(tmp_path / "checkpoints")
    assert later
    process = start(tmp_path, f"resume={first}", plain=True)
    while not (tmp_path / "config.yaml").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert read_config(tmp_path / "config.yaml").resume == "auto"
    assert whole_checkpoints(tmp_path / "checkpoints") == [first]
    train(tmp_path)
    assert result(tmp_path)["weights_sha256"] == result(undisturbed)["weights_sha256"]
    assert len(metrics(tmp_path)) == len(metrics(undisturbed))


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> SimpleNamespace:
    """A folder with the features of all packs of the run, as a hybrid run finds them; file(index) → a pack's own."""
    folder = tmp_path_factory.mktemp("captured")
    setup = prepare_run(load_config("ci_eagle3", [*RECIPE, f"run_dir={folder}"]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    capture(setup.plan, build_engine(setup.target, setup.spec), setup.spec, folder / "features")
    torch.set_num_threads(threads)

    def name(index: int) -> str:
        pack = setup.plan[index]
        return pack_id(pack.input_ids, pack.lengths, setup.spec.fingerprint)

    return SimpleNamespace(folder=folder / "features", name=name, spec=setup.spec)


@pytest.fixture
def hybrid(captured, tmp_path) -> list[str]:
    """Overrides of a run that has all features in its cache, and a ledger's address where nobody answers."""
    shutil.copytree(captured.folder, tmp_path / "features")
    (tmp_path / "token").write_text("a token")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    stream = [f"source.ledger=http://127.0.0.1:{port}", f"source.token_file={tmp_path / 'token'}"]
    return ["source=hybrid", *stream, "store=filesystem", f"store.path={tmp_path / 'store'}"]


def test_told_to_stop_while_one_rank_waits_for_packs_all_leave_with_what_was_done(
    two_ranks, captured, hybrid, tmp_path
):
    """Rank 0 has all its packs and waits in step 2 for rank 1, whose packs nobody will send for minutes."""
    run_dir = tmp_path / "run"
    shutil.move(tmp_path / "features", run_dir / "features")
    for index in (9, 11):
        (run_dir / "features" / f"{captured.name(index)}.safetensors").unlink()
    process = start(run_dir, *hybrid, ranks=2)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)  # far less than the patience; torchrun itself would kill after 30 s
    assert "told to stop while a rank waited for packs that did not come; 2 steps are in the checkpoint" in said
    assert said.count("Traceback") == 1 and "SignalException" in said, "torchrun's own, and none of a rank"
    assert list(saved_checkpoints(run_dir / "checkpoints")) == [2]
    train(run_dir, ranks=2)
    assert result(run_dir)["weights_sha256"] == result(two_ranks)["weights_sha256"]


def test_told_to_stop_while_the_first_of_a_group_waits_both_leave_and_a_rank_alone_goes_on(
    undisturbed, captured, hybrid, tmp_path
):
    """Two ranks share each pack; only the first of them has a source, and it waits for a pack of step 2."""
    run_dir = tmp_path / "run"
    shutil.move(tmp_path / "features", run_dir / "features")
    (run_dir / "features" / f"{captured.name(9)}.safetensors").unlink()
    process = start(run_dir, *hybrid, "parallel.context=2", ranks=2)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert "told to stop while a rank waited for packs that did not come; 2 steps are in the checkpoint" in said
    assert said.count("Traceback") == 1 and "SignalException" in said, "torchrun's own, and none of a rank"
    train(run_dir, plain=True)
    for row, whole in zip(metrics(run_dir), metrics(undisturbed), strict=True):
        assert row["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert (row["tokens"], row["packs"]) == (whole["tokens"], whole["packs"])


def test_told_to_stop_before_any_pack_has_come_it_leaves_at_once(hybrid, tmp_path):
    shutil.rmtree(tmp_path / "features")
    process = start(tmp_path / "run", *hybrid, plain=True)
    said = ""
    while "steps 0…" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == PREEMPTED, said + rest
    assert "no step was done yet" in rest and "Traceback" not in rest
    assert not saved_checkpoints(tmp_path / "run" / "checkpoints")


def test_a_pack_in_quarantine_weighs_nothing_and_stays_out_when_resumed(undisturbed, captured, hybrid, tmp_path):
    """Its file is there: only the list keeps it out. Two ranks, of which one does without; killed and resumed as one."""
    run_dir = tmp_path / "run"
    shutil.move(tmp_path / "features", run_dir / "features")
    line = f'{{"pack": "{captured.name(5)}", "index": 5, "documents": ["rows:5"], "reasons": ["it fails"]}}\n'
    RunFolder(run_dir).quarantined_packs.write_text(line)
    options = [*hybrid, "source.on_poison=quarantine", "checkpoint.every=1", "checkpoint.keep=20"]
    train(run_dir, *options, ranks=2)
    rows, whole = metrics(run_dir), metrics(undisturbed)
    assert [row["packs"] for row in rows] == [4, 3] + [4] * (len(whole) - 2)
    assert (rows[0]["loss"], rows[0]["tokens"]) == (pytest.approx(whole[0]["loss"], rel=1e-6), whole[0]["tokens"])
    assert 0 < rows[1]["supervised_tokens"] < whole[1]["supervised_tokens"] and rows[1]["loss"] != whole[1]["loss"]
    assert result(run_dir)["packs"] == 4 * len(whole) - 1

    again = tmp_path / "again"
    shutil.copytree(run_dir, again)
    for step in range(2, len(whole) + 1):
        shutil.rmtree(again / "checkpoints" / f"step_{step:08d}")
    train(again, *options, ranks=1)
    for resumed, first in zip(metrics(again), rows, strict=True):
        assert resumed["loss"] == pytest.approx(first["loss"], rel=1e-6) and resumed["packs"] == first["packs"]

    said = train(run_dir, *options, "source.max_quarantined=0", plain=True, status=2)
    assert "1 packs could not be produced" in said and "pack 5" in said and "rows:5: it fails" in said


WAITS = """
import os, time, torch
from trainer.parallel import process_group

with process_group(3) as world:
    if world.rank == 1:
        time.sleep(3600)
    world.sum(torch.zeros(1))
"""


def test_a_rank_that_waits_for_another_in_vain_ends_with_an_error(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "waits.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "rank0" in done.stderr and "timed out" in done.stderr.lower(), done.stderr
