"""Encoders of the Hugging Face hub: from the local cache or else fetched, all files from one commit.

Files are fetched in two steps: configuration and tokenizer first, which are small and show whether the model can be
used, then the weights of the same commit. Pickles, code and other formats of the weights are never fetched.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from solera.core.errors import ConfigError, without_addresses

SMALL = ["*.json", "*.txt", "*.model"]  # configuration and tokenizer
WEIGHTS = ["model.safetensors", "model-*.safetensors"]  # whole or in parts
FOLDERS = ["[!1]*/*"]  # other forms of the model (onnx/, openvino/ ...); but 1_Pooling/ says what its features are
PICKLES = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"]
INSTALL = "pip install 'solera[text]'"
log = logging.getLogger("solera")


def imported(module: str, name: str) -> Any:
    """A package that the model `name` needs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"model {name!r} needs the package {module}; install it with: {INSTALL}") from None


class Repository:
    """A repository `owner/name` or `owner/name@revision` of the hub, as the model `name` of a run."""

    def __init__(self, where: str, name: str):
        self.hub = imported("huggingface_hub", name)
        for part in ("constants", "errors", "utils"):
            imported(f"huggingface_hub.{part}", name)  # submodules that the package does not import itself
        self.name = name
        self.id, _, self.revision = where.partition("@")

    def folder(self) -> Path:
        """The folder with its configuration and tokenizer, named after the commit that they are from."""
        found = self._cached(self.revision, SMALL)
        if found is not None and self._known(found):
            return found
        try:
            with self._explained():
                return self._fetched("configuration and tokenizer", self.revision, SMALL, self._files(self.revision))
        except ConfigError as e:
            if found is None:
                raise
            log.warning("%s: used as another program left it in the cache, perhaps without all files (%s)", found, e)
            return found

    def fetch_weights(self, folder: Path) -> None:
        """Put the weights of the commit of `folder` beside its configuration, unless they are there."""
        if self._cached(folder.name, WEIGHTS) and any(folder.glob("model*.safetensors")):
            return
        with self._explained():
            files = self._files(folder.name)
            if not _chosen(files, WEIGHTS):
                raise no_weights(self.name, f"the repository {self.id}", list(files), f"hf:{self.id}@refs/pr/1")
            self._fetched("weights", folder.name, WEIGHTS, files)

    def _cached(self, revision: str, patterns: list[str]) -> Path | None:
        """The folder of a revision in the cache, if it is complete."""
        try:
            return Path(self._snapshot(revision, patterns, local_files_only=True))
        except (OSError, ValueError) as e:  # an invalid name is reported when it is fetched
            log.debug("%s is not in the cache: %s", self.name, e)
            return None

    def _known(self, folder: Path) -> bool:
        """True if the cache knows which files the commit has: other programs may have fetched single files."""
        try:
            return bool(self.hub.get_cached_repo_tree(self.id, revision=folder.name))
        except self.hub.errors.CachedRepoTreeNotFoundError:
            return False

    def _files(self, revision: str) -> dict[str, int]:
        """The files on the hub, with sizes in bytes."""
        wait = self.hub.constants.HF_HUB_ETAG_TIMEOUT
        told = self.hub.model_info(self.id, revision=revision or None, files_metadata=True, timeout=wait)
        return {file.rfilename: file.size or 0 for file in told.siblings}

    def _fetched(self, what: str, revision: str, patterns: list[str], files: dict[str, int]) -> Path:
        size = sum(files[file] for file in _chosen(files, patterns)) / 1e6
        log.warning("fetching the %s of %s from the hub (%.1f MB)", what, self.name, size)
        with self._quiet():
            return Path(self._snapshot(revision, patterns))

    def _snapshot(self, revision: str, patterns: list[str], **more: Any) -> str:
        base: Any = self.hub.utils.tqdm

        class Bars(base):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **{"disable": None, **kwargs, "leave": False})  # on terminals only

        chosen = {"allow_patterns": patterns, "ignore_patterns": FOLDERS}
        path: str = self.hub.snapshot_download(self.id, revision=revision or None, tqdm_class=Bars, **chosen, **more)
        return path

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Suppress the library's notes about retries: they contain addresses."""
        told = self.hub.utils.logging
        level = told.get_verbosity()
        told.set_verbosity_error()
        try:
            yield
        finally:
            told.set_verbosity(level)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as e:  # the library raises errors of its own, of its transport and of the system
            raise ConfigError(
                f"model {self.name!r} is not in the cache of the hub and cannot be fetched: {self._why(e)}; or copy it "
                "to a folder and name that (hf:./folder), or use the packaged encoders (minilm-l6, minilm-l3 ...)"
            ) from None

    def _why(self, error: BaseException) -> str:
        """The reason and the way out, without the address: it may hold a password."""
        errors = self.hub.errors
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
            error = error.__cause__
        login = "log in (hf auth login) or set HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            return f"the owner of {self.id} gives access on request; ask for it on its page of the hub, then {login}"
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        if isinstance(error, errors.RepositoryNotFoundError) or status == 401:  # indistinguishable without a login
            return f"the hub has no repository {self.id}, or it is private; check the name, or {login}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.id} has no revision {self.revision!r}; check what follows the @"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set; unset it"
        if status is not None:
            return f"the hub answers with status {status}; try again later, or {login}"
        if type(error).__module__.startswith("httpx"):
            return f"the connection to the hub failed ({type(error).__name__}); try again"
        return f"{type(error).__name__}: {without_addresses(' '.join(str(error).split()))[:160]}"


def no_weights(name: str, place: str, files: Sequence[str], instead: str | None = None) -> ConfigError:
    """The error of a model without safetensors. `instead`: where they may be."""
    pickles = [f for pattern in PICKLES for f in sorted(fnmatch.filter(files, pattern)) if "/" not in f]
    there = f"only {pickles[0]}, a pickle, which can run code and is never opened" if pickles else "no weights"
    look = f"look for them in its pull requests on the hub ({instead}), " if instead else ""
    return ConfigError(
        f"model {name!r}: {place} has {there}; {look}save it as model.safetensors (save_pretrained does), or set "
        'models.weights = "random" to begin with random weights'
    )


def _chosen(files: dict[str, int], patterns: list[str]) -> list[str]:
    """The files that the library would fetch."""
    return [
        f
        for f in files
        if any(fnmatch.fnmatch(f, p) for p in patterns) and not any(fnmatch.fnmatch(f, p) for p in FOLDERS)
    ]
