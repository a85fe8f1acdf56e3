"""Drafters on disk: an export (ours or another's), a run, a checkpoint; found, read, checked, built."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from data_pipelines.engines import Target
from data_pipelines.errors import UserError
from data_pipelines.run_folder import RunFolder

from ..checkpoint import find_checkpoint, read_weights
from ..drafters import DRAFTERS, Drafter, DrafterConfig, build_drafter
from ..seal import RUN_FILE, Broken, verify
from ..target import FrozenTarget
from .reading import DEFAULTS, complete, own_layer, proposed_tokens, verifier_name

log = logging.getLogger("trainer")

# In exports for engines; here they are the target's own, unless the drafter has them itself. (The verifier's are in some
# exports by mistake.)
_THE_TARGETS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_CHUNK_BYTES = 1 << 23


@dataclass(frozen=True, eq=False)
class SavedDrafter:
    """config: what it is; how to train it is left at the defaults. kept: int64 [D], ascending, None for the whole
    vocabulary. weights: of its modules, floats in fp32. head: [D, H], the head that came along, in its stored dtype.
    tokens: how many an engine is told to draft a round. verifier: what it calls its target. sha256: of its bytes."""

    path: Path
    config: DrafterConfig
    kept: torch.Tensor | None
    weights: dict[str, torch.Tensor]
    head: torch.Tensor | None
    tokens: int | None
    verifier: str
    sha256: str

    def fill(self, drafter: Drafter) -> None:
        """Put the weights into a drafter of this shape. One that has a head of its own, and got none, keeps what it has."""
        weights = dict(self.weights)
        own = drafter.state_dict()
        if "lm_head.weight" in own:
            weights["lm_head.weight"] = own["lm_head.weight"] if self.head is None else self.head.float()
        try:
            drafter.load_state_dict(weights)
        except RuntimeError as error:
            reasons = [line.strip() for line in str(error).splitlines()[1:]]
            raise UserError(
                "the drafter's tensors are not those that its config asks for: " + " ".join(reasons[:4]),
                where=str(self.path),
                fix="this target is not the one that it belongs to, or the export is not whole",
            ) from error

    def build(self, target_config, frozen: FrozenTarget | None = None) -> Drafter:
        """The drafter in fp32, in eval mode. frozen: needed by one whose head is the target's and trained (a checkpoint's
        has its own)."""
        drafter = build_drafter(self.config, target_config, self.kept)
        if frozen is not None:
            drafter.start_head(frozen)
        self.fill(drafter)
        return drafter.eval()

    def has_own_head(self, frozen: FrozenTarget) -> bool:
        """Whether the head that came along is another than the target's rows, in the dtype that it is stored in.

        Raises UserError when it is, and this kind of drafter has no head of its own.
        """
        if self.head is None:
            return False
        rows = frozen.draft_head(self.kept).to(self.head.device, self.head.dtype)
        if torch.equal(rows, self.head):
            return False
        if not hasattr(self.config, "train_head"):
            raise UserError(
                f"the head that came with this drafter is not the target's, and a {self.config.name} drafter has no other",
                where=str(self.path),
                fix="this target is not the one that it was made for",
            )
        return True

    def warn_of_another_target(self, target: Target) -> None:
        """By name only: a folder of the same name elsewhere is taken for the same target."""
        said, *known = (Path(name).name for name in (self.verifier, target.name, target.path))
        if said and said not in known:
            log.warning(
                "%s says that it drafts for %s, and this target is %s: shapes fit, but look at its acceptance",
                self.path, self.verifier, target.name,
            )  # fmt: skip


def find_drafter(name: str) -> Path:
    """The folder of an export or of a checkpoint. name: one of these, a run's folder (its export, or without one its
    newest checkpoint), or a hub id."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise UserError(f"{name} does not exist", fix="name an export, a run's folder, or a hub id (org/name)")
        return _download(name)
    if (folder / RUN_FILE).exists():
        return folder
    if (folder / "config.json").exists():
        return folder
    run = RunFolder(folder)
    if (run.export / "config.json").exists():
        return run.export
    if run.checkpoints.is_dir():
        return find_checkpoint(folder)
    raise UserError(
        "neither an export nor a run: there is no config.json and no checkpoint",
        where=str(folder),
        fix="name an export, a run's folder, or a hub id (org/name)",
    )


def read_drafter(path: Path, target: Target) -> SavedDrafter:
    """The drafter in a folder that `find_drafter` gave.

    Raises UserError when it is not whole, of a kind or shape that is not built here, or made for a target of another shape.
    """
    saved = _read_checkpoint(path) if (path / RUN_FILE).exists() else read_export(path, target.config)
    saved.warn_of_another_target(target)
    return saved


def read_export(path: Path, target_config) -> SavedDrafter:
    """target_config: the text config of the target that it drafts for."""
    files = [path / "config.json", *sorted(path.glob("*.safetensors"))]
    try:
        given = json.loads(files[0].read_text())
        if not isinstance(given, dict):
            raise ValueError("config.json holds no object")
        if len(files) == 1:
            raise OSError("there is no *.safetensors file")
        tensors = {name: tensor for file in files[1:] for name, tensor in load_file(file).items()}
        digest = _sha256(files)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"not an exported drafter: {error}", where=str(path), fix="export it again") from error
    where = str(path)
    exported = complete(given, target_config, where)
    kind = DRAFTERS[exported["speculators_model_type"]]
    kept = _kept(tensors, exported.get("draft_vocab_size", target_config.vocab_size), target_config.vocab_size, where)
    try:
        config = kind.config_from_export(exported)
    except UserError as error:
        raise UserError(error.what, where=where, fix=error.fix) from error
    if config.name in DEFAULTS and config.name != "mtp":
        config = replace(config, layer=own_layer(exported["transformer_layer_config"], config.name))
    head = tensors.get("lm_head.weight")
    if hasattr(config, "train_head"):
        config = replace(config, train_head=head is not None)
    if getattr(config, "mask_token", 0) < 0:
        raise UserError(
            "mask_token_id is null: nothing says what fills a block", where=where, fix="put the token's id there"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and name not in _THE_TARGETS and not torch.isfinite(tensor).all():
            raise UserError(f"{name} holds values that are not finite", where=where, fix="take another export")
    weights = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if name not in (*_THE_TARGETS, "d2t", "t2d")
    }
    if kept is not None:
        membership = torch.zeros(target_config.vocab_size, dtype=torch.bool)
        membership[kept] = True
        weights.update(d2t=kept - torch.arange(len(kept)), t2d=membership)
    verifier, tokens = verifier_name(exported), proposed_tokens(exported)
    return SavedDrafter(path, replace(config, draft_vocab_size=0 if kept is None else len(kept)), kept, weights, head,
                        tokens, verifier, digest)  # fmt: skip


def _read_checkpoint(path: Path) -> SavedDrafter:
    """Of a run of this project: what the drafter is stands in the seal."""
    try:
        found = verify(path)
    except Broken as broken:
        raise UserError(f"the checkpoint {path.name} is broken: {broken}", where=str(path)) from broken
    given = {key.removeprefix("drafter."): v for key, v in found.identity.items() if key.startswith("drafter.")}
    kind = DRAFTERS.get(str(given.get("name")))
    known = {f.name for f in fields(kind.Config)} if kind else set()
    if not known >= given.keys() - {"init_sha256"}:
        raise UserError("the checkpoint is of another version of this project", where=str(path), fix="export it there")
    config = kind.Config(**{key: value for key, value in given.items() if key in known})
    tensors = read_weights(path)
    kept = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
    head = tensors.pop("lm_head.weight", None)
    return SavedDrafter(path, config, kept, tensors, head, None, "", found.checksum)


def _kept(tensors: dict[str, Any], size: int, vocab_size: int, where: str) -> torch.Tensor | None:
    """The target's ids of the draft vocabulary, from the offsets; checked against the membership, if that is there."""
    if size == vocab_size:
        return None
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and t2d is None:
        raise UserError(
            f"the draft vocabulary has {size} of {vocab_size} tokens, and neither d2t nor t2d says which", where=where,
            fix="export it again",
        )  # fmt: skip
    member = None if t2d is None else t2d.bool().nonzero().squeeze(1)
    kept = member if d2t is None else d2t.long() + torch.arange(len(d2t))
    wrong = (
        "is not as long as draft_vocab_size" if len(kept) != size
        else "is not ascending, inside the vocabulary" if not (kept.diff() > 0).all() or kept[0] < 0 or kept[-1] >= vocab_size
        else "and t2d contradict each other" if member is not None and not torch.equal(member, kept)
        else ""
    )  # fmt: skip
    if wrong:
        raise UserError(
            f"d2t {wrong}", where=where, fix="d2t holds offsets: draft token i is the target's token i + d2t[i]"
        )
    return kept


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{hub_id} is neither a folder here nor a drafter that the hub gives",
            where=str(error).splitlines()[0],
            fix="check the name and the network; a gated one needs `hf auth login`",
        ) from error
