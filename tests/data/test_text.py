"""Text as token windows: what is read, how it is split, and which numbers it becomes."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import sysconfig
from pathlib import Path

import pytest
import torch

from hybridtrainer.data.text import (
    BPETokenizer,
    ByteTokenizer,
    TextSplits,
    TokenWindows,
    file_documents,
    load_text,
    stdlib_documents,
)
from hybridtrainer.errors import DataError

DATA = os.environ.get("HYBRIDTRAINER_TEST_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="HYBRIDTRAINER_TEST_DATA is not set")


def real(*parts: str) -> Path:
    return Path(DATA or "", *parts)


class Numbers:
    """Every byte pair is a token: two-byte numbers, so that each token of a test says where it was."""

    vocabulary = 1 << 16

    def encode(self, text: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint16).to(torch.int32)


def counted(total: int, context: int = 4, validation: float = 0.1, probe: float = 0.1) -> TextSplits:
    text = torch.arange(total, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    half = total // 2 * 2
    documents = [bytes(text[:half].tolist()), bytes(text[half:].tolist())]
    return load_text([part for part in documents if part], Numbers(), context, validation, probe, "count")


def tokens_of(windows: TokenWindows) -> set[int]:
    return {int(token) for index in range(len(windows)) for token in windows[index]}


@pytest.mark.parametrize(("validation", "probe"), [(0.05, 0.02), (0.1, 0.1), (0.45, 0.4)])
@pytest.mark.parametrize("context", [1, 4, 7])
def test_splits_share_no_token_and_lose_less_than_a_window_each(context, validation, probe):
    splits = counted(1000, context, validation, probe)
    train, held_out, probes = (tokens_of(part) for part in (splits.train, splits.validation, splits.probe))
    assert not train & held_out and not train & probes and not held_out & probes
    assert max(train) < min(probes) and max(probes) < min(held_out)
    assert len(train) + len(held_out) + len(probes) > 1000 - 3 * (context + 1)
    assert len(held_out) == pytest.approx(1000 * validation, abs=context + 2)
    assert len(probes) == pytest.approx(1000 * probe, abs=context + 2)
    assert splits.vocabulary == 1 << 16


def test_documents_are_joined_in_order():
    splits = load_text([b"abcd", b"", b"efgh" * 20], ByteTokenizer(), 2, 0.1, 0.1, "letters")
    assert bytes(splits.train.tokens[:8].tolist()) == b"abcdefgh"


@pytest.mark.parametrize("documents", [[], [b""], [b"a"], [b"abcdefgh" * 3]])
def test_too_little_text_is_refused_with_its_size(documents):
    total = sum(map(len, documents))
    with pytest.raises(DataError, match=f"some text has {total} tokens: .* windows of 33"):
        load_text(documents, ByteTokenizer(), 32, 0.1, 0.1, "some text")


def test_windows_follow_each_other_and_share_only_their_last_token():
    windows = TokenWindows(torch.arange(14), context=4)
    assert len(windows) == 3
    assert [windows[i].tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert windows[0].dtype == torch.long


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_window_is_counted_only_when_it_is_whole(tokens, count):
    windows = TokenWindows(torch.arange(tokens), context=4)
    assert len(windows) == count
    for index in (-1, count):
        with pytest.raises(IndexError):
            windows[index]


def test_a_batch_is_its_windows_stacked():
    windows = TokenWindows(torch.arange(50, dtype=torch.uint8), context=4)
    batch = windows.batch_of([7, 0, 3, 3])
    assert torch.equal(batch, torch.stack([windows[i] for i in (7, 0, 3, 3)]))
    assert batch.dtype == torch.long


def test_bytes_are_their_own_tokens():
    text = bytes(range(256)) + "é".encode()
    assert ByteTokenizer().encode(text).tolist() == list(text)
    assert ByteTokenizer().encode(b"").tolist() == []
    assert ByteTokenizer().vocabulary == 256


def test_the_standard_library_is_read_whole_in_a_fixed_mixed_order():
    documents = stdlib_documents()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert (root / "json" / "decoder.py").read_bytes() in documents
    assert len(documents) > 500
    assert documents == stdlib_documents()
    names = sorted(root.glob("*.py"))
    assert documents[: len(names)] != [name.read_bytes() for name in names]
    assert all(b"def hybridtrainer" not in document for document in documents)


def test_installed_packages_are_not_the_standard_library(tmp_path, monkeypatch):
    for name in ("a.py", "b/c.py", "site-packages/d.py", "dist-packages/e.py", "b/packages/f.py", "g.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert sorted(stdlib_documents()) == [b"a.py", b"b/c.py", b"b/packages/f.py"]


def test_a_python_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no library source"):
        stdlib_documents()


def test_a_file_is_one_document_packed_or_not(tmp_path):
    text = b"some text\n" * 100
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text))
    for name in ("a.txt", "a.txt.gz", "a.txt.xz"):
        assert file_documents(tmp_path / name) == [text]
        assert file_documents(str(tmp_path / name)) == [text]


def test_a_folder_gives_its_text_files_and_no_binary_empty_or_hidden_ones(tmp_path):
    files = {
        "a.txt": b"plain",
        "deep/down/b.md": b"deep",
        "c.gz": gzip.compress(b"zipped"),
        "d.xz": lzma.compress(b"squeezed"),
        "e.bin": b"\x7fELF\0\0\0",
        "f.txt": b"",
        "g.gz": gzip.compress(b"binary\0inside"),
        ".hidden": b"hidden",
        "latin.txt": "Zürich".encode("latin-1"),
    }
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (tmp_path / "broken link").symlink_to(tmp_path / "nowhere")
    expected = [b"plain", b"deep", b"zipped", b"squeezed", "Zürich".encode("latin-1")]
    assert sorted(file_documents(tmp_path)) == sorted(expected)
    assert file_documents(tmp_path) == file_documents(tmp_path)


def test_what_is_in_a_hidden_folder_is_hidden_too(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"[core]")
    (tmp_path / "a.txt").write_bytes(b"plain")
    assert file_documents(tmp_path) == [b"plain"]


def test_a_folder_in_a_hidden_place_is_read_all_the_same(tmp_path):
    folder = tmp_path / ".cache" / "text"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"plain")
    assert file_documents(folder) == [b"plain"]


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: (path / "a").mkdir(parents=True)]
)
def test_nothing_to_read_is_refused(tmp_path, make):
    make(tmp_path / "folder")
    with pytest.raises(DataError, match="folder"):
        file_documents(tmp_path / "folder")


TEXT = bytes(ord("a") + (i * i) % 23 for i in range(5000))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "not packed", "flipped"])
def test_a_damaged_packed_file_is_refused_by_name(tmp_path, suffix, damage):
    packed = (gzip.compress if suffix == ".gz" else lzma.compress)(TEXT)
    middle = len(packed) // 2
    content = {
        "cut": packed[:middle],
        "not packed": b"plain text",
        "flipped": packed[:middle] + bytes(255 - byte for byte in packed[middle : middle + 20]) + packed[middle + 20 :],
    }[damage]
    file = tmp_path / f"damaged{suffix}"
    file.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        file_documents(file)


@needs_data
def test_gpt2_tokens_are_those_of_gpt2():
    tokenizer = BPETokenizer(real("gpt2-bpe"))
    assert tokenizer.vocabulary == 50257
    assert tokenizer.encode(b"hello world").tolist() == [31373, 995]
    assert tokenizer.encode(b"Hello world").tolist() == [15496, 995]
    assert tokenizer.encode(b" hello").tolist() == [23748]
    assert tokenizer.encode(b"").tolist() == []
    assert tokenizer.encode(b"a\xff").tolist() == tokenizer.encode("a�".encode()).tolist()


def decoder() -> dict[int, bytes]:
    """Bytes of each token, from GPT-2's own table, which writes bytes as printable letters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    letters |= {chr(256 + index): byte for index, byte in enumerate(others)}
    table = json.loads(real("gpt2-bpe", "encoder.json").read_text(encoding="utf-8"))
    return {
        number: bytes(letters[letter] for letter in token) if token != "<|endoftext|>" else b""
        for token, number in table.items()
    }


@needs_data
def test_gpt2_tokens_decode_to_the_text_they_came_from():
    tokenizer, table = BPETokenizer(real("gpt2-bpe")), decoder()
    shakespeare = real("tinyshakespeare", "input.txt").read_bytes()[:20_000]
    for text in (shakespeare, "naïve café 東京 😀\n\n\t  x".encode(), Path(__file__).read_bytes()):
        tokens = tokenizer.encode(text)
        assert b"".join(table[token] for token in tokens.tolist()) == text
        assert len(tokens) < len(text)


@needs_data
def test_gpt2_tokens_of_pieces_are_those_of_the_whole_text(monkeypatch):
    tokenizer = BPETokenizer(real("gpt2-bpe"))
    drawn = random.Random(0)
    odd = "".join(drawn.choice("ab \n\t  's\u00a0\u3000\x1c\x8512.!é") for _ in range(20_000))
    for text in (odd, Path(__file__).read_text(encoding="utf-8")):
        monkeypatch.setattr("hybridtrainer.data.text.PIECE", len(text))
        whole = tokenizer.encode(text.encode())
        monkeypatch.setattr("hybridtrainer.data.text.PIECE", 3)
        assert torch.equal(tokenizer.encode(text.encode()), whole)


@needs_data
def test_real_corpora_are_read_packed_and_split_without_sharing_a_token():
    (valid,) = file_documents(real("wikitext-2", "wiki.valid.tokens.xz"))
    assert valid.lstrip().startswith(b"= Homarus gammarus =")
    documents = file_documents(real("tinyshakespeare", "input.txt"))
    assert documents[0].startswith(b"First Citizen:")
    splits = load_text(documents, ByteTokenizer(), 64, 0.05, 0.02, "tinyshakespeare")
    joined = torch.cat([splits.train.tokens, splits.probe.tokens, splits.validation.tokens])
    assert bytes(joined.tolist()) == documents[0]


@pytest.mark.parametrize("missing", [["encoder.json"], ["vocab.bpe"], ["encoder.json", "vocab.bpe"]])
def test_a_tokenizer_folder_that_lacks_a_file_is_refused(tmp_path, missing):
    for name in {"encoder.json", "vocab.bpe"} - set(missing):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=f"lacks {' and '.join(missing)}"):
        BPETokenizer(tmp_path)


def test_a_tokenizer_folder_with_damaged_files_is_refused(tmp_path):
    (tmp_path / "encoder.json").write_text("{ not json")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match=str(tmp_path)):
        BPETokenizer(tmp_path)
