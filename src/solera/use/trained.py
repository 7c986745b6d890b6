"""The trained models of a run: found in the run directory and rebuilt.

A model's file describes its input (shape, normalisation); the run's config.toml says how the model is built. A run that
was started from Python with the user's own modules has no config.toml: the user loads the files into those modules.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from ..core.errors import ConfigError, RunError
from ..core.files import check_file, open_file
from ..data.dataset import Spec
from ..data.encodings import Columns, Text
from ..models.factory import ModelFactory, ModelsConfig, tokenizer_of
from ..models.lora import base_digest, lora_from, merged
from ..place.placement import numerics
from ..runs.read import Run, read_run
from ..runs.trust import code_of_run, warn_if_changed
from ..runs.words import dig
from ..scenario.server import initialised
from ..train.teachers import Ensemble

log = logging.getLogger("solera")
MEMBER = re.compile(r"ensemble-(\d+)")


@dataclasses.dataclass(frozen=True)
class Trained:
    """The models of a finished run."""

    run: Run
    spec: Spec  # without its columns, which are those of the tokenizers
    architectures: dict[str, str]  # name of the model -> its architecture
    members: list[tuple[str, float]]  # of the saved ensemble: name and share
    rule: str  # how the ensemble combines them
    trust_code: bool = False  # import the code that the run names, even if the run is another user's
    tokenizers: tuple[tuple[str, int], ...] = ()  # that models bring: name and tokens of a text, in order
    servers: str | None = None  # the model that only the server has
    bases: dict[str, str] = dataclasses.field(default_factory=dict)  # architecture -> digest of its frozen base (LoRA)

    @property
    def names(self) -> list[str]:
        """The models, without the members of the ensemble."""
        return [name for name in self.architectures if not MEMBER.fullmatch(name)]

    @property
    def seed(self) -> int:
        return int(self.run.settings.get("run.seed", 0))

    @cached_property
    def models(self) -> ModelsConfig:
        """The models as the run's configuration describes them."""
        tables = self.run.config.get("models", {})
        try:
            return ModelsConfig(**{**tables, "lora": lora_from(tables.get("lora", False), "models.lora")})
        except (TypeError, ConfigError) as e:
            raise RunError(f"{self.run.path}: its models cannot be built again ({e})") from None

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """The columns of each tokenizer in a sample; empty if all models have the data set's."""
        if not self.tokenizers:
            return ()
        here = {e.name: e for e in (tokenizer_of(given, self.models) for given in self.models.called.values())}
        columns, end = [], 0
        for name, length in self.tokenizers:
            if name not in here:
                there = ", ".join(here)
                raise RunError(f"{self.run.path} was trained with the tokenizer {name!r}; its models now have {there}")
            columns.append(Columns(here[name], end, end := end + length))
        return tuple(columns)

    def tokens(self, texts: Sequence[Text]) -> Tensor:
        """Texts as samples of these models."""
        return dataclasses.replace(self.spec, columns=self.columns).tokens(texts)

    def choose(self, name: str | None) -> str:
        """The model called `name`. Default: the server's own model, or the only one."""
        if name is not None:
            if name not in self.architectures:
                there = ", ".join(self.architectures)
                raise ConfigError(f"--model {name}: {self.run.path} has no such model; it has {there}")
            return name
        if not self.names:
            raise RunError(f"{self.run.path} has no global model: {_stay_with_clients(self.run)}")
        if self.servers is not None:
            return self.servers
        if len(self.names) > 1:
            raise ConfigError(f"{self.run.path} has several models: choose one with --model: {', '.join(self.names)}")
        return self.names[0]

    @numerics()
    def model(self, name: str) -> nn.Module:
        """The model, rebuilt and in eval mode."""
        A = self.architectures[name]
        with code_of_run(self.run.path, self.trust_code):
            try:
                spec = dataclasses.replace(self.spec, columns=self.columns)
                factory = ModelFactory(spec, self.models, {A: self.models.called.get(A, A)})
            except ConfigError as e:
                raise RunError(f"{self.run.path}: {e}; {_load_it_yourself(self.run.path, name)}") from e
        warn_if_changed(self.run.path, factory.infos[A].name)
        check_sha256(self.run, self.file(name))
        try:
            weights = safetensors.torch.load_file(self.file(name))
            model = initialised(lambda: factory.make(A, weights), self.seed, A)
        except (RuntimeError, OSError, safetensors.SafetensorError) as e:
            raise RunError(f"{self.file(name)} does not fit {A!r}: {' '.join(str(e).split())[:200]}") from None
        if (found := base_digest(model)) != (wanted := self.bases.get(A)):
            raise RunError(
                f"{self.run.path}: {A!r} was trained on a frozen base (LoRA) with the digest {wanted}, but the one "
                f"found here has {found}: use the pretrained weights with which it was trained"
            )
        model = model if found is None else merged(model)
        model.eval()
        return model

    def file(self, name: str) -> Path:
        return self.run.path / "models" / f"{name}.safetensors"

    def ensemble(self) -> Ensemble:
        """The saved ensemble."""
        if not self.members:
            raise RunError(
                f"{self.run.path} has no saved ensemble: method {self.run.method!r} does not save one (methods whose "
                "result is an ensemble do, such as fedensemble)"
            )
        models = [self.model(name) for name, _ in self.members]
        return Ensemble(models, self.rule, [share for _, share in self.members])  # type: ignore[arg-type]


def _load_it_yourself(path: Path, name: str) -> str:
    return (
        "build your module and load its weights yourself: "
        f"module.load_state_dict(safetensors.torch.load_file({str(path / 'models' / f'{name}.safetensors')!r}))"
    )


def _stay_with_clients(run: Run) -> str:
    return f"with {run.method!r} every client has its own model, which stays on the client"


def sha256_in(run: Run) -> dict[str, Any]:
    """The sha256 of each model that a finished run has written, by its name; an unfinished one has none."""
    found = dig(run.summary, "sha256")
    return found if isinstance(found, dict) else {}


def check_sha256(run: Run, model: Path) -> None:
    """Refuse a model's file that is not the one that the run wrote: a flipped bit would give other predictions."""
    wanted = sha256_in(run).get(model.stem)
    if wanted is None:
        log.warning("%s: summary.json has no sha256 of it, so damage would not be noticed", model)
        return
    try:
        with open_file(model, None) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
    except OSError as e:
        raise RunError(f"{model} cannot be read: {e.strerror}") from None
    if found != wanted:
        raise RunError(
            f"{model} is damaged or was changed: its sha256 is {found[:16]}..., and summary.json says "
            f"{str(wanted)[:16]}...; restore the file, or run again"
        )


def open_run(path: str | os.PathLike[str], trust_code: bool = False) -> Trained:
    """The models of the run in a directory. Code that its configuration names (the user's own models or data) is
    imported when needed, if the run is this user's own, or else with `trust_code=True`."""
    run = read_run(path)
    files = sorted((run.path / "models").glob("*.safetensors"), key=lambda f: _order(f.stem))
    if not files and not run.finished:
        raise RunError(f"{path} has no models yet: the run is not finished; continue it with `solera resume {path}`")
    facts = {file.stem: _facts(file) for file in files}
    if gone := [name for name in sha256_in(run) if name not in facts]:
        raise RunError(f"{run.path}/models lacks {gone[0]}.safetensors, which the run wrote: restore it, or run again")
    if not files:
        raise RunError(f"{path} has no global model: {_stay_with_clients(run)}")
    if not (run.path / "config.toml").is_file():
        raise RunError(f"{path} was started from Python (no config.toml): {_load_it_yourself(run.path, files[0].stem)}")
    first = next(iter(facts.values()))
    try:
        takes = json.loads(first["input"])
        read = tuple((str(name), int(length)) for name, length in takes.get("encodings", ()))
        kinds = {name: f["architecture"] for name, f in facts.items()}
        members = [(name, float(f["share"])) for name, f in facts.items() if MEMBER.fullmatch(name)]
        rule = next((f["rule"] for f in facts.values() if "rule" in f), "avg_logits")
        classes, called = int(first["classes"]), tuple(map(str, json.loads(first.get("class_names", "[]"))))
        if len(called) not in (0, classes):
            raise ValueError(f"{len(called)} names for {classes} classes")
        bases = {f["architecture"]: f["base"] for f in facts.values() if "base" in f}
        constants = tuple(takes["mean"]), tuple(takes["std"])
        spec = Spec(run.name, tuple(takes["shape"]), classes, *constants, takes["vocabulary"], called)
        servers = next((name for name, f in facts.items() if f.get("kind") == "server"), None)
        return Trained(run, spec, kinds, members, rule, trust_code, read, servers, bases)
    except (KeyError, ValueError, TypeError) as e:
        for file in files:  # a flipped bit in a description is no other version
            check_sha256(run, file)
        raise RunError(f"{files[0]} lacks its description ({e}): it was written by another version of solera") from None


def _order(name: str) -> tuple[bool, int, str]:
    """Models by name, then the members of the ensemble by number."""
    member = MEMBER.fullmatch(name)
    return bool(member), int(member[1]) if member else 0, name


def _facts(file: Path) -> dict[str, str]:
    try:
        check_file(file)
        with safetensors.safe_open(file, "pt") as opened:
            return opened.metadata() or {}
    except (OSError, safetensors.SafetensorError) as e:
        raise RunError(f"{file} is damaged: {e}") from None
    except MemoryError:
        raise RunError(
            f"{file} is damaged: it claims {file.stat().st_size / 1e9:,.0f} GB, more than fit here"
        ) from None
