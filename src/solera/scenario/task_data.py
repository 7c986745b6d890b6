"""The task's data, [data] of a configuration: the task, the data set, the samples kept for testing."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le

from ..core.errors import ConfigError
from ..core.plugins import is_path
from ..core.randomness import seed_from
from ..core.settings import Hint, Positive, PositiveInt, Problem, Share, settings
from ..core.task import Data
from ..data import Dataset, PublicConfig, load
from ..data.catalogue import SOURCES
from ..data.dataset import Spec, Task
from ..data.encodings import LENGTH, VOCABULARY
from ..data.site_data import SiteConfig, read_source
from ..data.transforms import Name

Kept = Annotated[float, Ge(0), Le(0.9)]  # a share that is not trained on; the rest must be large enough to train on
Size = Annotated[int, Ge(1), Hint("or leave it out for all")]
TEXTS = "texts"  # data.name of the server's own texts
TABLE = "table"  # data.name of the server's own samples, where they are in a table


@settings
class DataConfig:
    """The task's data, and the shares that the server and each client keep for testing."""

    name: str = "fashion-mnist"
    task: Task = "classification"  # or "causal-lm": the next token of texts
    path: str | None = None  # a folder to read it from; otherwise the usual places are searched
    train_size: Size | None = None  # a balanced sample of this size instead of all
    test_size: Size | None = None
    split: list[Share] = dataclasses.field(default_factory=list)  # pool all samples, then training, public, test shares
    validation: Kept = 0.0  # share of the training set the server keeps, labelled, for early stopping
    client_test: Kept | Literal["common"] = 0.0  # a client's share for testing; common: all have the test set
    client_validation: Kept = 0.0  # share of the rest that own models are scored on instead, as `solera tune` does
    text_column: str | None = None  # of a table of texts: the column with the text ...
    pair_column: str | None = None  # ... with a second text, if samples are pairs ...
    label_column: str | None = None  # ... with the class ...
    user_column: str | None = None  # ... and with the user; default: the usual names
    user_min: PositiveInt = 1  # users with fewer samples are left out
    test_users: Kept = 0.0  # share of the users whose samples are the test set, instead of the set's own
    length: PositiveInt = LENGTH  # tokens of a text that a model reads (the rest is cut); causal-lm: of a block
    image_size: PositiveInt | None = None  # of a folder of images: pixels of a side to which all are brought
    augment: list[Name] = dataclasses.field(default_factory=list)  # how training images are changed at each step
    mean: list[float] = dataclasses.field(default_factory=list)  # per channel, on the scale [0, 1]; []: of the data set
    std: list[Positive] = dataclasses.field(default_factory=list)
    shape: list[PositiveInt] = dataclasses.field(default_factory=list)  # with sites: of one sample; []: of the data set
    classes: list[str] = dataclasses.field(default_factory=list)  # with sites: the names of the classes, in this order

    def problems(self) -> Iterator[Problem]:
        """Inconsistent constants, an invalid split, and classes named twice."""
        if self.split and (len(self.split) != 3 or abs(sum(self.split) - 1) > 1e-6 or not min(self.split[::2])):
            yield (
                f"split = {self.split}: give the shares of training, public and test samples, such as [0.7, 0.1, 0.2]; "
                "they add up to 1, and only the public one may be 0"
            )
        if len(self.mean) != len(self.std):
            yield f"mean = {self.mean} and std = {self.std}: give both, with a number for each channel, or neither"
        if len(set(self.classes)) < len(self.classes):
            yield f"classes = {self.classes}: a name is there twice"

    @property
    def kept_for_tests(self) -> float:
        """The share of a client's samples that it does not train on: none, if all are scored on the test set."""
        return self.client_test if isinstance(self.client_test, int | float) else 0.0


def _load(data: DataConfig, seed: int) -> Dataset:
    return load(
        data.name, data.path, data.train_size, data.test_size, seed, data.length, data.image_size,
        text_column=data.text_column, pair_column=data.pair_column, label_column=data.label_column,
        user_column=data.user_column, user_min=data.user_min, test_users=data.test_users, task=data.task,
    )  # fmt: skip


def load_data(data: DataConfig, seed: int) -> Dataset:
    """The data set that a configuration names, with the training and test samples of its runs. With `data.split` all
    samples are pooled and divided anew."""
    found = _load(data, seed)
    if data.split:
        found = found.pooled(data.split[2], seed_from(seed, "split"))
    return found.normalised(data.mean, data.std) if data.mean else found


def public_of_split(total: int, shares: Sequence[float], public: PublicConfig) -> PublicConfig:
    """The public part of `data.split` as a number of samples, which `Scenario` holds out of the training samples."""
    held = round(shares[1] * total)
    if public.source == "held-out" and public.size is not None:
        raise ConfigError(
            f"public.size = {public.size}: data.split already says how many samples are public; leave it out"
        )
    if held and public.source != "held-out":
        raise ConfigError(
            f"data.split = {list(shares)}: its public samples need public.source = 'held-out'; with public.source = "
            f"{public.source!r} write 0 for them"
        )
    return dataclasses.replace(public, size=held) if held else public


# ---- with sites -------------------------------------------------------------------------------------


def share_for_sites(client_test: float | str) -> float:
    """The share that a site keeps for testing; sites have no test set in common."""
    if isinstance(client_test, str):
        raise ConfigError(
            f"data.client_test = {client_test!r}: sites have test samples of their own; give a share, say 0.2"
        )
    return client_test


def stated_spec(data: DataConfig) -> Spec:
    """The spec of samples, from the configuration alone: no site's data is read."""
    if data.task != "classification":
        raise ConfigError(f"data.task = {data.task!r} with [sites]: sites learn to classify; leave data.task out")
    info = None if is_path(data.name) else SOURCES.get(data.name)
    text = info is not None and info.is_text
    shape = tuple(data.shape) or ((data.length,) if text else info.shape if info else ())
    classes = len(data.classes) or (info.classes if info else 0)
    for key, value, example in (("shape", shape, "[3, 32, 32]"), ("classes", classes, '["benign", "malignant"]')):
        if not value:
            raise ConfigError(
                f"data.{key} is missing: sites cannot find it in each other's data; for example {example}"
            )
    mean, std = (data.mean, data.std) if data.mean or not info else (info.mean or (), info.std or ())
    if text and shape != (data.length,):
        raise ConfigError(
            f"data.shape = {list(shape)}: of {data.name}, a sample is the first {data.length} tokens of a text; leave "
            "data.shape out, and set data.length"
        )
    names = tuple(data.classes) or (info.class_names if info else ())
    return Spec(data.name, shape, classes, tuple(mean), tuple(std), VOCABULARY if text else 0, names)


def server_data(data: DataConfig, seed: int) -> Dataset:
    """The samples of a server with sites, on which models are evaluated."""
    spec = stated_spec(data)
    if data.path is not None and data.name in ("folder", TABLE):
        train, test = read_source(data.path, spec, (), SiteConfig.label_column, "data.path")
        if test is None and data.validation:
            raise ConfigError(f"data.validation = {data.validation}: {data.path} has no test split of its own")
        found = Dataset(
            data.name, spec.classes, vocabulary=spec.vocabulary, train=train.data, test=(test or train).data
        )
    else:
        found = _load(data, seed)
        if data.name == TEXTS and found.classes <= spec.classes:
            # A table alone knows only the classes that are in it, by name: into the order of data.classes.
            numbers = spec.numbers(found.class_names or range(found.classes), f"data.path = {data.path!r}")
            first, second = (Data(part.inputs, numbers[part.labels]) for part in (found.train, found.test))
            found = dataclasses.replace(
                found, train=first, test=second, classes=spec.classes, class_names=spec.class_names
            )
    if found.vocabulary and not spec.vocabulary:
        raise ConfigError(
            f"data.name = {data.name!r} has texts, but sites cannot know that: use a named data set of texts, or "
            f"data.name = {TEXTS!r} with a table at data.path"
        )
    if (found.shape, found.classes, found.vocabulary) != (spec.shape, spec.classes, spec.vocabulary):
        raise ConfigError(
            f"data.name = {data.name!r} has samples of shape {found.shape} in {found.classes} classes; data.shape and "
            f"data.classes say {spec.shape} in {spec.classes}"
        )
    return dataclasses.replace(found, mean=spec.mean, std=spec.std, class_names=spec.class_names or found.class_names)
