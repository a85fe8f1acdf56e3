"""Targets that bring an MTP head along: training begins from it, and the trained one goes back under the same names.

The checkpoints are tiny and random; their tensors' names are the published ones of Qwen3-Next and DeepSeek-V3.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from data_pipelines.engines import Target
from data_pipelines.engines.anatomy import tap_hidden_states
from data_pipelines.errors import UserError
from tests.trainer.families import NATIVE, build_target
from trainer.batch import Batch
from trainer.decoding.chain import decode_chain, decode_plain
from trainer.drafters import Committed, build_drafter
from trainer.drafters.mtp import MTPConfig
from trainer.drafters.native_mtp import checkpoint_files, native_names, split_experts
from trainer.export.stitch import stitch
from trainer.target import FrozenTarget

QWEN = {
    "input_proj": "mtp.fc",
    "final_layernorm": "mtp.norm",
    "hidden_layernorm": "mtp.pre_fc_norm_hidden",
    "token_layernorm": "mtp.pre_fc_norm_embedding",
    "": "mtp.layers.0.",
}
DEEPSEEK = {
    "input_proj": "model.layers.{}.eh_proj",
    "final_layernorm": "model.layers.{}.shared_head.norm",
    "hidden_layernorm": "model.layers.{}.hnorm",
    "token_layernorm": "model.layers.{}.enorm",
    "": "model.layers.{}.",
}
SPARE = ("embed_tokens.weight", "shared_head.head.weight")  # copies that DeepSeek's checkpoints carry


def native(name: str, table: dict[str, str], index: int, experts: int) -> list[str]:
    """A module's tensor name → the checkpoint's names of it (several for fused experts)."""
    first, _, rest = name.partition(".")
    if first in table:
        return [f"{table[first]}.{rest}".format(index)]
    if name.endswith("experts.gate_up_proj"):
        name = name.removesuffix("gate_up_proj")
        return [
            f"{table['']}{name}{e}.{kind}.weight".format(index)
            for e in range(experts)
            for kind in ("gate_proj", "up_proj")
        ]
    if name.endswith("experts.down_proj"):
        name = name.removesuffix("down_proj")
        return [f"{table['']}{name}{e}.down_proj.weight".format(index) for e in range(experts)]
    return [f"{table['']}{name}".format(index)]


def build(family: str, folder: Path, heads: int = 1, shards: bool = False, **changes) -> tuple[Target, list[dict]]:
    """A tiny checkpoint with `heads` MTP heads. Returns it and what each of them holds, under a module's names."""
    config = NATIVE[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    target = build_target(config, folder)
    table = QWEN if family == "qwen3_next" else DEEPSEEK
    torch.manual_seed(4)
    modules = build_drafter(MTPConfig(form="chained", steps=heads, warm_start="never"), target.config, None).mtp_layers
    tensors, wanted, last = load_file(folder / "model.safetensors"), [], config.num_hidden_layers
    before = set(tensors)
    for k, module in enumerate(modules):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        names = [n for name in state for n in native(name, table, last + k, 4)]
        plain = {n.removeprefix(table[""].format(last + k)): n for n in names}
        stored = split_experts(state, plain)
        for name, tensor in state.items():
            for n in native(name, table, last + k, 4):
                tensors[n] = stored.get(n.removeprefix(table[""].format(last + k)), tensor).clone()
        if family == "deepseek_v3":
            for name, of in zip(SPARE, ("model.embed_tokens.weight", "lm_head.weight")):
                tensors[f"model.layers.{last + k}.{name}"] = tensors[of].clone()
        wanted.append(state)
    if shards:  # as published: several files and an index; the head in the last one
        parts = {
            "model-00001-of-00002.safetensors": before,
            "model-00002-of-00002.safetensors": tensors.keys() - before,
        }
        for file, names in parts.items():
            save_file({n: tensors[n] for n in names}, folder / file, {"format": "pt"})
        (folder / "model.safetensors").unlink()
        weight_map = {n: file for file, names in parts.items() for n in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return target, wanted


def drafter_for(target, **options):
    torch.manual_seed(6)
    drafter = build_drafter(MTPConfig(**options), target.config, None)
    drafter.warm_start(target)
    return drafter


def same(module, state) -> bool:
    return module.state_dict().keys() == state.keys() and all(
        torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items()
    )


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", NATIVE)
def test_warm_start_reads_the_targets_head(tmp_path, family, shards):
    target, (head,) = build(family, tmp_path / "target", shards=shards)
    assert any("experts.3.down_proj" in name for name in checkpoint_files(tmp_path / "target"))
    assert same(drafter_for(target).mtp_layers[0], head)
    assert not same(drafter_for(target, warm_start="never").mtp_layers[0], head)
    for module in drafter_for(target, form="chained", steps=3).mtp_layers:  # deeper modules begin as the last head
        assert same(module, head)


def test_another_concat_order_computes_the_same(tmp_path):
    """The native order is embedding first; a hidden-first drafter takes the projection's halves swapped."""
    target, _ = build("deepseek_v3", tmp_path / "target")
    frozen = FrozenTarget.load(target, torch.float32)
    rows = committed(target, [5, 3, 80, 41])
    first, other = drafter_for(target), drafter_for(target, concat="hidden_first")
    assert not torch.equal(first.mtp_layers[0].input_proj.weight, other.mtp_layers[0].input_proj.weight)
    drafts = [d.eval().propose(d.new_state(1), rows, frozen, 3) for d in (first, other)]
    assert torch.equal(*drafts)


def committed(target, tokens) -> Committed:
    model = target.load_model(torch.float32)
    with tap_hidden_states(model, ()) as recorder, torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    n = len(tokens)
    following = torch.tensor([[*tokens[1:], 7]])
    return Committed(recorder.taps, recorder.final, following, torch.arange(n)[None], torch.ones(1, n).bool())


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("concat", ["embedding_first", "hidden_first"])
@pytest.mark.parametrize("family", NATIVE)
def test_stitched_back_under_the_same_names(tmp_path, family, concat, shards):
    target, _ = build(family, tmp_path / "target", shards=shards)
    drafter = drafter_for(target, concat=concat)
    before = {name: load_file(file)[name] for name, file in checkpoint_files(tmp_path / "target").items()}
    out = stitch(drafter, target, tmp_path / "untouched")
    for name, file in checkpoint_files(out).items():
        assert torch.equal(load_file(file)[name], before[name]), name  # a warm start that nothing happened to

    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.5)
    out = stitch(drafter, target, tmp_path / "stitched")
    after = {name: load_file(file)[name] for name, file in checkpoint_files(out).items()}
    assert after.keys() == before.keys()
    mtp = {n for n in before if n.startswith(("mtp.", "model.layers.4.")) and not n.endswith(SPARE)}
    buffers = {n for n in mtp if "e_score_correction_bias" in n}  # a buffer: nothing trains it
    for name in before:
        assert torch.equal(after[name], before[name]) == (name not in mtp - buffers), name
    again = drafter_for(Target(str(out), "stitched"), concat=concat)
    assert same(again.mtp_layers[0], drafter.mtp_layers[0].state_dict())
    theirs, ours = sorted(p.name for p in Path(target.path).iterdir()), sorted(p.name for p in out.iterdir())
    assert theirs == ours and not list(tmp_path.glob(".*"))


def test_several_heads(tmp_path):
    """DeepSeek's form with more than one module."""
    target, heads = build("deepseek_v3", tmp_path / "target", heads=2, num_mtp_layers=2)
    drafter = drafter_for(target, form="chained", steps=2)
    assert all(map(same, drafter.mtp_layers, heads))
    again = drafter_for(Target(str(stitch(drafter, target, tmp_path / "out")), "x"), form="chained", steps=2)
    assert all(map(same, again.mtp_layers, heads))
    with pytest.raises(UserError, match="2 MTP heads and this drafter 3 modules"):
        stitch(drafter_for(target, form="chained", steps=3), target, tmp_path / "no")


def test_transformers_own_mtp_model_loads_the_stitched_head_and_drafts_the_same(tmp_path, monkeypatch):
    """Other people's code: `MtpModel` of transformers, on the checkpoint that we wrote."""
    target, _ = build("deepseek_v3", tmp_path / "target", heads=2, num_mtp_layers=2)
    drafter = drafter_for(target, form="chained", steps=2)
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    stitched = Target(str(stitch(drafter, target, tmp_path / "out")), "stitched")
    # Their pattern of the heads' names is made for the 61 layers of the published model.
    patterns = [r"model\.layers\.4.*", r"model\.layers\.5.*"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    model = stitched.load_model(torch.float32)
    theirs = MtpModel.from_pretrained(model)
    tokens = [5, 3, 80, 41, 17, 2, 9]
    rows = committed(stitched, tokens)
    frozen = FrozenTarget(model)
    drafts, _, _ = theirs(
        input_ids=rows.next_tokens,
        last_hidden_states=frozen.normed(rows.final),
        attention_mask=None,
        position_ids=rows.positions + 1,
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )
    assert torch.equal(drafts, drafter.eval().propose(drafter.new_state(1), rows, frozen, 2))


def test_a_vision_towers_layers_are_no_head():
    assert native_names(["vision_tower.encoder.layers.26.mlp.fc1.weight", "model.layers.3.mlp.up_proj.weight"], 4) == []


def test_what_cannot_be_stitched_or_read(tmp_path):
    target, _ = build("deepseek_v3", tmp_path / "target")
    with pytest.raises(UserError, match="after its final norm"):
        stitch(drafter_for(target, hidden="pre_norm"), target, tmp_path / "out")
    drafter = drafter_for(target)
    with torch.no_grad():
        drafter.mtp_layers[0].input_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        stitch(drafter, target, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]  # a refused one leaves nothing
    headless = build_target(NATIVE["deepseek_v3"](), tmp_path / "headless")
    with pytest.raises(UserError, match="0 MTP heads"):
        stitch(drafter_for(headless), headless, tmp_path / "out")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    del tensors["model.layers.4.enorm.weight"]
    save_file(tensors, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"token_layernorm\.weight"):
        drafter_for(target)


def test_transformers_mtp_decoding_accepts_the_same_tokens(tmp_path, monkeypatch):
    """`generate(use_mtp=True)` on the stitched checkpoint, round by round, against our decode."""
    target, _ = build("deepseek_v3", tmp_path / "target", heads=2, num_mtp_layers=2)
    model, frozen = target.load_model(torch.float32), FrozenTarget.load(target, torch.float32)
    prompts = [[5, 17, 3, 80, 2], [9, 44], list(range(20, 31))]
    new = 24
    drafter = drafter_for(target, form="chained", steps=2)
    batches = []
    for prompt, plain in zip(prompts, decode_plain(model, prompts, max_new_tokens=new)):
        ids = torch.tensor(prompt + plain.tokens)
        with tap_hidden_states(model, ()) as recorder, torch.no_grad():
            model(ids[None], use_cache=False)
        n = len(ids)
        supervised = torch.arange(n) >= len(prompt)
        batches.append(
            Batch(ids, torch.zeros(n).long(), torch.arange(n), supervised, recorder.taps[0], recorder.final[0])
        )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(12):  # enough for some drafts to be right, and not all
        for batch in batches:
            targets = drafter.targets(batch, frozen)
            drafter(batch, targets, frozen, 1 / targets.denominators.float())[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    patterns = [r"model\.layers\.4.*", r"model\.layers\.5.*"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    stitched = Target(str(stitch(drafter, target, tmp_path / "out")), "stitched").load_model(torch.float32)
    matches: list[int] = []
    update = MTPCandidateGenerator.update_candidate_strategy

    def watch(self, input_ids, scores, num_matches):
        matches.append(int(num_matches))
        return update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(MTPCandidateGenerator, "update_candidate_strategy", watch)
    ours = decode_chain(model, prompts, drafter.eval(), frozen, draft_tokens=2, max_new_tokens=new)
    for prompt, decoded in zip(prompts, ours):
        matches.clear()
        out = stitched.generate(torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=new)
        assert out[0, len(prompt) :].tolist() == decoded.tokens
        assert matches[1:-1] == decoded.accepted[: len(matches) - 2]  # the first is the prefill; the last may be cut
        assert len(matches) - 1 == decoded.rounds
    accepted = [a for decoded in ours for a in decoded.accepted]
    assert {0, 1, 2} <= set(accepted)  # the comparison is only worth something if drafts are accepted, and not always
