"""Encoders in the format of Hugging Face: `hf:NAME` from the hub or its cache, `hf:FOLDER` from the disk.

The body of such a model is the encoder: token ids in, features out. Solera puts its own heads on it, so it works with
every method. Weights are read from safetensors files only: a pickle (`pytorch_model.bin`) can run code when it is
opened, and so can a repository's own modelling code; neither is ever used. `models.weights = "random"` takes the
architecture without its weights.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors
import torch
from torch import Tensor, nn

from solera.core.errors import ConfigError
from solera.data.encodings import Encoding, Text
from solera.models.hub import Repository, imported, no_weights
from solera.models.registry import ModelInfo
from solera.models.zoo.layers import Body
from solera.models.zoo.texts import in_buckets, real
from solera.place.placement import tricks_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "hf:"
Weights = Literal["pretrained", "random"]
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
ADDED = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")  # take a ready-made mask
SPELLED = 3  # weights that an error names


class Encoder(nn.Module):
    """A transformer that turns token ids [n, L] into features [n, hidden_size]."""

    def __init__(self, model: PreTrainedModel, padding: int, pairs: int | None, mean: bool, origin: dict[str, str]):
        super().__init__()
        self.model = model
        self.padding = padding
        self.pairs = pairs  # the id that ends the first text of a pair, if the model tells the two apart
        self.mean = mean  # features: the mean over all tokens; else its pooler, or the first token
        self.origin = origin  # the origin of its weights, for run.json

    def forward(self, ids: Tensor) -> Tensor:
        return in_buckets(self._read, ids, self.padding, self.training)

    def _read(self, ids: Tensor) -> Tensor:
        mask = real(ids, self.padding)
        more = {}
        if self.pairs is not None:
            ends = (ids == self.pairs).long()
            more["token_type_ids"] = (ends.cumsum(1) - ends).clamp(max=1) * mask
        said = self.model(input_ids=ids, attention_mask=self._seen(mask), **more)
        tokens: Tensor = said.last_hidden_state
        if self.mean:
            weight = mask.unsqueeze(-1).to(tokens.dtype)
            return (tokens * weight).sum(1) / weight.sum(1)
        pooled = getattr(said, "pooler_output", None)
        return tokens[:, 0] if pooled is None else pooled

    def _seen(self, mask: Tensor) -> Tensor:
        """The mask of the tokens that attention sees. Given plain ones, the library would read from an
        accelerator whether there is padding; there it gets the finished mask, which is added to the scores."""
        if tricks_of(mask.device).reads_in_steps or self.model.config.model_type not in ADDED:
            return mask.long()
        lowest = torch.finfo(torch.float32).min
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, lowest)[:, None, None]


# ---- by name -----------------------------------------------------------------------------------------------


def hf_info(name: str, key: str | None = None) -> ModelInfo:
    """The entry of `hf:...`. A missing folder is refused here, a missing repository when the model is built."""
    where = name.removeprefix(PREFIX)
    what = f"{key} = {name!r}" if key else f"model {name!r}"
    if not where:
        raise ConfigError(f"{what}: name a repository of the hub (hf:owner/name) or a folder (hf:./folder)")
    if is_folder(where) and not Path(where).expanduser().is_dir():
        raise ConfigError(f"{what}: {where} is not a folder; give the folder of config.json and model.safetensors")

    def builder(shape: tuple[int, ...], weights: Weights = "pretrained") -> Body:
        return encoder(where, name, shape, weights)

    notes = "an encoder in the format of Hugging Face"
    return ModelInfo(name, where, "", "text", notes, builder, False, functools.partial(encoding, where, name))


def is_folder(where: str) -> bool:
    """True for a folder, by its form: repositories are owner/name."""
    return where.startswith(("./", "../", "/", "~"))


def encoder(
    where: str, name: str, shape: tuple[int, ...], weights: Weights = "pretrained", layers: int | None = None
) -> Body:
    """The body of the model in a folder or repository; `layers`: only its first ones."""
    folder = _folder(where, name)
    config = _config(folder, name)
    if layers is not None:
        config.num_hidden_layers = layers
    tokenizer = _tokenizer(folder, name)
    _check_fits(config, tokenizer, name, shape)
    origin = {"model": name, "weights": weights}
    if not is_folder(where):
        origin["commit"] = folder.name
        if weights == "pretrained" and not _sizes_only():
            Repository(where, name).fetch_weights(folder)
    model = _model(folder, config, name, weights)
    return _body(model, tokenizer, origin, _takes_mean(folder))


def untrained(kind: str, fields: dict[str, Any], tokenizer: str, name: str, shape: tuple[int, ...]) -> Body:
    """The body of a model by its configuration, with random weights and the tokenizer of another folder."""
    transformers = imported("transformers", name)
    config, known = transformers.CONFIG_MAPPING[kind](**fields), _tokenizer(Path(tokenizer), name)
    _check_fits(config, known, name, shape)
    return _body(_random(config, name), known, {"model": name, "weights": "random"}, False)


def _body(model: PreTrainedModel, tokenizer: Any, origin: dict[str, str], mean: bool) -> Body:
    config = model.config
    if 2 * (known := vocabulary_of(tokenizer)) < config.vocab_size:  # some are padded, but not to twice the size
        origin["tokenizer"] = f"has {known} token ids, the model knows {config.vocab_size}"
    if origin["weights"] == "pretrained" and not _sizes_only():
        origin["digest"] = digest_of(model)
        if not mean and hasattr(model, "pooler") and model.pooler is None:
            origin["features"] = "the first token: its weights have no pooler"
    return Encoder(model, tokenizer.pad_token_id, _pairs(tokenizer, config), mean, origin), int(config.hidden_size)


def longest_of(config: PretrainedConfig) -> int | None:
    """The number of tokens for which a model has positions; some models start positions after the padding's id."""
    most = getattr(config, "max_position_embeddings", None)
    after = config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer", "data2vec-text", "mpnet")
    return most - 2 if most is not None and after else most


def digest_of(model: nn.Module) -> str:
    """sha256 of the current weights of a model, by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def origins_of(model: nn.Module) -> list[dict[str, str]]:
    """The origins of a model's weights; empty for a model with random initial weights, as is usual."""
    return [part.origin for part in model.modules() if isinstance(part, Encoder)]


# ---- tokenizers --------------------------------------------------------------------------------------------


@functools.lru_cache(16)
def encoding(where: str, name: str) -> Encoding:
    """The tokenizer in a folder or repository. Models with the same tokenizer share its ids."""
    tokenizer = _tokenizer(_folder(where, name), name)
    backend = tokenizer.backend_tokenizer
    known = hashlib.sha256(backend.to_str().encode()).hexdigest()[:8]
    kind = type(backend.model).__name__.lower()
    return Encoding(f"{kind}-{known}", vocabulary_of(tokenizer), tokenizer.pad_token_id, _encode(backend, tokenizer))


def _encode(backend: Any, tokenizer: Any) -> Any:
    padding = tokenizer.pad_token_id

    def encode(texts: Sequence[Text], length: int) -> tuple[Tensor, int]:
        ids = torch.full((len(texts), length), padding, dtype=torch.int64)
        cut = 0
        with _serial():
            backend.no_padding()
            backend.enable_truncation(length)
            for row, read in zip(ids, backend.encode_batch(list(texts)), strict=True):
                row[: len(read.ids)] = torch.tensor(read.ids)
                cut += bool(read.overflowing)
        return ids, cut

    return encode


@contextlib.contextmanager
def _serial() -> Iterator[None]:
    """Keep the libraries from starting threads. Workers are forked later, and a fork copies no thread. Threads that
    load weights also outlive the call, which the watch on random generators would report."""
    wanted = {"TOKENIZERS_PARALLELISM": "false", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def vocabulary_of(tokenizer: Any) -> int:
    """One more than the highest id, whatever the tokenizer says its size is."""
    return 1 + max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values())


def _check_fits(config: PretrainedConfig, tokenizer: Any, name: str, shape: tuple[int, ...]) -> None:
    """Refuse texts that are too long for a model, and a tokenizer that is not its own."""
    longest = longest_of(config)
    if len(shape) != 1 or (longest is not None and shape[0] > longest):
        raise ConfigError(f"model {name!r} reads up to {longest} tokens of a text, not {shape}: set data.length")
    if vocabulary_of(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"model {name!r}: its tokenizer has {vocabulary_of(tokenizer)} token ids, but the model only knows "
            f"{config.vocab_size}: they do not belong together; put the tokenizer of this model beside it"
        )


def _pairs(tokenizer: Any, config: PretrainedConfig) -> int | None:
    """The id between the texts of a pair, if the model was trained to tell the two apart."""
    kinds = tokenizer.backend_tokenizer.encode("a", "b").type_ids
    return tokenizer.sep_token_id if getattr(config, "type_vocab_size", 1) > 1 and max(kinds) == 1 else None


# ---- files -------------------------------------------------------------------------------------------------


def _folder(where: str, name: str) -> Path:
    """The folder of a model's configuration and tokenizer: on the disk, in the cache of the hub, or fetched to it."""
    return Path(where).expanduser() if is_folder(where) else Repository(where, name).folder()


def _config(folder: Path, name: str) -> PretrainedConfig:
    transformers = imported("transformers", name)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {name!r}: {folder} has no config.json, which says what kind of model it is")
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"model {name!r}: {folder / 'config.json'} cannot be read ({e})") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in transformers.CONFIG_MAPPING:
        own = (
            " and comes with code of its own, which is never run" if isinstance(raw, dict) and "auto_map" in raw else ""
        )
        raise ConfigError(f"model {name!r}: transformers knows no model_type {kind!r}{own}")
    with quiet():
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        raise ConfigError(f"model {name!r} ({kind}) is not an encoder of texts, such as BERT, DistilBERT or RoBERTa")
    return config


def _model(folder: Path, config: PretrainedConfig, name: str, weights: Weights) -> PreTrainedModel:
    """The encoder itself, without a head. Attention is "eager": faster kernels drop the mask of a minibatch without
    padding, so that an answer would depend on the rest of the minibatch."""
    transformers = imported("transformers", name)
    unused = _takes_mean(folder) and config.model_type == "bert"
    if weights == "random":
        return _random(config, name, **({"add_pooling_layer": False} if unused else {}))
    more = {"add_pooling_layer": False} if unused or _lacks_pooler(folder, config, name) else {}
    if _sizes_only():
        return _random(config, name, **more)
    if not any(folder.glob("*.safetensors")):
        raise no_weights(name, str(folder), [file.name for file in folder.iterdir()])
    try:
        with quiet(), _serial():
            model, told = transformers.AutoModel.from_pretrained(
                folder, config=config, use_safetensors=True, trust_remote_code=False, local_files_only=True,
                dtype=torch.float32, attn_implementation="eager", ignore_mismatched_sizes=True,
                output_loading_info=True, **more,
            )  # fmt: skip
    except Exception as e:  # damaged files: the library raises many kinds
        raise _unusable(folder, name, e) from None
    _refuse_incomplete(folder, name, told)
    return model


def _refuse_incomplete(folder: Path, name: str, told: dict[str, Any]) -> None:
    """Refuse files without all weights: the library would fill weights that are missing or of another size with random
    numbers. Surplus weights, such as those of another head, are ignored."""
    if sizes := sorted(told["mismatched_keys"]):
        some = [f"{k} is {list(there)} and must be {list(wanted)}" for k, there, wanted in sizes[:SPELLED]]
        raise ConfigError(
            f"model {name!r}: the weights in {folder} do not fit its config.json: {_first(some, len(sizes))}; put the "
            "config.json and the weights of one model there"
        )
    if missing := sorted(told["missing_keys"]):
        raise ConfigError(
            f"model {name!r}: {len(missing)} of its weights are missing in {folder}: "
            f"{_first(missing[:SPELLED], len(missing))}; save the whole model again (save_pretrained does), or set "
            'models.weights = "random" to begin with random weights'
        )


def _first(some: list[str], total: int) -> str:
    return ", ".join(some) + (f" and {total - len(some)} more" if total > len(some) else "")


def _lacks_pooler(folder: Path, config: PretrainedConfig, name: str) -> bool:
    """True if the weights were saved without a pooler, as in masked language models, and the model can do without: its
    features are then those of the first token."""
    kind = imported("transformers", name).MODEL_MAPPING[type(config)]
    if "add_pooling_layer" not in inspect.signature(kind).parameters:
        return False
    keys: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            with safetensors.safe_open(file, "pt") as opened:
                keys.update(opened.keys())
        except (OSError, safetensors.SafetensorError) as e:
            raise _unusable(folder, name, e) from None
    return bool(keys) and not any("pooler" in key.split(".") for key in keys)


def drop_poolers(model: nn.Module, weights: Collection[str]) -> None:
    """Remove poolers that a trained model did not have because its pretrained weights had none."""
    for at, part in model.named_modules():
        pooled = isinstance(part, Encoder) and getattr(part.model, "pooler", None) is not None
        if pooled and not any(key.startswith(f"{at}.model.pooler.") for key in weights):
            part.model.pooler = None


def _unusable(folder: Path, name: str, error: Exception) -> ConfigError:
    why = " ".join(str(error).split())[:200]
    return ConfigError(f"model {name!r}: the weights in {folder} cannot be used ({type(error).__name__}: {why})")


def _sizes_only() -> bool:
    """True where tensors have no values: parameters are being counted."""
    return torch.get_default_device().type == "meta"


def _random(config: PretrainedConfig, name: str, **more: Any) -> PreTrainedModel:
    with quiet():
        return imported("transformers", name).AutoModel.from_config(config, attn_implementation="eager", **more).float()


@functools.lru_cache(16)
def _tokenizer(folder: Path, name: str) -> Any:
    transformers = imported("transformers", name)
    try:
        if not any((folder / file).is_file() for file in TOKENIZERS):  # otherwise the library creates an empty one
            raise FileNotFoundError(f"none of {', '.join(TOKENIZERS)}")
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except Exception as e:  # many formats, many errors
        why = " ".join(str(e).split())[:160]
        raise ConfigError(
            f"model {name!r}: {folder} has no tokenizer that can be read ({type(e).__name__}: {why}); put its "
            "tokenizer.json beside the model"
        ) from None
    if tokenizer.pad_token_id is None or not backend.get_vocab_size():
        raise ConfigError(f"model {name!r}: its tokenizer has no padding token, so texts cannot be put side by side")
    return tokenizer


def _takes_mean(folder: Path) -> bool:
    """True if it was trained to give a text's meaning as the mean over its tokens (sentence transformers say so)."""
    try:
        return bool(json.loads((folder / "1_Pooling" / "config.json").read_text("utf-8"))["pooling_mode_mean_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars and reports of layers that were left out on purpose."""
    from transformers.utils import logging as told

    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()
