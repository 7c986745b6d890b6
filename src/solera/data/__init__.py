"""Data: sources by name, users' own data, partitions among clients, and public data for distillation."""

from .catalogue import SOURCES, SourceInfo, register_data
from .dataset import Dataset, from_tensors, from_texts, from_torch
from .encodings import tokenize
from .partition import Partition, PartitionConfig, balanced, class_counts, hold_out, partition, split_test
from .public import (
    Public,
    PublicConfig,
    make_public,
    public_from_dataset,
    public_from_generator,
    public_from_noise,
    public_from_samples,
)
from .sources import from_folder, from_hf, load, source_info
from .unlabelled import read_samples

__all__ = [
    "SOURCES",
    "Dataset",
    "Partition",
    "PartitionConfig",
    "Public",
    "PublicConfig",
    "SourceInfo",
    "balanced",
    "class_counts",
    "from_folder",
    "from_hf",
    "from_tensors",
    "from_texts",
    "from_torch",
    "hold_out",
    "load",
    "make_public",
    "partition",
    "public_from_dataset",
    "public_from_generator",
    "public_from_noise",
    "public_from_samples",
    "read_samples",
    "register_data",
    "source_info",
    "split_test",
    "tokenize",
]
