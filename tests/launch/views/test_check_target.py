"""`draftsmith check-target`, as a person runs it: exit status, table, JSON, and never a traceback."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, T5Config, T5ForConditionalGeneration

from launch.cli import main

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def run(capsys, *arguments):
    status = main(["check-target", *map(str, arguments)])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return status, said.out, said.err


def test_a_target_that_fits(capsys):
    status, out, _ = run(capsys, "tiny")
    assert status == 0 and "this target fits" in out
    for name in ("logits", "taps", "packing", "embedding", "judge", "eagle3", "mtp", "dflash", "dspark", "template"):
        assert f"ok  {name}" in out, name
    assert max(map(len, out.splitlines())) <= 80


def test_json(capsys):
    status, out, _ = run(capsys, "tiny", "--json")
    found = json.loads(out)
    assert status == 0 and found["fits"] and found["logit_difference"] <= 1e-4
    assert {finding["name"]: finding["fits"] for finding in found["findings"]} == dict.fromkeys(
        ("model", "logits", "taps", "embedding", "packing", "rank", "template", "judge"), True
    )
    assert found["drafters"] == dict.fromkeys(("dflash", "dspark", "eagle3", "mtp"))


@pytest.fixture
def granite(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=8.0, embedding_multiplier=6.0))
    model.save_pretrained(tmp_path)
    return tmp_path


def test_what_is_carried_is_named(capsys, granite):
    status, out, _ = run(capsys, granite)
    out = " ".join(out.split())
    assert status == 0 and "carried: scale 0.125" in out and "this model multiplies them by 6" in out
    assert "no template" in out  # it can be trained for without a tokenizer, on token ids


def test_logits_that_are_not_explained_are_refused(capsys, granite, monkeypatch):
    """A family that does more to its logits than is known here; the same holds for a producer and for a rank."""
    from transformers import GraniteForCausalLM

    plain = GraniteForCausalLM.forward

    def bent(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.abs().sqrt() * output.logits.sign()
        return output

    monkeypatch.setattr(GraniteForCausalLM, "forward", bent)
    status, out, _ = run(capsys, granite)
    assert status == 2 and "no  logits" in out and "this target does not fit" in out


def test_what_is_no_target(capsys, tmp_path):
    T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    ).save_pretrained(tmp_path)
    status, out, _ = run(capsys, tmp_path)
    assert status == 2 and "not a model that writes text" in " ".join(out.split())
    (tmp_path / "config.json").write_text("{}")
    status, out, _ = run(capsys, tmp_path)
    assert status == 2 and "not a model that transformers knows" in " ".join(out.split())
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        status, _, err = run(capsys, tmp_path)
        assert status == 2 and ("no weights" if name.startswith("model") else "no config.json") in err
    status, _, err = run(capsys, "no/such-model-here")
    assert status == 2 and "no/such-model-here" in err
