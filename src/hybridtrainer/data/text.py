"""Text as token windows: Python's own library, any file, any folder.

The built-in corpus is the source of the standard library, which every Python installation has. Splits are
contiguous ranges of the token stream, so they never share a token.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hybridtrainer.errors import DataError

PIECE = 1 << 16  # characters that one core encodes at a time
_WORD_BEGINS = re.compile(r"[ \n](?=\S)")


class Tokenizer(Protocol):
    """Turns bytes into token numbers below `vocabulary`."""

    vocabulary: int

    def encode(self, text: bytes) -> Tensor:
        """Token numbers of the text."""
        ...


class ByteTokenizer:
    """Every byte is a token."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tensor:
        """The bytes as they are."""
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


class BPETokenizer:
    """GPT-2's byte-pair encoding, from a folder with `encoder.json` and `vocab.bpe`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError as error:
            raise DataError(
                "Byte-pair encoding needs the package `tokenizers`.", 'Install it: pip install ".[bpe]".'
            ) from error
        folder = Path(folder)
        files = [folder / "encoder.json", folder / "vocab.bpe"]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise DataError(
                f"The tokenizer folder {folder} lacks {' and '.join(missing)}.",
                'Point `data.tokenizer` at the folder that has both, or use "bytes".',
            )
        try:
            self._encoder = ByteLevelBPETokenizer(str(files[0]), str(files[1]))
        except Exception as error:  # the package raises nothing more precise
            raise DataError(
                f"The tokenizer in {folder} cannot be read: {error}.", "Fetch encoder.json and vocab.bpe again."
            ) from error
        self.vocabulary = int(self._encoder.get_vocab_size())

    def encode(self, text: bytes) -> Tensor:
        """Token numbers; bytes that are not UTF-8 become replacement characters. All cores work on it."""
        pieces = _pieces(text.decode("utf-8", errors="replace"))
        found = self._encoder.encode_batch(pieces)
        return torch.cat([torch.tensor(piece.ids, dtype=torch.int32) for piece in found])


def _pieces(text: str) -> list[str]:
    """The text in pieces that are encoded apart as they are together.

    Byte-pair encoding merges nothing across the beginning of a word, and the white space before a word belongs to it:
    so a cut is made before the last white space of a run that a word follows.
    """
    cuts = [0]
    while len(text) - cuts[-1] > PIECE:
        found = _WORD_BEGINS.search(text, cuts[-1] + PIECE)
        if found is None:
            break
        cuts.append(found.start())
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]


class TokenWindows:
    """A token stream cut into windows of `context` tokens, each with the one that follows it.

    >>> windows = TokenWindows(torch.arange(10), context=4)
    >>> len(windows), windows[1]
    (2, tensor([4, 5, 6, 7, 8]))
    """

    draws_nothing = True

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.tokens[index * self.context : (index + 1) * self.context + 1].long()

    def batch_of(self, indices: Sequence[int]) -> Tensor:
        """Windows as one tensor, (batch, context + 1)."""
        starts = torch.tensor(indices)[:, None] * self.context
        return self.tokens[starts + torch.arange(self.context + 1)].long()


@dataclass(frozen=True)
class TextSplits:
    """Train, validation and probe windows of one corpus, and the size of its vocabulary."""

    train: TokenWindows
    validation: TokenWindows
    probe: TokenWindows
    vocabulary: int


def load_text(
    documents: Iterable[bytes],
    tokenizer: Tokenizer,
    context: int,
    validation_share: float,
    probe_share: float,
    name: str,
) -> TextSplits:
    """Tokenizes documents and splits them; `name` is what an error calls the corpus.

    Raises:
        DataError: if there is not even one window for each split.
    """
    parts = [tokenizer.encode(document) for document in documents]
    tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    total = len(tokens)
    probe_start = int(total * (1 - validation_share - probe_share))
    validation_start = int(total * (1 - validation_share))
    splits = TextSplits(
        train=TokenWindows(tokens[:probe_start], context),
        probe=TokenWindows(tokens[probe_start:validation_start], context),
        validation=TokenWindows(tokens[validation_start:], context),
        vocabulary=tokenizer.vocabulary,
    )
    if not (len(splits.train) and len(splits.validation) and len(splits.probe)):
        raise DataError(
            f"{name} has {total} tokens: too few for training, validation and probe windows of {context + 1}.",
            "Use more text, a shorter `model.context`, or larger shares.",
        )
    return splits


def stdlib_documents() -> list[bytes]:
    """The source files of Python's standard library, in an order that mixes its packages.

    Raises:
        DataError: where Python was installed without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if "packages" not in file.relative_to(root).parts[0]]
    if not files:
        raise DataError(
            f"This Python has no library source under {root}.", 'Use data.source = "text" with a file of your own.'
        )
    return [file.read_bytes() for file in _mixed(files, root)]


def file_documents(path: str | Path) -> list[bytes]:
    """A text file, or every text file in a folder and below it; `.gz` and `.xz` are unpacked.

    Raises:
        DataError: if there is nothing to read, or a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.", "Check `data.path`.")
    if path.is_file():
        return [_read(path)]
    files = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    documents = [_read(file) for file in _mixed(files, path)]
    texts = [document for document in documents if document and b"\0" not in document[:8192]]
    if not texts:
        raise DataError(f"The folder {path} holds no text file.", "Check `data.path`.")
    return texts


def _mixed(files: Iterable[Path], root: Path) -> list[Path]:
    """A fixed order that has nothing to do with the names, so that every split sees every kind of file."""
    return sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest())


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            return gzip.decompress(raw)
        return lzma.decompress(raw) if path.suffix == ".xz" else raw
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"The text file {path} cannot be read: {error}.", "Check it, or leave it out.") from error
