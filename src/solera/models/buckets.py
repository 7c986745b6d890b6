"""Texts of different lengths in one minibatch, without computing on most of the padding.

A text is read in the smallest of a few lengths that holds it. The length depends on that text alone. Padding changes
the last bits of an answer, so a length that depended on the rest of the minibatch would make stored answers differ
from recomputed ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solera.core.tensors import sent
from solera.place.placement import tricks_of

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens; longer texts are read in full


def real(ids: Tensor, padding: int) -> Tensor:
    """The tokens that are not padding. A text of padding keeps its first token: a model needs at least one."""
    mask = ids != padding
    first = ~mask.any(1)
    return torch.cat([(mask[:, 0] | first)[:, None], mask[:, 1:]], 1)


def bucket_of(ids: Tensor, padding: int) -> Tensor:
    """The length in which each text is read. int64 [n], on the CPU, with one read from the device."""
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    needed = (places * real(ids, padding)).amax(1).cpu()
    sizes = torch.tensor([*(b for b in BUCKETS if b < ids.shape[1]), ids.shape[1]])
    return sizes[torch.searchsorted(sizes, needed)]


def in_buckets(read: Callable[[Tensor], Tensor], ids: Tensor, padding: int, training: bool) -> Tensor:
    """The features that `read` gives for these texts, each in its own length: [n, features].

    Except in training, answers must not depend on the rest of the batch. So a bucket is filled up with copies of its
    last text to as many rows as the device needs for that.

    In training, an accelerator reads texts in full length with padding: the length they need would have to be read
    back from it at every step.
    """
    tricks = tricks_of(ids.device)
    if torch.jit.is_tracing() or torch.compiler.is_compiling():  # an exported model has one path for all texts
        return read(ids)
    if not len(ids):  # a dry run has no texts but needs the width of the answer
        return read(ids.new_full((1, ids.shape[1]), padding))[:0]
    if training and not tricks.reads_in_steps:
        return read(ids)
    buckets = bucket_of(ids, padding)
    sizes = buckets.unique().tolist()
    least = 1 if training else tricks.least_rows
    places, parts = [], []
    for size in sizes:
        rows = sent((buckets == size).nonzero().flatten(), ids.device)
        some = ids[rows, :size]
        if len(rows) < least:
            some = torch.cat([some, some[-1:].expand(least - len(rows), size)])
        places.append(rows)
        parts.append(read(some)[: len(rows)])
    if len(sizes) == 1:
        return parts[0]
    return torch.cat(parts).index_select(0, torch.cat(places).argsort())
