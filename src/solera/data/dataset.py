"""A data set: training and test samples in compact form, and how they are prepared for a model."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError
from ..core.randomness import isolated, seed_from
from ..core.task import Data
from ..place.placement import numerics
from .encodings import LENGTH, VOCABULARY, WORDS, Columns, Encoding, Text, encoded, refuse_empty, tokenize
from .images import channel_statistics, channels_first, stack
from .partition import hold_out
from .transforms import DEPTH, normalise

# ---- The facts of a data set that a model must know: shape, classes, normalisation constants, vocabulary


Task = Literal["classification", "causal-lm"]


@dataclass(frozen=True)
class Spec:
    """The facts of a data set. A `Dataset` is a spec with samples; sites and trained models have only the spec."""

    name: str
    shape: tuple[int, ...]  # of one prepared sample
    classes: int
    mean: tuple[float, ...] = ()  # per channel, on the scale [0, 1]; empty: no normalisation
    std: tuple[float, ...] = ()
    vocabulary: int = 0  # text only: the number of token ids
    class_names: tuple[str, ...] = ()  # if known
    columns: tuple[Columns, ...] = ()  # of each tokenizer in a sample; empty: there is one, and it has all of them
    task: Task = "classification"  # causal-lm: a sample is a block of tokens, and all but its first are predicted

    @property
    def spec(self) -> "Spec":
        """The facts alone, without samples."""
        return Spec(**{f.name: getattr(self, f.name) for f in fields(Spec)})

    @property
    def outputs(self) -> int:
        """The number of a model's outputs for one prediction: classes, or tokens."""
        return self.classes if self.task == "classification" else self.vocabulary

    @property
    def length(self) -> int:
        """Text only: the tokens that one model reads of a text."""
        return self.columns[0].length if self.columns else self.shape[0]

    @property
    def tokenizer(self) -> str:
        """The names of the tokenizers that models bring; "" if they bring none."""
        return ", ".join(c.encoding.name for c in self.columns)

    def read_by(self, encoding: Encoding) -> "Spec":
        """The spec of a party whose model has this tokenizer: its samples hold no other tokens."""
        if encoding == WORDS and not self.columns:
            return self
        if not self.vocabulary:
            raise ConfigError(
                f"{self.name}: a model brings the tokenizer {encoding.name!r} and needs texts, but samples have shape "
                f"{self.shape}; choose another model, or data of texts (data.name = 'texts')"
            )
        own = () if encoding == WORDS else (Columns(encoding, 0, self.length),)
        return replace(self, shape=(self.length,), vocabulary=encoding.vocabulary, columns=own)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Stored samples as input of a model: normalised float32, or tokens unchanged."""
        return normalise(inputs, self.mean, self.std)

    def tokens(self, texts: Sequence[Text]) -> Tensor:
        """Texts as samples."""
        return encoded(texts, [c.encoding for c in self.columns] or [WORDS], self.length)[0]

    def numbers(self, labels: Sequence[Any], what: str) -> Tensor:
        """Labels (names or numbers) as numbers of classes."""
        known = {name: i for i, name in enumerate(self.class_names)}
        found = [str(label) for label in labels]
        if strange := sorted({label for label in found if label not in known and not label.isdecimal()}):
            said = ", ".join(self.class_names[:10]) or f"0 to {self.classes - 1}"
            raise DataError(f"{what}: the class {strange[0]!r} is not one of data.classes ({said})")
        return torch.tensor([known[n] if n in known else int(n) for n in found], dtype=torch.int64)


Arrays = tuple[Any, Any]  # inputs and labels, as tensors, numpy arrays or lists
SPELLED = 5  # labels that an error names
COUNTED = "renumber them, or say how many there are with classes= or class_names="
READ_TWICE = 64  # samples of a torch data set that are read twice, to detect random transforms


class Texts(NamedTuple):
    """The texts of a data set, row by row."""

    train: tuple[Text, ...]
    test: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True)
class Dataset(Spec):
    """Samples as stored: images [N, C, H, W] (uint8, uint16 or float32), float32 vectors [N, F], int64 tokens [N, L].

    It keeps its own copy: later changes to the caller's tensors have no effect. A text data set keeps its texts beside
    the tokens of the hashing tokenizer, so that `encoded` can have other tokenizers read them.
    """

    shape: tuple[int, ...] = field(init=False)  # that of the samples
    train: Data[Tensor]
    test: Data[Tensor]
    users: Tensor | None = None  # int64 [N_train]: the user of each training sample
    user_names: tuple[str, ...] = ()  # by number, if known
    texts: Texts | None = None  # text only, if known
    found: tuple[int, int] | None = None  # training and test rows of its files, before any of them were chosen

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            data = getattr(self, split)
            object.__setattr__(self, split, Data(data.inputs.detach().clone(), data.labels.detach().clone()))
        if self.users is not None:
            object.__setattr__(self, "users", self.users.detach().clone())
        shape = tuple(self.train.inputs.shape[1:])
        object.__setattr__(self, "shape", shape if self.task == "classification" else (shape[0] - 1,))
        for split, data in (("train", self.train), ("test", self.test)):
            check_samples(f"{self.name}, {split}", data, self.classes, self.vocabulary)
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise DataError(
                f"{self.name}: training samples have shape {self.shape}, "
                f"test samples {tuple(self.test.inputs.shape[1:])}; they must be equal"
            )
        if not _same_kind(self.train.inputs, self.test.inputs):
            raise DataError(
                f"{self.name}: training samples are {self.train.inputs.dtype}, test samples {self.test.inputs.dtype}"
            )
        _check_constants(self)
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {len(self.class_names)} names for {self.classes} classes")
        for split, data in (("train", self.train), ("test", self.test)):
            if self.texts is not None and len(getattr(self.texts, split)) != len(data):
                raise DataError(f"{self.name}, {split}: {len(getattr(self.texts, split))} texts for {len(data)} labels")
        if self.users is not None and self.users.shape != self.train.labels.shape:
            raise DataError(f"{self.name}: {len(self.users)} users for {len(self.train)} training samples")
        if self.users is not None and self.user_names and int(self.users.max()) >= len(self.user_names):
            raise DataError(f"{self.name}: {len(self.user_names)} user names, but user {int(self.users.max())}")

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} training and {len(self.test)} test samples"
        return f"Dataset({self.name}: {sizes} of shape {self.shape}, {self.classes} classes)"

    def encoded(self, encodings: Sequence[Encoding], length: int | None = None) -> "Dataset":
        """The same texts, read by these tokenizers: their tokens stand side by side in every sample.

        Each reads `length` tokens of a text; left out: as many as before.
        """
        length = length or self.length
        words = list(encodings) == [WORDS]
        if words and (length == self.length or self.texts is None):
            return self
        if self.texts is None:
            kind = "token ids only" if self.vocabulary else f"samples of shape {self.shape}"
            other = next(e.name for e in encodings if e != WORDS)
            raise ConfigError(
                f"{self.name}: a model brings the tokenizer {other!r} and needs "
                f"texts, but this data set has {kind}; give texts (solera.data.from_texts), or choose another model"
            )
        train, cuts = encoded(self.texts.train, encodings, length)
        test, _ = encoded(self.texts.test, encodings, length)
        columns = [Columns(e, i * length, (i + 1) * length, cuts[i]) for i, e in enumerate(encodings)]
        return replace(
            self,
            train=Data(train, self.train.labels),
            test=Data(test, self.test.labels),
            vocabulary=max(e.vocabulary for e in encodings),
            columns=() if words else tuple(columns),
        )

    def sampled(self, split: Literal["train", "test"], rows: Tensor) -> "Dataset":
        """Only these rows of a split, in this order."""
        data = getattr(self, split)
        fields: dict[str, Any] = {split: Data(data.inputs[rows], data.labels[rows])}
        if split == "train" and self.users is not None:
            fields["users"] = self.users[rows]
        if self.texts is not None:
            every = getattr(self.texts, split)
            fields["texts"] = self.texts._replace(**{split: tuple(every[i] for i in rows.tolist())})
        return replace(self, **fields)

    def normalised(self, mean: Sequence[float], std: Sequence[float]) -> "Dataset":
        """The same samples with other normalisation constants."""
        if len(self.shape) == 3 and len(mean) != self.shape[0]:
            raise ConfigError(
                f"data.mean = {list(mean)} and data.std = {list(std)}: {self.name} has {self.shape[0]} channels; give "
                "a number for each"
            )
        return replace(self, mean=tuple(float(m) for m in mean), std=tuple(float(s) for s in std))

    def pooled(self, test_share: float, seed: int) -> "Dataset":
        """Training and test samples put together and divided anew, with this share of each class for testing."""
        if self.users is not None or self.texts is not None:
            what = "users" if self.users is not None else "texts"
            raise ConfigError(f"data.split: {self.name} has {what}, and its samples cannot be pooled; leave it out")
        inputs = torch.cat([self.train.inputs, self.test.inputs])
        labels = torch.cat([self.train.labels, self.test.labels])
        kept, held = hold_out(labels, round(test_share * len(labels)), seed)
        return replace(self, train=Data(inputs[kept], labels[kept]), test=Data(inputs[held], labels[held]))

    def matching(self, samples: Data | Arrays, what: str) -> Data[Tensor]:
        """More samples (inputs and labels), stored like the training samples. Raises DataError for another kind."""
        if self.task == "causal-lm":
            raise DataError(f"{what}: for data.task = 'causal-lm' give a share of the data, not samples")
        inputs, labels = (samples.inputs, samples.labels) if isinstance(samples, Data) else samples
        if self.texts is not None and are_texts(inputs):
            inputs = self.tokens(inputs)
        data = data_of(what, inputs, labels)
        if tuple(data.inputs.shape[1:]) != self.shape or not _same_kind(data.inputs, self.train.inputs):
            raise DataError(
                f"{what}: samples are {data.inputs.dtype} of shape {tuple(data.inputs.shape[1:])}, those of "
                f"{self.name} {self.train.inputs.dtype} of shape {self.shape}; give them like the training samples"
            )
        check_samples(what, data, self.classes, self.vocabulary)
        return Data(data.inputs.clone(), data.labels.clone())


@numerics()
def from_tensors(
    train: Arrays,
    test: Arrays,
    classes: int | None = None,
    name: str = "own",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    users: Any = None,
    vocabulary: int | None = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """A data set from (inputs, labels) pairs of tensors, numpy arrays or lists.

    Images may be [n, H, W], [n, H, W, C] or [n, C, H, W], as bytes 0..255, as uint16 0..65535 or as floats.
    Two-dimensional integers are tokens, two-dimensional floats are vectors. Without `mean` and `std`, pixels (bytes,
    uint16) are normalised with the statistics of the training images, and floats are not changed; pass `mean=(),
    std=()` for no normalisation. `users` gives the user of each training sample, by number or by name.
    """
    parts = {split: data_of(f"{name}, {split}", *pair) for split, pair in (("train", train), ("test", test))}
    labels = torch.cat([part.labels for part in parts.values()])
    inputs = parts["train"].inputs
    if (mean is None) != (std is None):
        raise DataError(f"{name}: give both mean and std, or neither")
    if mean is None or std is None:
        mean, std = channel_statistics(inputs) if inputs.dtype in DEPTH and inputs.ndim == 4 else ((), ())
    if inputs.dtype != torch.int64:
        vocabulary = 0
    elif vocabulary is None:
        vocabulary = 1 + max(int(part.inputs.max()) for part in parts.values())
    numbers, names = (None, ()) if users is None else number_users(users)
    return Dataset(
        name,
        classes if classes is not None else len(class_names) or classes_in(name, labels.numpy(), COUNTED),
        tuple(float(m) for m in mean),
        tuple(float(s) for s in std),
        vocabulary,
        tuple(class_names),
        train=parts["train"],
        test=parts["test"],
        users=numbers,
        user_names=names,
    )


def from_texts(
    train: Arrays,
    test: Arrays,
    classes: int | None = None,
    name: str = "own",
    length: int = LENGTH,
    users: Any = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """A data set from (texts, labels) pairs. A text is a string, or a pair of strings.

    The texts are kept: every model of a run reads them with its own tokenizer. `length` is how many tokens each of them
    reads of a text; the rest is cut.
    """
    texts = {split: tuple(pair[0]) for split, pair in (("train", train), ("test", test))}
    for split, rows in texts.items():
        if strange := [i for i, text in enumerate(rows) if not _is_text(text)]:
            found = type(rows[strange[0]]).__name__
            raise DataError(f"{name}, {split}: sample {strange[0]} is {found}; expected a text, or a pair of texts")
        refuse_empty(f"{name}, {split}", rows, range(len(rows)))
    _refuse_mixed(name, texts)
    first, second = ((tokenize(texts[split], length), pair[1]) for split, pair in (("train", train), ("test", test)))
    made = from_tensors(first, second, classes, name, (), (), users, VOCABULARY, class_names)
    return replace(made, texts=Texts(texts["train"], texts["test"]))


def classes_in(name: str, labels: np.ndarray, way_out: str) -> int:
    """The number of classes, if it is unset: labels count them from 0 without a gap, or one is a mistake."""
    seen = np.unique(labels).tolist()
    if seen and seen[0] >= 0 and seen[-1] >= len(seen):  # negative ones are refused with the samples
        first = ", ".join(map(str, seen[:SPELLED])) + (", ..." if len(seen) > SPELLED + 1 else "")
        told = first if len(seen) <= SPELLED else f"{first}, {seen[-1]}"
        raise DataError(
            f"{name}: labels {told}: {len(seen)} different ones, but classes count from 0 to {len(seen) - 1}; {way_out}"
        )
    return seen[-1] + 1 if seen else 0


def _refuse_mixed(name: str, texts: Mapping[str, Sequence[Text]]) -> None:
    """Refuse a mix of texts and pairs: models that distinguish the two would see another kind in the test."""
    first: dict[bool, str] = {}  # where there is a text, where there is a pair
    for split, rows in texts.items():
        for i, text in enumerate(rows):
            first.setdefault(isinstance(text, str), f"{split}, sample {i}")
    if len(first) == 2:
        raise DataError(f"{name}: {first[True]} is a text, {first[False]} a pair of texts; give only one of the two")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )


def are_texts(values: Any) -> bool:
    """True if samples are given as texts, or as pairs of texts."""
    return isinstance(values, list | tuple) and bool(values) and all(map(_is_text, values))


def from_torch(train: Iterable[Any], test: Iterable[Any], **options: Any) -> Dataset:
    """A data set from two `torch.utils.data.Dataset`s (or any iterables) of (input, label) pairs.

    Inputs may be tensors, arrays or PIL images. The options are those of `from_tensors`. All samples are read once. A
    data set whose samples change when they are read again (random transforms) is refused.
    """
    name = options.get("name", "own")
    for split, samples in (("train", train), ("test", test)):
        if _by_position(samples):
            refuse_random(samples.__getitem__, len(samples), f"{name}, {split}")
    pairs = {split: list(_items(samples)) for split, samples in (("train", train), ("test", test))}
    for split, rows in pairs.items():
        for i, row in enumerate(rows):
            if not isinstance(row, tuple | list) or len(row) != 2:
                raise DataError(f"{name}, {split}: sample {i} is not an (input, label) pair but {type(row).__name__}")
    train_pair, test_pair = (
        (stack([x for x, _ in rows], f"{name}, {split}"), stack([y for _, y in rows], f"{name}, {split}, labels"))
        for split, rows in pairs.items()
    )
    return from_tensors(train_pair, test_pair, **options)


def number_users(users: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Users (numbers or names) as numbers from 0 in sorted order, and the name of each number."""
    known = users.numpy() if isinstance(users, Tensor) else np.asarray(users)
    names, numbers = np.unique(known, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(str(name) for name in names.tolist())


def refuse_random(read: Callable[[int], Any], total: int, what: str) -> None:
    """Refuse samples that change when they are read again: the run would use only the first version of each."""
    for i in sorted({n * total // READ_TWICE for n in range(READ_TWICE)} if total else ()):
        found = []
        for time in ("first", "second"):
            with isolated(seed_from("reading twice", i, time)):  # other seeds for each sample: a flip may agree once
                found.append(_fixed(read(i)))
        if found[0] != found[1]:
            raise DataError(
                f"{what}: sample {i} changes each time it is read, so its transform is random. Samples are read only "
                "once, so that one draw would be used for the whole run. Use transform=None, or only fixed steps "
                "(resize, to tensor), and set data.augment or public.augment for random changes at each step"
            )


def _fixed(sample: Any) -> Any:
    """A sample in a form that can be compared: the bytes of its arrays, tensors or images."""
    if isinstance(sample, Mapping):
        return {key: _fixed(value) for key, value in sample.items()}
    if isinstance(sample, tuple | list):
        return [_fixed(value) for value in sample]
    if isinstance(sample, str | bytes):
        return sample
    array = sample.detach().cpu().numpy() if isinstance(sample, Tensor) else np.asarray(sample)
    return (array.dtype.str, array.shape, None if array.dtype.hasobject else array.tobytes())


def _by_position(samples: Any) -> TypeGuard[Sequence[Any]]:
    # A torch Dataset may not be iterable and may not raise IndexError at its end, so use its length.
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__")


def _items(samples: Any) -> Iterable[Any]:
    return (samples[i] for i in range(len(samples))) if _by_position(samples) else samples


def data_of(what: str, inputs: Any, labels: Any) -> Data[Tensor]:
    """Inputs and labels (tensors, numpy arrays or lists) in stored form."""
    labels = _tensor(labels, f"{what}, labels")
    if labels.dtype.is_floating_point or labels.dtype == torch.bool or labels.ndim != 1:
        raise DataError(f"{what}: labels must be a list of integers, not {labels.dtype} {tuple(labels.shape)}")
    return Data(stored(_tensor(inputs, what), what), labels.to(torch.int64))


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, np.ndarray) and values.dtype.kind in "uif":
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        return torch.from_numpy(native if native.flags.writeable else native.copy())
    return stack(values, what)


def stored(inputs: Tensor, what: str) -> Tensor:
    """Inputs in one of the four stored forms."""
    if inputs.dtype == torch.bool or inputs.dtype.is_complex or not 2 <= inputs.ndim <= 4:
        raise DataError(
            f"{what}: inputs are {inputs.dtype} of shape {tuple(inputs.shape)}; expected images (3 or 4 dimensions), "
            "vectors or tokens (2 dimensions)"
        )
    if inputs.dtype.is_floating_point:
        inputs = inputs.to(torch.float32)
    elif inputs.ndim == 2 and inputs.dtype != torch.uint8:
        return inputs.to(torch.int64)
    elif inputs.dtype not in DEPTH:
        if inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) <= 255:
            raise DataError(
                f"{what}: integer images must have values 0..255; give uint16 for 0..65535, or floats for another scale"
            )
        inputs = inputs.to(torch.uint8)
    return inputs if inputs.ndim == 2 else channels_first(inputs)


def _same_kind(a: Tensor, b: Tensor) -> bool:
    """True if both are normalised in the same way: pixels of 8 and 16 bits are, each on its own scale."""
    return a.dtype == b.dtype or (a.dtype in DEPTH and b.dtype in DEPTH)


def check_samples(what: str, data: Data[Tensor], classes: int, vocabulary: int) -> None:
    """Refuse samples that are not finite, or whose labels or tokens are out of range."""
    inputs, labels = data.inputs, data.labels
    if len(inputs) != len(labels):
        raise DataError(f"{what}: {len(inputs)} inputs but {len(labels)} labels")
    if not len(labels):
        raise DataError(f"{what}: there are no samples")
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError(f"{what}: labels must be int64 numbers, not {labels.dtype} {tuple(labels.shape)}")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"{what}: labels run from {int(labels.min())} to {int(labels.max())}, but with {classes} classes "
            f"they must lie in 0..{classes - 1}"
        )
    if inputs.dtype.is_floating_point and not bool(inputs.isfinite().all()):
        bad = int((~inputs.isfinite()).flatten(1).any(1).nonzero()[0])
        raise DataError(f"{what}: sample {bad} has values that are not finite (NaN or infinity)")
    if inputs.dtype == torch.int64 and not 0 <= int(inputs.min()) <= int(inputs.max()) < vocabulary:
        raise DataError(
            f"{what}: tokens run from {int(inputs.min())} to {int(inputs.max())}, but with a vocabulary of "
            f"{vocabulary} they must lie in 0..{vocabulary - 1}"
        )


def _check_constants(data: Dataset) -> None:
    mean, std = data.mean, data.std
    if len(mean) != len(std) or any(s <= 0 for s in std):
        raise DataError(f"{data.name}: mean {mean} and std {std} must have the same length, and std must be above 0")
    if mean and data.train.inputs.dtype == torch.int64:
        raise DataError(f"{data.name}: tokens cannot be normalised; leave mean and std out")
    if mean and len(mean) not in (1, data.shape[0]):
        raise DataError(f"{data.name}: mean has {len(mean)} numbers for {data.shape[0]} channels")


# ---- language models: one stream of tokens, cut into blocks -----------------------------------------


log = logging.getLogger("solera")


def as_blocks(data: Dataset, readers: dict[str, Encoding]) -> Dataset:
    """The data set for language models with these tokenizers (by model), which must be one and the same.

    The texts of one user on one topic follow each other, each with an end mark, and the stream is cut into blocks of
    `length` + 1 tokens. A block begins with the last token of the one before, so every token but a stream's first is
    predicted once, and no position has to be left out of a loss. What does not fill a block is dropped.
    """
    encoding = one_encoding(readers)
    if data.texts is None:
        raise ConfigError(
            f"data.task = 'causal-lm' needs texts, but {data.name} has samples of shape {data.shape}; choose a text "
            "set, or give texts (solera.data.from_texts)"
        )
    length = data.length
    labels, users = data.train.labels, data.users
    inputs, first = blocks_of(data.texts.train, encoding, length, labels, users, f"{data.name}, train")
    held, their = blocks_of(data.texts.test, encoding, length, data.test.labels, None, f"{data.name}, test")
    return replace(
        data,
        train=Data(inputs, labels[first]),
        test=Data(held, data.test.labels[their]),
        users=None if users is None else users[first],
        vocabulary=encoding.vocabulary,
        texts=None,
        columns=(Columns(encoding, 0, length),),
        task="causal-lm",
    )


def one_encoding(readers: dict[str, Encoding]) -> Encoding:
    """The tokenizer of all models. Raises ConfigError if they have several, or one that cannot make a stream."""
    first, encoding = next(iter(readers.items()))
    for name, other in readers.items():
        if other != encoding:
            raise ConfigError(
                f"data.task = 'causal-lm': {first} reads texts with the tokenizer {encoding.name!r}, {name} with "
                f"{other.name!r}; their tokens cannot be compared, so all models must have the same"
            )
    if encoding.stream is None:
        raise ConfigError(
            f"data.task = 'causal-lm': {first} reads texts with the tokenizer {encoding.name!r}, which makes no "
            "stream; choose language models, such as gpt-nano, gpt-micro and lstm-lm"
        )
    return encoding


def blocks_of(
    texts: Sequence[Text], encoding: Encoding, length: int, labels: Tensor, users: Tensor | None, what: str
) -> tuple[Tensor, Tensor]:
    """Blocks, int64 [blocks, length + 1], and for each a row of the texts whose label and user are the block's."""
    assert encoding.stream is not None
    people = torch.zeros_like(labels) if users is None else users
    streams: dict[tuple[int, int], list[int]] = {}
    begins: dict[tuple[int, int], int] = {}
    for i, (text, key) in enumerate(zip(texts, zip(people.tolist(), labels.tolist(), strict=True), strict=True)):
        begins.setdefault(key, i)
        streams.setdefault(key, []).extend(encoding.stream(text if isinstance(text, str) else "\n".join(text)))
    blocks, rows, lost = [], [], 0
    for key, stream in streams.items():
        count = max(0, (len(stream) - 1) // length)
        lost += len(stream) - 1 - count * length
        if count:
            tokens = torch.tensor(stream[: count * length + 1], dtype=torch.int64)
            blocks.append(tokens.unfold(0, length + 1, length))
            rows += [begins[key]] * count
    if not blocks:
        raise DataError(
            f"{what}: no text of one user and class has the {length + 1} tokens of a block; lower data.length"
        )
    total = sum(map(len, streams.values()))
    if lost > total // 10:
        log.warning("%s: %d of %d tokens do not fill a block of %d and are left out", what, lost, total, length)
    return torch.cat(blocks), torch.tensor(rows)
