"""Images with labels: idx files, scikit-learn's digits, and splits that share no image."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import datasets
from torch import Tensor

from hybridtrainer.data.images import ImageSplits, LabelledImages, load_digits, load_idx, read_idx
from hybridtrainer.errors import DataError

DATA = os.environ.get("HYBRIDTRAINER_TEST_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="HYBRIDTRAINER_TEST_DATA is not set")


def idx(values: Tensor) -> bytes:
    return struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape) + bytes(values.reshape(-1).tolist())


def written(folder: Path, train: int = 40, held_out: int = 10, packed: bool = False, **replaced: Any) -> Path:
    """Four idx files; every image says which it is in its first two pixels."""

    def images(first: int, count: int) -> Tensor:
        numbers = torch.arange(first, first + count)
        made = torch.zeros(count, 3, 4, dtype=torch.uint8)
        made[:, 0, 0], made[:, 0, 1] = (numbers // 256).to(torch.uint8), (numbers % 256).to(torch.uint8)
        return made

    files = {
        "train-images-idx3-ubyte": idx(images(0, train)),
        "train-labels-idx1-ubyte": idx((torch.arange(train) % 7).to(torch.uint8)),
        "t10k-images-idx3-ubyte": idx(images(train, held_out)),
        "t10k-labels-idx1-ubyte": idx((torch.arange(held_out) % 7).to(torch.uint8)),
    }
    for name, content in (files | {name.replace("_", "-"): value for name, value in replaced.items()}).items():
        if content is None:
            continue
        target = folder / (f"{name}.gz" if packed else name)
        target.write_bytes(gzip.compress(content) if packed else content)
    return folder


def which(images: LabelledImages) -> set[int]:
    return {int(image[0, 0]) * 256 + int(image[0, 1]) for image in images.images}


def test_a_batch_is_made_of_its_images_bit_for_bit():
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (20, 5, 4), generator=drawn, dtype=torch.uint8)
    images = LabelledImages(pixels, torch.arange(20), 72.9, 90.1)
    for indices in ([3, 0, 19, 3], range(2, 7), [-1, -20, 4]):
        batch, labels = images.batch_of(indices)
        chosen = torch.tensor(indices)
        assert torch.equal(batch, ((pixels[chosen].float() - 72.9) / 90.1).unsqueeze(1))
        assert labels.tolist() == [index % 20 for index in indices]
    with pytest.raises(IndexError):
        images[20]
    floats = LabelledImages(pixels.float(), images.labels, 72.9, 90.1)
    assert torch.equal(floats.batch_of([3, 4])[0], images.batch_of([3, 4])[0])
    assert torch.equal(floats.images, pixels.float())


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_give_splits_that_share_no_image(tmp_path, packed):
    splits = load_idx(written(tmp_path, 300, 20, packed), probe_share=0.1)
    train, probe, validation = (which(part) for part in (splits.train, splits.probe, splits.validation))
    assert len(train) == 270 and len(probe) == 30
    assert train | probe == set(range(300)) and not train & probe
    assert validation == set(range(300, 320))
    assert splits.classes == 7
    for part in (splits.train, splits.probe):
        first = which(part)
        assert part.labels.tolist() == [number % 7 for number in sorted(first)]


def test_at_least_one_image_is_kept_for_probes(tmp_path):
    splits = load_idx(written(tmp_path), probe_share=0.001)
    assert (len(splits.train), len(splits.probe)) == (39, 1)


def test_samples_are_standardized_with_the_training_images(tmp_path):
    splits = load_idx(written(tmp_path, 300, 20), probe_share=0.1)
    images, labels = splits.train.batch_of(range(len(splits.train)))
    assert images.shape == (270, 1, 3, 4) and images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    assert (splits.probe.mean, splits.probe.spread) == (splits.train.mean, splits.train.spread)
    assert (splits.validation.mean, splits.validation.spread) == (splits.train.mean, splits.train.spread)


def test_one_sample_is_its_row_of_a_batch(tmp_path):
    images = load_idx(written(tmp_path), probe_share=0.1).train
    batch, labels = images.batch_of([5, 2])
    image, label = images[2]
    assert torch.equal(image, batch[1]) and torch.equal(label, labels[1])
    assert len(images) == 36


def test_images_without_contrast_stay_finite(tmp_path):
    flat = idx(torch.full((40, 3, 4), 9, dtype=torch.uint8))
    splits = load_idx(written(tmp_path, train_images_idx3_ubyte=flat), probe_share=0.1)
    assert splits.train.batch_of([0, 1])[0].isfinite().all()


@pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 3, 2), (1, 1, 1, 6), (0, 28, 28)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_is_read_in_its_shape(tmp_path, shape, suffix):
    values = (torch.arange(torch.Size(shape).numel()) % 256).to(torch.uint8).view(shape)
    file = tmp_path / f"values{suffix}"
    file.write_bytes(gzip.compress(idx(values)) if suffix else idx(values))
    assert torch.equal(read_idx(file), values)


GOOD = idx((torch.arange(3000) % 251).to(torch.uint8))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        GOOD[:4],
        GOOD[:7],
        GOOD[:-1],
        GOOD + b"\0",
        b"\1" + GOOD[1:],
        GOOD[:2] + b"\x0d" + GOOD[3:],  # floats
        GOOD[:3] + b"\0" + GOOD[4:],
        GOOD[:3] + b"\xff" + GOOD[4:],
        GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:],
        b"<html>404 not found</html>",
    ],
    ids=[
        "empty", "two bytes", "no shape", "half a shape", "cut", "too long", "magic", "floats", "no dimensions",
        "many dimensions", "huge", "a web page",
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_idx_file_is_refused_by_name(tmp_path, content, packed):
    file = tmp_path / ("damaged.gz" if packed else "damaged")
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match="damaged"):
        read_idx(file)


def test_a_damaged_packing_is_refused_wherever_the_damage_is(tmp_path):
    packed = gzip.compress(GOOD)
    file = tmp_path / "damaged.gz"
    header = {*range(4, 10)}  # time, flags and system, which say nothing about the data
    for position in range(0, len(packed), 3):
        if position in header:
            continue
        file.write_bytes(packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :])
        with pytest.raises(DataError, match="damaged"):
            read_idx(file)
        file.write_bytes(packed[:position])
        with pytest.raises(DataError, match="damaged"):
            read_idx(file)


@pytest.mark.parametrize("name", ["train_images_idx3_ubyte", "t10k_labels_idx1_ubyte"])
def test_a_missing_idx_file_is_named(tmp_path, name):
    replaced: Any = {name: None}
    written(tmp_path, **replaced)
    with pytest.raises(DataError, match=name.replace("_", "-")):
        load_idx(tmp_path, 0.1)
    with pytest.raises(DataError, match="train-images"):
        load_idx(tmp_path / "nowhere", 0.1)


@pytest.mark.parametrize(
    "replaced",
    [
        {"train_labels_idx1_ubyte": idx(torch.zeros(39, dtype=torch.uint8))},
        {"t10k_labels_idx1_ubyte": idx(torch.zeros(11, dtype=torch.uint8))},
        {"train_images_idx3_ubyte": idx(torch.zeros(40, 12, dtype=torch.uint8))},
        {"train_labels_idx1_ubyte": idx(torch.zeros(40, 1, dtype=torch.uint8))},
        {
            "train_images_idx3_ubyte": idx(torch.zeros(0, 3, 4, dtype=torch.uint8)),
            "train_labels_idx1_ubyte": idx(torch.zeros(0, dtype=torch.uint8)),
        },
        {
            "t10k_images_idx3_ubyte": idx(torch.zeros(0, 3, 4, dtype=torch.uint8)),
            "t10k_labels_idx1_ubyte": idx(torch.zeros(0, dtype=torch.uint8)),
        },
    ],
    ids=["fewer labels", "more labels", "flat images", "square labels", "no training images", "no validation images"],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path, replaced):
    with pytest.raises(DataError, match="do not match"):
        load_idx(written(tmp_path, **replaced), 0.1)


def test_a_single_image_cannot_be_split(tmp_path):
    with pytest.raises(DataError, match="too few"):
        load_idx(written(tmp_path, train=1), 0.1)


def check_digits(splits: ImageSplits, validation: int, probe: int) -> None:
    assert (len(splits.validation), len(splits.probe)) == (validation, probe)
    assert len(splits.train) == 1797 - validation - probe
    assert splits.classes == 10


def test_digits_are_split_into_all_of_scikit_learns_with_their_labels():
    splits = load_digits(0.1, 0.05, seed=0)
    check_digits(splits, 179, 89)
    source = datasets.load_digits()
    pixels = torch.tensor(source.images * (255 / 16)).to(torch.uint8)
    expected = sorted((bytes(i.reshape(-1).tolist()), int(t)) for i, t in zip(pixels, source.target, strict=True))
    found = [
        (bytes(image.reshape(-1).tolist()), int(label))
        for part in (splits.train, splits.validation, splits.probe)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert sorted(found) == expected  # each image once, in one split only


def test_the_seed_decides_the_split_of_the_digits():
    a, b, c = load_digits(0.1, 0.05, seed=0), load_digits(0.1, 0.05, seed=0), load_digits(0.1, 0.05, seed=1)
    assert torch.equal(a.validation.images, b.validation.images)
    assert not torch.equal(a.validation.images, c.validation.images)


def test_shares_that_leave_nothing_to_validate_on_are_refused():
    with pytest.raises(DataError, match="too few"):
        load_digits(0.0001, 0.05, seed=0)


@needs_data
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_sets_are_read(name):
    splits = load_idx(Path(DATA or "") / name, probe_share=0.02)
    assert (len(splits.train), len(splits.probe), len(splits.validation)) == (58_800, 1200, 10_000)
    assert splits.classes == 10
    assert splits.train.images.shape == (58_800, 28, 28)
    for part in (splits.train, splits.probe, splits.validation):
        assert part.labels.unique().tolist() == list(range(10))
    first = {"mnist": [5, 0, 4, 1, 9], "fashion-mnist": [9, 0, 0, 3, 0]}[name]
    assert splits.train.labels[:5].tolist() == first
