"""Images with labels: idx files as MNIST ships them, and the digits of scikit-learn."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridtrainer.errors import DataError

_UNSIGNED_BYTE = 0x08


class LabelledImages:
    """Images as bytes with their labels; samples come out standardized by the mean and spread given.

    >>> images = LabelledImages(torch.zeros(3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 2]), 0.0, 255.0)
    >>> [part.shape for part in images.batch_of([0, 2])]
    [torch.Size([2, 1, 4, 4]), torch.Size([2])]
    """

    draws_nothing = True

    def __init__(self, images: Tensor, labels: Tensor, mean: float, spread: float) -> None:
        self.images = images  # (samples, height, width), uint8
        self.labels = labels
        self.mean = mean
        self.spread = spread

    def __len__(self) -> int:
        return self.images.shape[0]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch_of([index])
        return images[0], labels[0]

    def batch_of(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Standardized images, (batch, 1, height, width), and their labels."""
        places = torch.tensor(indices, device=self.images.device)
        chosen = torch.where(places < 0, places + len(self), places)
        # Whole images are copied at once; an index in brackets is followed byte by byte.
        images = self.images.index_select(0, chosen).float().sub_(self.mean).div_(self.spread)
        return images.unsqueeze(1), self.labels.index_select(0, chosen)


@dataclass(frozen=True)
class ImageSplits:
    """Train, validation and probe images, and how many classes they have."""

    train: LabelledImages
    validation: LabelledImages
    probe: LabelledImages
    classes: int


def load_digits(validation_share: float, probe_share: float, seed: int) -> ImageSplits:
    """The 1,797 handwritten digits of scikit-learn, 8x8.

    Raises:
        DataError: where scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            "The digits come with scikit-learn.", 'Install it: pip install scikit-learn, or ".[demo]" in the clone.'
        ) from error
    digits = datasets.load_digits()
    images = torch.tensor(digits.images * (255 / 16)).to(torch.uint8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    validation = int(len(images) * validation_share)
    held_out, rest = order[:validation], order[validation:]
    return _splits(images[rest], labels[rest], images[held_out], labels[held_out], probe_share, len(images))


def load_idx(folder: str | Path, probe_share: float) -> ImageSplits:
    """MNIST-like idx files, plain or `.gz`: the train files give train and probe, the t10k files validation.

    Raises:
        DataError: if a file is missing or is not what it should be.
    """
    root = Path(folder)
    images, labels = (read_idx(_find(root, f"train-{kind}")) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    held_out = [read_idx(_find(root, f"t10k-{kind}")) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    for name, pair in (("train", (images, labels)), ("t10k", held_out)):
        if pair[0].dim() != 3 or pair[1].dim() != 1 or len(pair[0]) != len(pair[1]) or not len(pair[0]):
            raise DataError(
                f"The {name} files in {root} do not match: images {tuple(pair[0].shape)} and labels "
                f"{tuple(pair[1].shape)}.",
                "Use the images and labels of one data set.",
            )
    return _splits(images, labels.long(), held_out[0], held_out[1].long(), probe_share, len(images))


def read_idx(path: Path) -> Tensor:
    """One idx file of unsigned bytes.

    Raises:
        DataError: if it is not one.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, dimensions = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"The idx file {path} cannot be read: {error}.", "Fetch it again.") from error
    offset = 4 + 4 * dimensions
    if zero or kind != _UNSIGNED_BYTE or not dimensions or len(raw) - offset != math.prod(shape):
        raise DataError(
            f"{path} is not an idx file of bytes: its header does not match its {len(raw)} bytes.", "Fetch it again."
        )
    if len(raw) == offset:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(raw[offset:]), dtype=torch.uint8).view(shape)


def _find(root: Path, name: str) -> Path:
    for candidate in (root / name, root / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"{root} has no file {name} or {name}.gz.", "Point `data.path` at the folder with the four idx files."
    )


def _splits(
    images: Tensor, labels: Tensor, held_out: Tensor, held_out_labels: Tensor, probe_share: float, total: int
) -> ImageSplits:
    probe = max(1, int(total * probe_share))
    train = len(images) - probe
    if train < 1 or not len(held_out):
        raise DataError(f"{total} images are too few for three splits.", "Use more images or smaller shares.")
    pixels = images[:train].float()
    mean, spread = pixels.mean().item(), max(pixels.std().item(), 1e-6)
    return ImageSplits(
        train=LabelledImages(images[:train], labels[:train], mean, spread),
        probe=LabelledImages(images[train:], labels[train:], mean, spread),
        validation=LabelledImages(held_out, held_out_labels, mean, spread),
        classes=int(labels.max()) + 1,
    )
