"""Public data: the unlabelled samples for distillation.

Server and clients may hold the same samples, so only indices are sent; `digest` verifies that both have the same
samples in the same order. Samples are kept as stored (images as bytes) and prepared on access.

Sources: a part held out of the training data, another data set, a frozen generator, or noise. Images from other sources
are converted to the task's channels and size, and all are normalised with the task's constants.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import safetensors.torch
import torch
from annotated_types import Gt, Le, Lt
from torch import Tensor, nn

from ..core.errors import ConfigError, DataError
from ..core.settings import Positive, PositiveInt, Problem, settings
from ..core.tensors import sent
from ..place.placement import Placement
from ..train.generators import ImageDecoder
from .catalogue import named_classes
from .dataset import Dataset, Spec, blocks_of
from .encodings import LENGTH, WORDS, Columns, Text, as_bytes, digest_of
from .partition import hold_out, torch_rng
from .sources import STL10, load, read_stl10_unlabelled
from .transforms import DEPTH, Name, augmented, check_steps, normalise, to_bytes, to_depth, to_shape
from .unlabelled import read_samples

Source = Literal["held-out", "dataset", "noise", "generator", "none"]
Noise = Literal["uniform", "gauss"]
CHUNK = 256  # samples generated, augmented or hashed at a time
NOISE_BATCH = 128  # Gaussian noise is rescaled by the extremes of so many samples: a batch of FedDF


@settings
class PublicConfig:
    """The choice of public samples, and their use."""

    source: Source = "held-out"
    name: str | None = None  # source "dataset": its name or hub id ...
    path: str | None = None  # ... and folder; source "generator": its file
    size: PositiveInt | None = None  # number of samples: held out, kept of the data set, or generated
    users: Annotated[float, Gt(0), Lt(1)] | None = None  # source "held-out": all samples of this share of the users
    fraction: Annotated[float, Gt(0), Le(1)] = 1.0  # share of them that is used
    classes: list[int] | str | None = None  # only samples of these classes (of their own data set), or a named list
    per_round: PositiveInt | None = None  # samples used in a round; default: all
    labels: bool = False  # keep the labels
    augment: list[Name] = field(default_factory=list)  # random changes of images, in this order
    fresh: bool = False  # true: new random changes (and new noise or generated images) at each step, not only once
    noise: Noise = "uniform"
    range: Positive | None = None  # noise vectors: each number between -range and range; default: that of the samples
    where: Literal["server", "everywhere"] = "everywhere"  # server: sent to each client once, if needed there

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if isinstance(self.classes, str):
            try:
                named_classes(self.classes)
            except ConfigError as e:
                yield str(e).removeprefix("public.")
        elif self.classes == []:
            yield "classes = []: name at least one class, or leave it out for all"
        elif self.classes is not None and (len(set(self.classes)) < len(self.classes) or min(self.classes) < 0):
            yield f"classes = {self.classes}: name classes from 0, each once"
        if self.users is not None and (self.source != "held-out" or self.size is not None):
            yield f'users = {self.users}: for source = "held-out" and without size: all samples of so many users'
        if self.range is not None and self.source != "noise":
            yield f'range = {self.range:g}: it is that of noise vectors, and source is "{self.source}"; leave it out'
        if self.fresh and not self.augment and self.source in ("held-out", "dataset"):
            yield (
                f'fresh = true: samples of source "{self.source}" are the same at each step; set augment to change '
                'them, such as ["crop", "flip"], or leave fresh out'
            )


Make = Callable[[int, torch.Generator], Tensor]  # generates so many samples, in stored form


@dataclass(eq=False)
class Public:
    """Public samples (see `tensors.Samples`). The `public_from_...` functions create them.

    Each draw applies the steps `augment`. With `make`, it generates new samples first.
    """

    raw: Tensor  # in stored form: images as bytes
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: Tensor | None = None
    augment: Sequence[Name] = ()
    make: Make | None = None
    texts: Sequence[Text] | None = None  # text only, if known
    place: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        self.texts = None if self.texts is None else tuple(self.texts)

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The samples with these indices, ready for a model. Always the same."""
        return normalise(self._stored(rows), self.mean, self.std)

    def _stored(self, rows: Tensor) -> Tensor:
        """Rows in stored form: of the whole set in its place, or, where that does not fit, brought there."""
        rows, place = torch.as_tensor(rows), self.place
        if place.fits(self.raw):
            return place.put(self.raw).index_select(0, sent(rows, place.device))
        return sent(self.raw.index_select(0, rows.to(self.raw.device)), place.device)

    def draw(self, rows: Tensor, seed: int) -> Tensor:
        """The samples drawn with this seed: augmented or newly generated if they are `fresh`, else as with [].

        The same indices in the same order and the same seed give the same samples.
        """
        if not self.fresh:
            return self[rows]
        rng = torch_rng(seed, "public view")
        raw = self._stored(rows) if self.make is None else sent(self.make(len(rows), rng), self.place.device)
        return normalise(augmented(raw, self.augment, rng), self.mean, self.std)

    def at(self, place: Placement) -> "Public":
        """The same samples in `place`. Labels stay where they are: a training takes them along."""
        if place.device == self.place.device:
            return self
        return replace(self, place=place)

    @property
    def fresh(self) -> bool:
        """True if samples differ at each draw."""
        return bool(self.augment) or self.make is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one prepared sample."""
        return tuple(self.raw.shape[1:])

    def round_indices(self, per_round: int | None, seed: int) -> Tensor:
        """The sorted indices used in one round: `per_round` drawn without replacement, or all."""
        if per_round is None:
            return torch.arange(len(self))
        if not 1 <= per_round <= len(self):
            raise ConfigError(
                f"public.per_round = {per_round}: there are {len(self)} public samples; choose 1 to {len(self)}"
            )
        return torch.randperm(len(self), generator=torch_rng(seed, "public round"))[:per_round].sort().values

    def read_by(self, own: Columns) -> "Public":
        """The same texts with the tokens of one tokenizer only, for a party that has no other."""
        if self.texts is None:
            raise ConfigError(
                "public samples are token ids of several tokenizers; give texts: every site reads them with its own"
            )
        return replace(self, raw=self.raw[:, own.start : own.stop].contiguous())

    def subset(self, indices: Tensor) -> "Public":
        """Only these samples, in this order."""
        labels = None if self.labels is None else self.labels[indices]
        texts = None if self.texts is None else [self.texts[i] for i in indices.tolist()]
        return replace(self, raw=self.raw[indices], labels=labels, texts=texts)

    @cached_property
    def digest(self) -> str:
        """sha256 of content, order, normalisation, augmentation and, if kept, labels.

        Of texts it is the texts that count, not their tokens: every party reads them with its own tokenizer.
        """
        about = {
            "samples": list(self.raw.shape),
            "dtype": str(self.raw.dtype),
            "mean": self.mean,
            "std": self.std,
            "augment": list(self.augment) or "off",
            "fresh": self.fresh,
            "labels": self.labels is not None,
        }
        if self.texts is not None:
            about |= {"samples": [len(self.texts)], "texts": digest_of(self.texts)}
        total = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for part in self.raw.split(CHUNK) if self.texts is None else ():
            total.update(part.contiguous().numpy().tobytes())
        if self.labels is not None:
            total.update(self.labels.numpy().tobytes())
        return total.hexdigest()


@dataclass(frozen=True)
class Samples:
    """The form in which public samples are sent: texts as text, because every site has its own tokenizer."""

    raw: Tensor  # of texts: their bytes
    labels: Tensor | None
    lengths: Tensor | None = None  # texts only: the number of bytes of each


def samples_of(public: Public) -> Samples:
    """The public samples in the form in which they are sent."""
    raw, lengths = (public.raw, None) if public.texts is None else as_bytes(public.texts)
    return Samples(raw, public.labels, lengths)


def make_public(cfg: PublicConfig, task: Spec, held_out: Tensor, seed: int) -> Public | None:
    """The public data of a configuration; `held_out` are the indices of the training samples held out for it (used only
    by the source "held-out")."""
    match cfg.source:
        case "none":
            return None
        case "held-out":
            assert isinstance(task, Dataset)  # sites are refused before: their samples stay with them
            texts = None if task.texts is None else [task.texts.train[i] for i in held_out.tolist()]
            inputs, labels = task.train.inputs[held_out], task.train.labels[held_out]
            return _assemble(task, inputs, labels, cfg, None, seed, texts=texts)
        case "dataset":
            if cfg.name is None:
                raise ConfigError('public.source = "dataset" needs public.name: the data set to use')
            if cfg.name == "folder":
                return _from_folder(task, cfg, seed)
            if cfg.name == STL10:
                return _assemble(task, read_stl10_unlabelled(cfg.path, task.shape), None, cfg, cfg.size, seed)
            # Its test split is not used, so only one sample of it is decoded.
            length = task.length if task.vocabulary else LENGTH
            other = load(cfg.name, cfg.path, test_size=1, length=length, task=task.task)
            return public_from_dataset(task, other, cfg, seed)
        case "noise":
            return public_from_noise(task, cfg, seed)
        case "generator":
            if cfg.path is None:
                raise ConfigError(
                    'public.source = "generator" needs public.path: a file written by scripts/train_generator.py'
                )
            _size_to_make(cfg)  # raises before the file is read
            generator = load_generator(cfg.path)
            make = _generating(generator, task, generator.latent, (-1.0, 1.0))
            return _made(task, cfg, make, "public generator", seed)


def chosen_classes(cfg: PublicConfig) -> list[int]:
    """The classes that are kept, by number."""
    return named_classes(cfg.classes) if isinstance(cfg.classes, str) else list(cfg.classes or ())


def _from_folder(task: Spec, cfg: PublicConfig, seed: int) -> Public:
    """All images in a folder and its subfolders, or the texts in a file, without labels."""
    if cfg.path is None:
        raise ConfigError('public.name = "folder" needs public.path: a folder with images in it')
    texts: list[Text] = []

    def tokens(found: Sequence[Text]) -> Tensor:
        texts.extend(found)
        return task.tokens(found)

    _, samples = read_samples(Path(cfg.path), task.shape, tokens if task.vocabulary else None)
    return _assemble(task, samples, None, cfg, cfg.size, seed, texts=texts or None)


def public_from_samples(
    task: Spec, inputs: Tensor, labels: Tensor | None, cfg: PublicConfig | None = None, seed: int = 0
) -> Public:
    """Public data from samples in the task's stored form. All are used (`cfg.size` was already applied), except those
    that `classes` and `fraction` leave out."""
    return _assemble(task, inputs, labels, cfg or PublicConfig(), None, seed)


def public_from_dataset(task: Spec, other: Dataset, cfg: PublicConfig, seed: int = 0) -> Public:
    """Public data from the training samples of another data set, converted to the task's shape."""
    if bool(task.vocabulary) != bool(other.vocabulary) or len(task.shape) != len(other.shape):
        raise ConfigError(
            f"public.name: {other.name} has samples of shape {other.shape}, the task {task.name} of {task.shape}; "
            "public data must be of the same kind as the task's (images for images, text for text)"
        )
    if task.task == "causal-lm":
        if other.texts is None:
            raise ConfigError(f"public.name: {other.name} has no texts, and data.task = 'causal-lm' needs some")
        what, labels, encoding = f"{other.name}, public", other.train.labels, task.columns[0].encoding
        blocks, rows = blocks_of(other.texts.train, encoding, task.length, labels, None, what)
        return _assemble(task, blocks, labels[rows], cfg, cfg.size, seed)
    if task.vocabulary and not other.columns:
        other = other.encoded([c.encoding for c in task.columns] or [WORDS], task.length)
    if task.vocabulary != other.vocabulary:
        raise ConfigError(
            f"public.name: {other.name} has {other.vocabulary} token ids, the task {task.name} {task.vocabulary}; "
            "both must use the same tokenizer"
        )
    if cfg.classes is not None and not set(chosen_classes(cfg)) <= set(range(other.classes)):
        raise ConfigError(f"public.classes = {cfg.classes}: {other.name} has the classes 0..{other.classes - 1}")
    texts = None if other.texts is None else other.texts.train
    return _assemble(task, other.train.inputs, other.train.labels, cfg, cfg.size, seed, texts=texts)


def public_from_noise(task: Spec, cfg: PublicConfig, seed: int = 0) -> Public:
    """Noise images: `uniform` in [0, 1] per pixel, or `gauss`: N(0, 1) rescaled to [0, 1] by the extremes of each batch
    of 128. Pixels are rounded to bytes like those of other images, then normalised with the task's constants.

    Noise vectors: only `uniform`, each number in its range in the training set, or in `range`.
    """
    if cfg.range is not None and len(task.shape) != 1:
        raise ConfigError(f"public.range = {cfg.range:g}: images have pixels between 0 and 1; leave it out")
    if len(task.shape) != 3 and (len(task.shape) != 1 or task.vocabulary or cfg.noise != "uniform"):
        raise ConfigError(
            f'public.source = "noise" makes images, but samples of {task.name} have shape {task.shape}'
            + ("; for vectors use public.noise = 'uniform'" if not task.vocabulary else "")
        )
    make = _noise_vectors(task, cfg.range) if len(task.shape) == 1 else _noise_images(cfg.noise, task.shape)
    return _made(task, cfg, make, "public noise", seed)


def _noise_vectors(task: Spec, bound: float | None) -> Make:
    if bound is not None:
        return lambda size, rng: bound * (2 * torch.rand(size, *task.shape, generator=rng) - 1)
    if not isinstance(task, Dataset):
        raise ConfigError('public.source = "noise": the range of vectors is not known where sites hold the samples')
    low, high = task.train.inputs.amin(0), task.train.inputs.amax(0)
    return lambda size, rng: low + (high - low) * torch.rand(size, *task.shape, generator=rng)


def _noise_images(kind: Noise, shape: tuple[int, ...]) -> Make:
    def make(size: int, rng: torch.Generator) -> Tensor:
        images = torch.empty((size, *shape), dtype=torch.uint8)
        for part in images.split(NOISE_BATCH):
            if kind == "uniform":
                part.copy_(to_bytes(torch.rand(part.shape, generator=rng)))
            else:
                values = torch.randn(part.shape, generator=rng)
                low, high = values.min(), values.max()
                part.copy_(to_bytes((values - low) / (high - low)))
        return images

    return make


def _made(task: Spec, cfg: PublicConfig, make: Make, purpose: str, seed: int) -> Public:
    """Generated samples; with `fresh`, each draw generates new ones."""
    raw = make(_size_to_make(cfg), torch_rng(seed, purpose))
    return _assemble(task, raw, None, cfg, None, seed, make if cfg.fresh else None)


def _size_to_make(cfg: PublicConfig) -> int:
    """The number of samples to generate."""
    if cfg.size is None or cfg.size < 1:
        raise ConfigError(f'public.source = "{cfg.source}" with public.size = {cfg.size}: set public.size to a number')
    if cfg.labels or cfg.classes:
        raise ConfigError(
            f'public.source = "{cfg.source}": {cfg.source} has no classes; leave out public.labels and public.classes'
        )
    return cfg.size


def public_from_generator(
    generate: Callable[[Tensor], Tensor] | nn.Module,
    task: Spec,
    size: int,
    latent: int | tuple[int, ...],
    seed: int = 0,
    fresh: bool = False,
    value_range: tuple[float, float] = (0.0, 1.0),
) -> Public:
    """Images from a frozen generator, for z ~ N(0, I) of shape `latent`.

    They are generated once and kept as bytes; with `fresh`, each draw generates new ones from new z. `generate` takes
    [n, *latent] and returns [n, C, H, W]: bytes, or floats in `value_range` ((-1, 1) for a tanh output). The images are
    converted to the task's channels and size. A module is used in eval mode.
    """
    if size < 1:
        raise ConfigError(f"size = {size}: at least one public sample is needed")
    make = _generating(generate, task, latent, value_range)
    raw = make(size, torch_rng(seed, "public generator"))
    return Public(raw, task.mean, task.std, make=make if fresh else None)


def _generating(
    generate: Callable[[Tensor], Tensor] | nn.Module,
    task: Spec,
    latent: int | tuple[int, ...],
    value_range: tuple[float, float],
) -> Make:
    if len(task.shape) != 3:
        raise ConfigError(f"a generator makes images, but samples of {task.name} have shape {task.shape}")
    shape = (latent,) if isinstance(latent, int) else tuple(latent)

    def make(size: int, rng: torch.Generator) -> Tensor:
        latents = torch.randn(size, *shape, generator=rng)
        return torch.cat([_generated_bytes(generate, z, task.shape, value_range) for z in latents.split(CHUNK)])

    return make


def _generated_bytes(
    generate: Callable[[Tensor], Tensor] | nn.Module,
    z: Tensor,
    shape: tuple[int, ...],
    value_range: tuple[float, float],
) -> Tensor:
    module = generate if isinstance(generate, nn.Module) else None
    training = module is not None and module.training
    if module is not None:
        module.eval()
    try:
        with torch.no_grad():
            images = generate(z)
    finally:
        if module is not None:
            module.train(training)
    if images.ndim != 4 or len(images) != len(z):
        raise DataError(f"the generator returned {tuple(images.shape)} for {len(z)} latent vectors, not [n, C, H, W]")
    if images.dtype != torch.uint8:
        low, high = value_range
        slack = 1e-3 * (high - low)
        if not bool(((images >= low - slack) & (images <= high + slack)).all()):  # NaN also fails
            raise DataError(
                f"the generator's values range from {float(images.min()):.3g} to {float(images.max()):.3g}, outside "
                f"value_range {value_range}; pass the range of its output, e.g. value_range=(-1, 1) for tanh"
            )
        images = to_bytes((images - low) / (high - low))
    return to_shape(images, shape)


def _assemble(
    task: Spec,
    inputs: Tensor,
    labels: Tensor | None,
    cfg: PublicConfig,
    size: int | None,
    seed: int,
    make: Make | None = None,
    texts: Sequence[Text] | None = None,
) -> Public:
    """Choose samples, drop labels, convert, and transform once unless `fresh`."""
    chosen = _choose(len(inputs), labels, cfg, size, seed)
    raw = _fit(inputs[chosen], task)
    check_steps("public.augment", cfg.augment, raw, f"the public data for {task.name}")
    if cfg.augment and not cfg.fresh:
        raw = _transformed(raw, cfg.augment, seed)
    kept = labels[chosen] if cfg.labels and labels is not None else None
    said = None if texts is None else [texts[i] for i in chosen.tolist()]
    public = Public(raw, task.mean, task.std, kept, cfg.augment if cfg.fresh else (), make, said)
    if cfg.per_round is not None:
        public.round_indices(cfg.per_round, seed)  # raises now and not in the first round
    return public


def _choose(total: int, labels: Tensor | None, cfg: PublicConfig, size: int | None, seed: int) -> Tensor:
    """Sorted indices: the chosen classes, then `size` of them, then the fraction."""
    if (cfg.classes is not None or cfg.labels) and labels is None:
        raise ConfigError("public.labels or public.classes: these samples have no labels; leave both out")
    chosen = torch.arange(total)
    if cfg.classes is not None and labels is not None:
        chosen = chosen[torch.isin(labels, torch.tensor(chosen_classes(cfg), dtype=labels.dtype))]
    if size is not None and not 1 <= size <= len(chosen):
        raise ConfigError(f"public.size = {size}: {len(chosen)} samples are available; choose 1 to {len(chosen)}")
    if not len(chosen):
        raise ConfigError(f"public.classes = {cfg.classes}: none of {total} samples is left; choose other classes")
    count = len(chosen) if size is None else size
    if (count := int(cfg.fraction * count + 0.5)) < 1:
        raise ConfigError(f"public.fraction = {cfg.fraction:g}: of the public samples not one is left; choose more")
    if count < len(chosen):
        groups = torch.zeros(len(chosen)) if labels is None else labels[chosen]
        chosen = chosen[hold_out(groups, count, seed)[1]]
    return chosen


def _fit(raw: Tensor, task: Spec) -> Tensor:
    """Samples in the task's shape: images are converted, texts are cut or padded with token 0."""
    if tuple(raw.shape[1:]) == task.shape:
        return raw
    if len(task.shape) == 3 and raw.ndim == 4:
        return to_shape(raw, task.shape)
    if raw.dtype == torch.int64 and raw.ndim == 2 and len(task.shape) == 1:
        length = task.shape[0]
        return nn.functional.pad(raw[:, :length], (0, max(0, length - raw.shape[1])))
    raise DataError(f"samples of shape {tuple(raw.shape[1:])} cannot become samples of shape {task.shape}")


def _transformed(raw: Tensor, steps: Sequence[Name], seed: int) -> Tensor:
    """A transformed copy of images, with the same bits per pixel (floats become bytes)."""
    rng = torch_rng(seed, "public augment")
    kind = raw.dtype if raw.dtype in DEPTH else torch.uint8
    return torch.cat([to_depth(augmented(part, steps, rng), kind) for part in raw.split(CHUNK)])


# ---- a generator of images --------------------------------------------------------------------------


FORMAT = "solera generator 1"
LIMITS = {"channels": 4, "height": 256, "width": 256, "latent": 4096, "features": 1024}  # largest values in a file


class Generator(ImageDecoder):
    """Images of one `shape` (C, H, W) from vectors of `latent` numbers; `features` sets the width of the layers."""

    def __init__(self, shape: tuple[int, int, int], latent: int = 64, features: int = 32):
        channels, height, width = shape
        settings = {"channels": channels, "height": height, "width": width, "latent": latent, "features": features}
        for name, most in LIMITS.items():
            if not 1 <= settings[name] <= most:
                raise DataError(f"a generator with {name} = {settings[name]}: expected 1 to {most}")
        super().__init__((channels, height, width), latent, features)
        self.settings, self.latent = settings, latent


def save_generator(generator: Generator, path: str | Path) -> None:
    """Write a generator as safetensors, with its settings in the header."""
    about = {"format": FORMAT} | {name: str(value) for name, value in generator.settings.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({n: t.contiguous() for n, t in generator.state_dict().items()}, path, about)


def load_generator(path: str | Path) -> Generator:
    """Read a generator written by `save_generator`; in eval mode and frozen."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise DataError(f"{path} is not a generator: its format is {about.get('format')!r}, not {FORMAT!r}")
            s = {name: _whole(about.get(name), f"{path}: {name}") for name in LIMITS}
            with torch.device("meta"):  # allocates nothing: the header's sizes may be wrong
                generator = Generator((s["channels"], s["height"], s["width"]), s["latent"], s["features"])
            wanted = generator.state_dict()
            if odd := sorted(set(wanted) ^ set(file.keys())):
                raise DataError(f"{path}: the tensors are not those of a generator: {', '.join(odd[:3])}")
            weights = {name: file.get_tensor(name) for name in wanted}
    except (OSError, safetensors.SafetensorError) as e:
        raise DataError(f"cannot read the generator {path}: {e}; scripts/train_generator.py writes one") from None
    for name, t in wanted.items():
        if weights[name].shape != t.shape or weights[name].dtype != t.dtype:
            raise DataError(f"{path}: {name} is {tuple(weights[name].shape)}, a generator has {tuple(t.shape)}")
    generator.load_state_dict(weights, assign=True)
    generator.eval()
    return generator.requires_grad_(False)


def _whole(text: Any, what: str) -> int:
    if not (isinstance(text, str) and text.isdecimal() and len(text) < 8):
        raise DataError(f"{what} = {text!r} is not an integer")
    return int(text)
