"""Where the judge's target goes is decided from its files and the free memory, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3_5TextConfig

from data_pipelines.engines import Target
from data_pipelines.errors import UserError
from tests.trainer.families import SHAPE, build_target
from trainer.decoding.config import EvaluateConfig
from trainer.decoding.judges import NotJudged
from trainer.decoding.placement import FILLED, GIB, Device, host_memory, load, place, read_weights

AUTO = EvaluateConfig()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Target:
    return build_target(LlamaConfig(**SHAPE, tie_word_embeddings=False), tmp_path_factory.mktemp("small"))


def gpus(*free: float) -> list[Device]:
    return [Device(f"cuda:{i}", int(bytes)) for i, bytes in enumerate(free)]


def claiming(folder: Path, config, numbers: int, kind: str = "BF16", files: int = 4) -> Target:
    """A checkpoint of headers alone: files that say that they hold so many weights."""
    config.save_pretrained(folder)
    names = [f"model-{i}.safetensors" for i in range(files)]
    for i, name in enumerate(names):
        size = numbers // files * {"BF16": 2, "F8_E4M3": 1}[kind]
        header = {f"w{i}": {"dtype": kind, "shape": [numbers // files], "data_offsets": [0, size]}, "__metadata__": {}}
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Target(str(folder), "tests/large")


def test_what_fits_where(small):
    numbers = sum(p.numel() for p in small.load_model(torch.float32).parameters())
    weights = read_weights(small)
    assert (weights.numbers, weights.packed) == (numbers, 0)
    enough, half = 4 * numbers / FILLED + 1, 2 * numbers / FILLED + 1

    def placed(devices, host=GIB, **options):
        found = place(small, replace(AUTO, **options), devices, host)
        return found.dtype, [device.name for device in found.devices], found.device_map

    assert placed([Device("cpu", int(enough))]) == (torch.float32, ["cpu"], None)
    assert placed([Device("cpu", int(half))]) == (torch.bfloat16, ["cpu"], None)
    assert placed(gpus(enough, enough)) == (torch.float32, ["cuda:0"], None)
    assert placed(gpus(half, enough)) == (torch.float32, ["cuda:1"], {"": "cuda:1"})
    # The host cannot hold what the GPU can: each tensor goes to the GPU by itself.
    assert placed(gpus(enough), host=1000) == (torch.float32, ["cuda:0"], {"": "cuda:0"})
    assert placed(gpus(enough), dtype="bfloat16") == (torch.bfloat16, ["cuda:0"], None)
    dtype, names, device_map = placed(gpus(0.6 * enough, 0.6 * enough))
    assert (dtype, names) == (torch.float32, ["cuda:0", "cuda:1"]) and len(set(device_map.values())) == 2
    with pytest.raises(NotJudged, match=r"in float32 or .* in bfloat16, and .* are free on cuda:0"):
        place(small, AUTO, gpus(half / 2), GIB)
    with pytest.raises(NotJudged, match=r"take [0-9.]+ MiB in float32, and"):
        place(small, replace(AUTO, dtype="float32"), gpus(half), GIB)
    assert 0 < host_memory() < 1 << 50


def test_the_device_map_names_every_module(tmp_path):
    """Layers in their order, everything else where the drafter is; loaded by it, the target is the same."""
    shape = {**SHAPE, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    shape |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    for i, config in enumerate((LlamaConfig(**SHAPE), Qwen3_5TextConfig(**shape))):
        target = build_target(config, tmp_path / str(i))
        size = read_weights(target).size(torch.float32)
        found = place(target, AUTO, gpus(*[0.6 * size / FILLED] * 2), GIB)
        layers = [device for name, device in found.device_map.items() if ".layers." in name]
        assert len(layers) == 4 and layers == sorted(layers) and set(layers) == {"cuda:0", "cuda:1"}
        assert {device for name, device in found.device_map.items() if ".layers." not in name} == {"cuda:0"}
        here = replace(found, device_map=dict.fromkeys(found.device_map, "cpu"))
        ids = torch.arange(9)[None]
        with torch.no_grad():
            assert torch.equal(load(target, here)(ids).logits, target.load_model(torch.float32)(ids).logits)


def test_large_targets(tmp_path):
    """Nothing of these exists but headers and configs: 70 billion weights, and a trillion."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256)
    target = claiming(tmp_path / "70b", config, 70 * 10**9)
    node = gpus(*[79 * GIB] * 8)
    found = place(target, AUTO, node, 500 * GIB)
    assert found.dtype == torch.float32 and 1 < len(found.devices) < 8 and "261 GiB of weights" in str(found)
    each = found.bytes / 80 / GIB
    assert all(list(found.device_map.values()).count(d.name) * each < 79 for d in found.devices)
    assert place(target, AUTO, node[:2], 500 * GIB).dtype == torch.bfloat16
    assert "nearly tie" in str(place(target, AUTO, node[:2], 500 * GIB))
    trillion = claiming(tmp_path / "1t", config, 10**12)
    with pytest.raises(NotJudged, match=r"3,725 GiB in float32 or 1,863 GiB in bfloat16, and 632 GiB .* cuda:0…cuda:7"):
        place(trillion, AUTO, node, 2000 * GIB)
    # Quantised weights stay as they are stored; one-byte ones are not multiplied by four.
    packed = claiming(tmp_path / "fp8", config, 70 * 10**9, kind="F8_E4M3")
    assert read_weights(packed).size(torch.float32) == 70 * 10**9


def test_bad_folders(tmp_path):
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    with pytest.raises(NotJudged, match="no weights"):
        read_weights(Target(str(tmp_path), "tests/none"))
    save_file({"w": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"another layout of the same weights")
    assert read_weights(Target(str(tmp_path), "tests/none")).numbers == 4
    (tmp_path / "model.safetensors").write_bytes(b"\x05")
    with pytest.raises(NotJudged, match="cannot be read"):
        read_weights(Target(str(tmp_path), "tests/none"))
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(NotJudged, match="index of the target's weights"):
        read_weights(Target(str(tmp_path), "tests/none"))
    with pytest.raises(UserError, match=r"evaluate.dtype=fp8"):
        EvaluateConfig(dtype="fp8")
