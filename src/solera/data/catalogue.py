"""The data sets known by name: what they hold, where they are to be had and how their files are laid out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..plugins import Registry
from .dataset import Dataset
from .text import LENGTH

Loader = Callable[..., Dataset]
LoaderT = TypeVar("LoaderT", bound=Loader)
Format = Literal["idx", "cifar", "stl10", "parquet", "csv", "images"]


@dataclass(frozen=True)
class PlainTable:
    """A headless csv file, as some text sets were first published: columns by position."""

    label: int
    text: tuple[int, ...]  # joined by a space
    user: int | None = None
    first_label: int = 0
    encoding: str = "utf-8"


@dataclass(frozen=True)
class SourceInfo:
    """One data set. The first fields are for people, the others for the readers."""

    title: str
    classes: int  # 0: found by reading
    shape: tuple[int, ...]  # of one sample; (tokens,) for text
    rows: tuple[int, int] | None  # training and test samples of the full set
    hub: str
    licence: str
    formats: tuple[Format, ...]
    mean: tuple[float, ...] | None = ()  # None: found by reading
    std: tuple[float, ...] | None = ()
    config: str | None = None  # of the hub's data set
    columns: tuple[str, ...] = ("image", "label")  # input, label, and possibly user
    test_splits: tuple[str, ...] = ("test", "validation")  # in this order
    label_map: Mapping[int, int | None] = field(default_factory=dict)  # stored -> label; None: the row is left out
    first_label: Mapping[str, int] = field(default_factory=dict)  # where labels do not begin with 0
    transposed: tuple[Format, ...] = ()  # formats that store images column by column
    prefix: str = ""  # of its IDX files
    sums: Mapping[str, str] = field(default_factory=dict)  # file (uncompressed) of the full set -> sha256 or md5
    plain: PlainTable | None = None
    made: bool = False  # made by this package, by a fixed seed: there is nothing to read
    loader: Loader | None = None  # what reads a set that somebody has added

    @property
    def is_text(self) -> bool:
        """Whether samples are texts."""
        return len(self.shape) == 1 and not self.made


OURS: dict[str, SourceInfo] = {
    "fashion-mnist": SourceInfo(
        title="Fashion-MNIST: clothing, gray, 28x28 (10,000 + 2,000 images are part of the package)",
        classes=10,
        shape=(1, 28, 28),
        rows=(60_000, 10_000),
        hub="zalando-datasets/fashion_mnist",
        licence="MIT, Zalando SE",
        formats=("idx", "parquet", "csv"),
        mean=(0.2860,),
        std=(0.3530,),
        sums={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
    "mnist": SourceInfo(
        title="MNIST: handwritten digits, gray, 28x28",
        classes=10,
        shape=(1, 28, 28),
        rows=(60_000, 10_000),
        hub="ylecun/mnist",
        licence="CC BY-SA 3.0",
        formats=("idx", "parquet", "csv"),
        mean=(0.1307,),
        std=(0.3081,),
        sums={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "emnist": SourceInfo(
        title="EMNIST, split Letters: handwritten letters, gray, 28x28",
        classes=26,
        shape=(1, 28, 28),
        rows=(124_800, 20_800),
        hub="tanganke/emnist_letters",
        licence="NIST SD 19, free to use",
        formats=("idx", "parquet", "csv"),
        mean=(0.1722,),
        std=(0.3309,),
        first_label={"idx": 1, "csv": 1},
        transposed=("idx", "csv"),
        prefix="emnist-letters-",
    ),
    "cifar10": SourceInfo(
        title="CIFAR-10: objects, colour, 32x32",
        classes=10,
        shape=(3, 32, 32),
        rows=(50_000, 10_000),
        hub="uoft-cs/cifar10",
        licence="not stated by the authors",
        formats=("cifar", "parquet"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        columns=("img", "label"),
    ),
    "cifar100": SourceInfo(
        title="CIFAR-100: objects, colour, 32x32, the fine labels",
        classes=100,
        shape=(3, 32, 32),
        rows=(50_000, 10_000),
        hub="uoft-cs/cifar100",
        licence="not stated by the authors",
        formats=("cifar", "parquet"),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        columns=("img", "fine_label"),
    ),
    "stl10": SourceInfo(
        title="STL-10: objects, colour, 96x96",
        classes=10,
        shape=(3, 96, 96),
        rows=(5_000, 8_000),
        hub="tanganke/stl10",
        licence="research use (images from ImageNet)",
        formats=("stl10", "parquet"),
        mean=(0.4467, 0.4398, 0.4066),
        std=(0.2603, 0.2566, 0.2713),
        first_label={"stl10": 1},
        transposed=("stl10",),
        sums={
            "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
            "train_y.bin": "5a34089d4802c674881badbb80307741",
            "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
            "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
        },
    ),
    "svhn": SourceInfo(
        title="SVHN: house numbers, cropped digits, colour, 32x32",
        classes=10,
        shape=(3, 32, 32),
        rows=(73_257, 26_032),
        hub="ufldl-stanford/svhn",
        licence="non-commercial",
        formats=("parquet",),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        config="cropped_digits",
    ),
    "tiny-imagenet": SourceInfo(
        title="Tiny ImageNet: objects, colour, 64x64",
        classes=200,
        shape=(3, 64, 64),
        rows=(100_000, 10_000),
        hub="zh-plus/tiny-imagenet",
        licence="research use (images from ImageNet)",
        formats=("parquet",),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        test_splits=("validation", "test"),
    ),
    "imagenet32": SourceInfo(
        title="ImageNet (ILSVRC 2012) at 32x32, colour",
        classes=1000,
        shape=(3, 32, 32),
        rows=(1_281_167, 50_000),
        hub="benjamin-paine/imagenet-1k-32x32",
        licence="research use (ImageNet terms)",
        formats=("parquet",),
        mean=(0.4811, 0.4575, 0.4078),
        std=(0.2605, 0.2533, 0.2683),
        test_splits=("validation",),  # the test split has no labels
    ),
    "ag-news": SourceInfo(
        title="AG News: news in four topics, text",
        classes=4,
        shape=(LENGTH,),
        rows=(120_000, 7_600),
        hub="fancyzhx/ag_news",
        licence="non-commercial",
        formats=("parquet", "csv"),
        columns=("text", "label"),
        plain=PlainTable(label=0, text=(1, 2), first_label=1),
    ),
    "sst2": SourceInfo(
        title="SST-2: film reviews, negative or positive, text",
        classes=2,
        shape=(LENGTH,),
        rows=(67_349, 872),
        hub="stanfordnlp/sst2",
        licence="not stated by the authors",
        formats=("parquet", "csv"),
        columns=("sentence", "label"),
        test_splits=("validation",),  # the test split has no labels
    ),
    "sentiment140": SourceInfo(
        title="Sentiment140: tweets with their users, negative or positive (neutral test tweets are left out), text",
        classes=2,
        shape=(LENGTH,),
        rows=(1_600_000, 498),
        hub="stanfordnlp/sentiment140",
        licence="not stated by the authors",
        formats=("parquet", "csv"),
        columns=("text", "sentiment", "user"),
        label_map={0: 0, 2: None, 4: 1},
        plain=PlainTable(label=0, text=(5,), user=4, encoding="latin-1"),
    ),
    "toy-2d": SourceInfo(
        title="Points of a plane in three classes, made by this package: to see what models learn",
        classes=3,
        shape=(2,),
        rows=(600, 600),
        hub="",
        licence="as this package",
        formats=(),
        made=True,
    ),
    "folder": SourceInfo(
        title="Images of your own in the folder data.path, in a folder for each class",
        classes=0,
        shape=(),
        rows=None,
        hub="",
        licence="yours",
        formats=("images",),
        mean=None,
        std=None,
    ),
}


def _entry(loader: Any, name: str, title: str = "", licence: str = "yours") -> SourceInfo:
    """The entry of a loader, of which nothing is known until it is called."""
    if not callable(loader):
        raise TypeError(f"a function that returns a solera.Dataset is wanted, not a {type(loader).__name__}")
    return SourceInfo(title or name, 0, (), None, "", licence, (), None, None, columns=(), loader=loader)


SOURCES: Registry[SourceInfo] = Registry("data set", "solera.datasets", _entry, OURS)


def register_data(name: str, title: str = "", licence: str = "yours") -> Callable[[LoaderT], LoaderT]:
    """Make a data set available as `data.name` and `public.name`: `@register_data("mine")` above a function.

    It returns a `Dataset` and is called with those of `path`, `train_size`, `test_size`, `seed`, `length` and
    `image_size` that are among its parameters. It has to give the same samples each time it is called so. Where it
    does not take the sizes itself, balanced samples are taken out of what it returns.
    """

    def add(loader: LoaderT) -> LoaderT:
        SOURCES.add(name, _entry(loader, name, title, licence))
        return loader

    return add


def unnamed(hub: str) -> SourceInfo:
    """What is known of a data set given only by its hub id: nothing, until it is read."""
    return SourceInfo(
        title=hub,
        classes=0,
        shape=(),
        rows=None,
        hub=hub,
        licence="see its page on the hub",
        formats=("parquet", "csv"),
        mean=None,
        std=None,
        columns=(),
    )
