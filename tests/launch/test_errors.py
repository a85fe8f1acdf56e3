"""Bad input: each gives one clear screen on stderr, exit status 2, and no traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main
from trainer.seal import seal

ROOT = Path(__file__).parents[2]
GOOD = {"messages": [{"role": "user", "content": "say one"}, {"role": "assistant", "content": "one"}]}
Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture) -> Refused:
    """Calls a command that must be refused; returns what it says."""

    def call(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return one_screen(capfd.readouterr().err)

    return call


def one_screen(errors: str) -> str:
    said = errors[errors.find("error: ") :]
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    assert len(said.splitlines()) <= 20 and all(len(line) < 600 for line in said.splitlines())
    return said


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The same as a process of its own, where the environment matters."""
    command = [sys.executable, "-m", "launch.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **environment}
    )


@pytest.fixture
def smoke(tmp_path: Path) -> list[str]:
    """A run that needs no time: the tiny target, everything off that is not tested."""
    return ["run", "ci_eagle3", f"run_dir={tmp_path / 'run'}", "evaluate.enabled=false", "data.regenerate.mode=never"]


def rows(path: Path, *given: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return f"data.path={path}"


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["rnu", "demo"], "no command 'rnu'", "did you mean run?"),
        (["run"], "takes a recipe, or --config", "draftsmith run --help"),
        (["run", "dmeo"], "no recipe 'dmeo'", "did you mean demo?"),
        (["run", "ci_eagle3", "optim.lrr=1"], "lrr", "did you mean optim.lr?"),
        (["run", "ci_eagle3", "+optim.momentum=1"], "unknown key optim.momentum", ""),
        (["run", "ci_eagle3", "optim.lr=fast"], "fast", ""),
        (["run", "ci_eagle3", "global_batch=two"], "two", ""),
        (["run", "ci_eagle3", "source=strem"], "strem", "did you mean stream?"),
        (["run", "ci_eagle3", "just-a-word"], "'just-a-word' is not an override", "write key=value"),
        (["run", "ci_eagle3", "--config-dir", "/nowhere"], "--config-dir /nowhere is not a folder", ""),
        (["capture"], "takes a recipe or --config", "draftsmith capture --help"),
        (["run", "ci_eagle3", "global_batch=3"], "global_batch=3 packs cannot be shared out evenly", "a multiple of 2"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_nearest_right_one(
    refused: Refused, arguments: list[str], what: str, fix: str
) -> None:
    said = refused(*arguments)
    assert what in said
    assert fix in said


@pytest.mark.parametrize("command", ["run", "plan", "simulate", "prepare", "slurm"])
def test_recipes_and_groups_of_ones_own(refused: Refused, tmp_path: Path, command: str) -> None:
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    (tmp_path / "own" / "cluster" / "my_site.yaml").write_text("defaults: [schema, _self_]\nhang_seconds: -7\n")
    said = refused(command, "ci_eagle3", "cluster=my_site", "--config-dir", str(tmp_path / "own"))
    assert "cluster.hang_seconds=-7" in said


@pytest.mark.parametrize("command", ["status", "produce"])
@pytest.mark.parametrize("address", ["http://host:port", "localhost:8700", "http://"])
def test_an_address_that_is_none(refused: Refused, tmp_path: Path, command: str, address: str) -> None:
    (tmp_path / "token").write_text("secret")
    said = refused(command, "--ledger", address, "--token-file", str(tmp_path / "token"))
    assert f"the ledger's address {address!r} is not http://host:port" in said


def test_a_ledger_that_has_begun_takes_no_other_values(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    said = refused("ledger", str(tmp_path), "cluster.ledger_port=9000")
    assert "has begun already: cluster.ledger_port=9000 would change nothing" in said


def test_a_target_that_does_not_exist(refused: Refused, smoke: list[str]) -> None:
    said = refused(*smoke, "target=hf", "target.path=/nowhere/model")
    assert "target.path=/nowhere/model does not exist" in said
    assert "name a directory" in said


def test_data_that_does_not_exist(refused: Refused, smoke: list[str]) -> None:
    assert "data.path=/nowhere.jsonl does not exist" in refused(*smoke, "data.path=/nowhere.jsonl")


def test_rows_without_messages_are_named_and_kept(refused: Refused, smoke: list[str], tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", {"title": "one"}, {"title": "two"}, GOOD)
    said = refused(*smoke, path)
    assert "2 of 3 rows are quarantined" in said and "the row has no messages" in said and "rows.jsonl:1" in said
    kept = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in kept] == [{"title": "one"}, {"title": "two"}]


def test_data_without_a_supervised_token(refused: Refused, smoke: list[str], tmp_path: Path) -> None:
    question = {"messages": [{"role": "user", "content": "say one"}]}
    said = refused(*smoke, rows(tmp_path / "rows.jsonl", question, question))
    assert "no token to train on" in said
    assert "data.regenerate.mode=always" in said


def test_a_draft_vocabulary_that_does_not_fit(refused: Refused, smoke: list[str], tmp_path: Path) -> None:
    said = refused(*smoke, rows(tmp_path / "rows.jsonl", *[GOOD] * 20), "drafter.draft_vocab_size=99999999")
    assert "draft_vocab_size=99999999" in said
    assert "vocabulary" in said


@pytest.mark.parametrize("key", ["ledger_port", "store_port", "metrics_port"])
def test_a_port_in_use(refused: Refused, smoke: list[str], key: str) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        said = refused(*smoke, f"cluster.{key}={port}")
    assert f"port {port} is in use" in said
    assert f"cluster.{key}" in said


def test_mooncakes_binary_missing(smoke: list[str], tmp_path: Path) -> None:
    """A package `mooncake` without its binary comes first on the path, as after a broken installation."""
    (tmp_path / "broken" / "mooncake").mkdir(parents=True)
    (tmp_path / "broken" / "mooncake" / "__init__.py").touch()
    done = process(*smoke, PYTHONPATH=str(tmp_path / "broken"))
    said = one_screen(done.stderr)
    assert done.returncode == 2
    assert "has no mooncake_master" in said
    assert "make setup" in said


def test_a_store_that_the_stream_cannot_use(refused: Refused, smoke: list[str]) -> None:
    assert "store=memory lives in one process" in refused(*smoke, "store=memory")


def test_a_run_folder_that_is_a_file(refused: Refused, smoke: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "the run's folder cannot be written" in refused(*smoke, f"run_dir={tmp_path / 'file' / 'run'}")


def test_another_recipe_in_the_folder_of_a_run(refused: Refused, tmp_path: Path) -> None:
    """Its checkpoint is not touched, and what differs is named."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    seal(checkpoint, 1, {"plan": "another"})
    path = rows(tmp_path / "rows.jsonl", *[GOOD] * 200)
    said = refused(
        "run", "ci_eagle3", f"run_dir={tmp_path / 'run'}", "evaluate=none", path, "data.regenerate.mode=never"
    )
    assert "the checkpoint is of another run" in said and "data.pack_tokens: None there, 256 now" in said
    assert checkpoint.exists()


def test_a_refused_run_leaves_the_quarantine_of_the_run_before(refused: Refused, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    seal(checkpoint, 1, {"plan": "another"})
    path = rows(tmp_path / "rows.jsonl", *[GOOD] * 200, {"title": "not a conversation"})
    call = ["run", "ci_eagle3", f"run_dir={tmp_path / 'run'}", "evaluate=none", path, "data.regenerate.mode=never"]
    quarantine = tmp_path / "run" / "quarantine.jsonl"
    refused(*call)
    assert not quarantine.exists()
    quarantine.write_text("of the run before\n")
    refused(*call)
    assert quarantine.read_text() == "of the run before\n"


def test_an_export_takes_only_its_own_keys(refused: Refused, tmp_path: Path) -> None:
    assert "drafter.steps cannot be changed by an export" in refused("export", str(tmp_path), "drafter.steps=2")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed one and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=x",
        "-keyout",
        key,
        "-out",
        cert,
    ]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_certificates_that_the_ledger_could_not_use(
    refused: Refused, smoke: list[str], certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    assert "belong together" in refused(*smoke, f"cluster.tls_cert={cert}")
    said = refused(*smoke, f"cluster.tls_cert={cert}", "cluster.tls_key=/nowhere.pem")
    assert "cluster.tls_key=/nowhere.pem does not exist" in said
    said = refused(*smoke, f"cluster.tls_cert={key}", f"cluster.tls_key={cert}")  # the wrong way round
    assert "the ledger cannot use its certificate and key" in said


def test_a_metrics_port_in_use_and_one_that_two_would_share(refused: Refused, smoke: list[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        first = busy.getsockname()[1] - 1  # the second producer's
        assert f"port {first + 1} is in use" in refused(*smoke, f"cluster.producer_metrics_port={first}")
    same = [f"cluster.{name}_metrics_port={first}" for name in ("trainer", "producer")]
    assert "two servers would share a port" in refused(*smoke, *same)


def test_the_ledger_with_broken_settings(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{")
    assert "the ledger's settings cannot be read" in refused("ledger", str(tmp_path))


def test_a_producer_without_a_token(refused: Refused, tmp_path: Path) -> None:
    said = refused("produce", "--ledger", "http://127.0.0.1:1", "--token-file", str(tmp_path / "none"))
    assert "the ledger's token cannot be read" in said


def test_help_and_the_list_of_recipes(capfd: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    assert "a whole run on this machine" in capfd.readouterr().out
    assert main(["recipes"]) == 0
    assert {"demo", "ci_eagle3"} <= {line.split()[0] for line in capfd.readouterr().out.splitlines()}


def test_the_plan_is_shown_and_nothing_is_made(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert main(["run", "demo", "--plan", f"run_dir={tmp_path / 'run'}", "cluster.producers=3"]) == 0
    shown = capfd.readouterr().out
    for wanted in (
        "producer-2",
        "mooncake_master",
        "torch.distributed.run",
        "smollm2_135m",
        "global_batch",
        "rpc_port=ANY_FREE",
    ):
        assert wanted in shown
    assert not (tmp_path / "run").exists()


def test_the_doctor_finds_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    ill = process("doctor", PYTHONPATH=str(tmp_path))
    assert ill.returncode == 1
    assert "problem" in ill.stdout and "has no mooncake_master" in ill.stdout and "make setup" in ill.stdout
