"""A run's configuration: Hydra groups in `conf/`, recipes in `recipes/`, one dataclass next to each class it configures.

Every default lives in its dataclass; the YAML files only choose and override. Composition goes through Hydra, so unknown
keys and wrong types are refused against the dataclasses; this module turns those refusals into messages for people.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
import recipes
from data_pipelines.conversations.config import DataConfig
from data_pipelines.engines.targets import TargetConfig
from data_pipelines.errors import UserError, check_choice
from data_pipelines.files import write_text_atomically
from data_pipelines.plugins import load_plugins
from data_pipelines.stores.config import StoreConfig
from data_pipelines.stream.config import SourceConfig

from .checkpoint import CheckpointConfig
from .cluster import ClusterConfig
from .decoding.config import EvaluateConfig
from .drafters import DRAFTERS, DrafterConfig
from .export.config import ExportConfig
from .optim import OptimConfig
from .parallel.config import ParallelConfig
from .tracking import TrackerConfig


@dataclass
class RunConfig:
    """One run. `recipe` is the name of the file that it came from; `run_dir` holds everything that it leaves."""

    recipe: str = ""
    run_dir: str = "outputs/${recipe}"
    seed: int = 0
    epochs: int = 1
    max_steps: int = 0  # 0: all steps of all epochs
    global_batch: int = 8  # packs in one optimizer step, over all ranks
    resume: str = "auto"  # auto: from the newest whole checkpoint of run_dir; never; or a checkpoint's path
    plugins: list[str] = field(default_factory=list)  # modules of your own that register something (docs/extending.md)
    allow: list[str] = field(default_factory=list)  # keys that may differ from the checkpoint's, such as optim.lr
    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    drafter: Any = MISSING
    source: SourceConfig = MISSING
    store: StoreConfig = MISSING
    parallel: ParallelConfig = MISSING
    optim: OptimConfig = MISSING
    tracker: TrackerConfig = MISSING
    cluster: ClusterConfig = MISSING
    evaluate: EvaluateConfig = MISSING
    export: ExportConfig = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if "/" not in self.resume:  # a checkpoint's path
            check_choice("resume", self.resume, ("auto", "never"))
        if not self.run_dir.strip():
            raise UserError("run_dir is empty", fix="run_dir=outputs/<name>, or leave it out")
        for key, least in (("epochs", 1), ("global_batch", 1), ("max_steps", 0)):
            if getattr(self, key) < least:
                raise UserError(f"{key} is {getattr(self, key)}; it must be at least {least}")
        if isinstance(self.cluster, ClusterConfig) and isinstance(self.parallel, ParallelConfig):
            self.check_ranks(self.cluster.ranks)
        if isinstance(self.source, SourceConfig) and isinstance(self.parallel, ParallelConfig):
            patience, timeout = self.source.patience_seconds, self.parallel.timeout_seconds
            if self.source.streams and timeout <= patience:
                raise UserError(
                    f"parallel.timeout_seconds={timeout:g} is not more than source.patience_seconds={patience:g}: ranks "
                    "would give up a rank that still waits for its packs",
                    fix=f"use parallel.timeout_seconds={patience + 60:g} or more, or a lower source.patience_seconds",
                )

    def check_ranks(self, ranks: int) -> None:
        """Raises UserError unless so many ranks can share out the packs of each step evenly."""
        self.parallel.check_size(ranks)
        sharers = ranks // self.parallel.context
        if self.global_batch % sharers:
            among = f" that share packs by {self.parallel.context}" if self.parallel.context > 1 else ""
            raise UserError(
                f"global_batch={self.global_batch} packs cannot be shared out evenly over {ranks} ranks{among}",
                fix=f"use a multiple of {sharers}",
            )

    @property
    def has_store(self) -> bool:
        """Whether Mooncake's master runs, and processes lend it memory."""
        return self.source.streams and self.store.name == "mooncake"

    @property
    def draft_config(self) -> DrafterConfig:
        return self.drafter


_SCHEMAS = {
    "target": TargetConfig,
    "data": DataConfig,
    "source": SourceConfig,
    "store": StoreConfig,
    "parallel": ParallelConfig,
    "optim": OptimConfig,
    "tracker": TrackerConfig,
    "cluster": ClusterConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
}


def _register_schemas() -> None:
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for group, schema in _SCHEMAS.items():
        store.store(group=group, name="schema", node=schema)
    for name, drafter in DRAFTERS.items():
        store.store(group="drafter", name=f"{name}_schema", node=drafter.Config)
        store.store(group="drafter", name=name, node=drafter.Config)


def recipe_names() -> list[str]:
    return sorted(p.stem for p in Path(recipes.__path__[0]).glob("*.yaml"))


def load_config(recipe: str, overrides: list[str] | None = None, config_dir: str | None = None) -> RunConfig:
    """Compose and check a run's configuration.

    recipe: a name in `recipes/` (or in config_dir), or a path to a YAML file. config_dir: recipes and groups of the
    person's own, such as `cluster/my_site.yaml`, beside those that ship; a recipe's own folder is looked into anyway.
    Raises UserError on an unknown recipe or key, a wrong type or an impossible value.
    """
    overrides = list(overrides or [])
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"'{override}' is not an override", fix="write key=value, such as optim.lr=1e-3")
    if config_dir and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir} is not a folder")
    folder, name = _find_recipe(recipe, config_dir)
    own = [str(Path(config_dir).resolve())] if config_dir else []
    load_plugins(_plugins(Path(folder) / f"{name}.yaml", overrides))
    composed = _compose(folder, name, overrides, own)
    try:
        OmegaConf.resolve(composed)
        _refuse_unknown(composed, RunConfig)
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise UserError(f"no value for {', '.join(missing)}", where=f"recipe {name}", fix=f"add {missing[0]}=…")
        return OmegaConf.to_object(composed)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error), where=f"recipe {name}") from error


def _plugins(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """What the recipe's file or the command line names: their groups and keys exist once they are imported."""
    given = [override for override in overrides if override.startswith("plugins=")]
    named = OmegaConf.from_dotlist(given[-1:]) if given else OmegaConf.load(recipe)
    plugins = OmegaConf.to_container(named).get("plugins") or [] if isinstance(named, DictConfig) else []
    if not isinstance(plugins, list):
        raise UserError(f"plugins={plugins} is no list", fix=f"plugins=[{plugins}]")
    return [str(module) for module in plugins]


def save_config(config: RunConfig, path: Path) -> None:
    write_text_atomically(path, OmegaConf.to_yaml(OmegaConf.structured(config)))


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that `save_config` wrote, with `key=value` overrides; refuses what this version does not know."""
    if not path.exists():
        raise UserError(f"{path} does not exist", fix="name the folder of a run, the one that holds config.yaml")
    raw = OmegaConf.load(path)
    load_plugins(OmegaConf.select(raw, "plugins", default=[]))
    name = OmegaConf.select(raw, "drafter.name")
    if name not in DRAFTERS:
        raise UserError(f"unknown drafter {name!r}", where=str(path), fix=_nearest(str(name), DRAFTERS))
    schemas = {**_SCHEMAS, "drafter": DRAFTERS[name].Config}
    base = OmegaConf.structured(RunConfig)
    for group, schema in schemas.items():
        base[group] = OmegaConf.structured(schema)
    try:
        merged = OmegaConf.merge(base, raw, OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        refused = next((o.partition("=")[0] for o in overrides if o.partition("=")[0] == error.full_key), None)
        fix = _nearest(refused, all_keys(name)) if refused else None
        raise UserError(_first_line(error), where=str(path), fix=fix) from error


def _find_recipe(recipe: str, config_dir: str | None) -> tuple[str, str]:
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        path = Path(recipe).resolve()
        path = path if path.suffix else path.with_suffix(".yaml")
        if not path.exists():
            raise UserError(f"recipe file {path} does not exist")
        return str(path.parent), path.stem
    folders = [Path(config_dir).resolve()] if config_dir else []
    folders.append(Path(recipes.__path__[0]))
    for folder in folders:
        if (folder / f"{recipe}.yaml").exists():
            return str(folder), recipe
    names = recipe_names()
    raise UserError(
        f"there is no recipe '{recipe}'",
        where=", ".join(map(str, folders)),
        fix=f"{_nearest(recipe, names) or ''} (recipes: {', '.join(names)})".strip(),
    )


def _compose(folder: str, name: str, overrides: list[str], own: list[str]) -> DictConfig:
    _register_schemas()
    folders = ",".join(f"file://{path}" for path in [*own, conf.__path__[0], recipes.__path__[0]])
    searchpath = f"hydra.searchpath=[{folders}]"
    recipe_override = [] if any(o.startswith("recipe=") for o in overrides) else [f"recipe={name}"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=folder):
        try:
            return compose(config_name=name, overrides=[searchpath, *recipe_override, *overrides])
        except (ConfigCompositionException, MissingConfigException, OmegaConfBaseException, HydraException) as error:
            raise UserError(_explain(error, name), where=f"recipe {name}", fix=_suggest(error, name)) from error


def _explain(error: Exception, name: str) -> str:
    texts = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
    text = " ".join(line.strip() for t in texts for line in t.splitlines() if line.strip())
    for noise in (
        r"\s*(full_key|reference_type|object_type)[:=] ?\S*",
        r"To append to your config use \S+",
        r"Available options in .*",
        r"See https://hydra\S*.*",
    ):
        text = re.sub(noise, "", text)
    return text.strip() or f"recipe {name} cannot be composed"


def _suggest(error: Exception, name: str) -> str | None:
    """The nearest right name for the key or option that Hydra refused."""
    text = f"{error} {error.__cause__ or ''}"
    if match := re.search(r"Could not override '(\w+\.options).*Key '(\w+)' is not in struct", text, re.DOTALL):
        return f"+{match[1]}.{match[2]}=… adds a key of your own"
    if match := re.search(r"Could not override '([\w.]+)'", text):
        chosen = next((n for n, d in DRAFTERS.items() if f"'{d.Config.__name__}'" in text), None)
        if chosen and match[1] not in (keys := all_keys(chosen)) and match[1] in all_keys():
            others = [n for n in DRAFTERS if match[1] in all_keys(n)]
            return f"{match[1]} belongs to drafter={' and drafter='.join(others)}; {_nearest(match[1], keys)}"
        return _nearest(match[1], all_keys(chosen))
    if match := re.search(r"(?:Could not find|Cannot find|load) '(\w+)/(\w+)'", text):
        group = Path(conf.__path__[0]) / match[1]
        options = sorted(p.stem for p in group.glob("*.yaml")) if group.is_dir() else []
        options = sorted(DRAFTERS) if match[1] == "drafter" else options
        return f"{_nearest(match[2], options) or ''} ({match[1]}: {', '.join(options)})".strip()
    if match := re.search(r"Could not override '(\w+)'.*No match in the defaults list", text, re.DOTALL):
        return _nearest(match[1], list(_SCHEMAS))
    if match := re.search(r"Key '(\w+)' (?:is )?not in", text):
        return _nearest(match[1], all_keys())
    return None


def all_keys(drafter: str | None = None) -> list[str]:
    """Every key of a run, dotted; those of one drafter, or of all."""
    keys: list[str] = []

    def walk(schema: Any, prefix: str) -> None:
        for f in fields(schema):
            keys.append(prefix + f.name)
            nested = _SCHEMAS.get(f.name) if not prefix else None
            default = getattr(schema, f.name, None) or (
                f.default_factory() if callable(getattr(f, "default_factory", None)) else None  # type: ignore[misc]
            )
            if nested is None and is_dataclass(default):
                nested = type(default)
            if nested:
                walk(nested, f"{prefix}{f.name}.")

    walk(RunConfig, "")
    for chosen in [DRAFTERS[drafter]] if drafter else DRAFTERS.values():
        keys.extend(f"drafter.{f.name}" for f in fields(chosen.Config))
    return keys


def _nearest(name: str, options: Any) -> str | None:
    options = list(options)
    group, _, key = name.rpartition(".")
    if group:  # within the group that was named
        siblings = [o.rpartition(".")[2] for o in options if o.rpartition(".")[0] == group]
        found = difflib.get_close_matches(key, siblings, n=1)
        if siblings and not found:
            return f"{group} has {', '.join(siblings)}"
        found = [f"{group}.{f}" for f in found]
    else:
        found = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        # or a bare key of some group: `lr` for `optim.lr`
        found = found or [o for o in options if o.rpartition(".")[2] == name][:1]
    return f"did you mean {found[0]}?" if found else None


def _refuse_unknown(node: DictConfig, schema: Any, prefix: str = "") -> None:
    """`+key=value` opens a structured node in Hydra; a run takes no key that its dataclass does not have."""
    known = {f.name for f in fields(schema)}
    for key in node:
        if key not in known:
            options = all_keys()
            raise UserError(f"unknown key {prefix}{key}", fix=_nearest(f"{prefix}{key}", options))
        value = None if OmegaConf.is_missing(node, key) else node._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none():
            inner = OmegaConf.get_type(value)
            if is_dataclass(inner):
                _refuse_unknown(value, inner, f"{prefix}{key}.")


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and key not in text else text
