"""Tokens, split and order: pure functions of the seed, and one clear line for everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from elbowroom.errors import UsageError
from elbowroom.training.data import TokenData, open_tokens, text_of


def stream(n_tokens: int, **changes: int) -> TokenData:
    """Token i is i: every token tells where it came from."""
    settings = {"seed": 0, "sequence_length": 16, "batch_size": 4} | changes
    return TokenData(np.arange(n_tokens, dtype=np.uint16), name="numbers", **settings)  # type: ignore[arg-type]


def opened(path: Path | None, cache: Path, vocabulary: int = 256) -> list[int]:
    return open_tokens(path, vocabulary=vocabulary, cache_dirs=(cache,))[0].tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- order


def test_targets_are_the_next_tokens() -> None:
    data = stream(4000)
    for tokens, targets in [data.batch(3), *data.validation_batches(2)]:
        assert tokens.shape == targets.shape == (4, 16)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens + 1, targets)


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    straight = [stream(4000).batch(step)[0] for step in range(60)]
    data = stream(4000)
    for step in (59, 0, 31, 31, 7):  # any order, any number of times
        assert torch.equal(data.batch(step)[0], straight[step])
    assert not torch.equal(stream(4000, seed=1).batch(0)[0], straight[0])


def test_samples_do_not_depend_on_the_batch_size() -> None:
    fours = torch.cat([stream(4000).batch(step)[0] for step in range(6)])
    eights = torch.cat([stream(4000, batch_size=8).batch(step)[0] for step in range(3)])
    assert torch.equal(fours, eights)


def test_an_epoch_goes_through_every_window_once_and_epochs_differ() -> None:
    data = stream(4000)
    first = [data.training_start(sample) for sample in range(data.n_windows)]
    second = [data.training_start(sample) for sample in range(data.n_windows, 2 * data.n_windows)]
    assert len(set(first)) == len(set(second)) == data.n_windows
    seen = [token for start in first for token in range(start, start + 16)]
    assert len(seen) == len(set(seen))  # no token is an input twice in one epoch
    assert first != second


# ---------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize("n_tokens", [34, 100, 4000, 60000])
def test_no_token_is_both_trained_on_and_validated(n_tokens: int) -> None:
    data = stream(n_tokens)
    trained = {
        token
        for sample in range(3 * data.n_windows)
        for token in range(data.training_start(sample), data.training_start(sample) + 17)
    }
    validated = set()
    for tokens, targets in data.validation_batches(10**6):
        validated |= set(tokens.flatten().tolist()) | set(targets.flatten().tolist())
    assert trained
    assert validated
    assert not trained & validated
    assert max(trained | validated) < n_tokens


def test_validation_runs_through_the_whole_text() -> None:
    data = TokenData(np.zeros(8192 * 200, dtype=np.uint16), seed=3, sequence_length=64, batch_size=4, name="zeros")
    places = sorted(data.validation_segments.tolist())
    assert [place // 20 for place in places] == list(range(10))  # one of every twenty segments in a row
    other = TokenData(np.zeros(8192 * 200, dtype=np.uint16), seed=4, sequence_length=64, batch_size=4, name="zeros")
    assert places != sorted(other.validation_segments.tolist())


def test_validation_batches_are_always_the_same_and_counted() -> None:
    data = stream(60000)
    once, twice = list(data.validation_batches(3)), list(data.validation_batches(3))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(once, twice, strict=True))
    assert sum(targets.numel() for _, targets in once) == data.n_validation_targets(3) == 3 * 4 * 16
    everything = list(data.validation_batches(10**6))
    assert sum(targets.numel() for _, targets in everything) == data.n_validation_targets(10**6)


# ---------------------------------------------------------------------------------------------- sources


def test_a_folder_is_read_in_order_of_paths_without_hidden_and_binary_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b" / "one.txt").write_text("bé")
    (folder / "a.md").write_text("a")
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".git" / "config").write_text("no")
    assert bytes(opened(folder, tmp_path / "cache")) == b"a\0" + "bé".encode() + b"\0"


def test_a_text_is_tokenised_once_and_again_when_it_changes(tmp_path: Path) -> None:
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("hello")
    assert opened(text, cache) == [*b"hello", 0]
    (written,) = cache.iterdir()
    before_ns = written.stat().st_mtime_ns
    assert opened(text, cache) == [*b"hello", 0]
    assert written.stat().st_mtime_ns == before_ns
    text.write_text("hello again")
    assert opened(text, cache) == [*b"hello again", 0]
    assert [file.suffix for file in cache.iterdir()] == [".bin", ".bin"]


def test_the_next_cache_directory_is_taken_if_the_first_cannot_be_written(tmp_path: Path) -> None:
    text, blocked = tmp_path / "text.txt", tmp_path / "blocked"
    text.write_text("hello")
    blocked.write_text("a file where a folder should be")
    tokens, _ = open_tokens(text, vocabulary=256, cache_dirs=(blocked / "cache", tmp_path / "second"))
    assert tokens.tolist() == [*b"hello", 0]
    assert len(list((tmp_path / "second").iterdir())) == 1
    with pytest.raises(UsageError, match=r"^cannot write the tokens of .*text\.txt to .*blocked/cache: "):
        open_tokens(text, vocabulary=256, cache_dirs=(blocked / "cache",))


def test_a_bin_is_mapped_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.array([1, 50000, 7], dtype="<u2").tofile(path)
    tokens, name = open_tokens(path, vocabulary=50257, cache_dirs=())
    assert isinstance(tokens, np.memmap)
    assert (tokens.tolist(), name) == ([1, 50000, 7], str(path))


def test_the_default_is_the_standard_library_without_its_tests(tmp_path: Path) -> None:
    tokens, name = open_tokens(None, vocabulary=256, cache_dirs=(tmp_path,))
    text = bytes(np.asarray(tokens).astype(np.uint8))
    assert name == "the standard library's text"
    assert 5_000_000 < len(text) < 30_000_000
    assert b"class ArgumentParser(" in text
    assert b"class TestArgumentParser" not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt: no such file or folder"),
        ("empty.txt", b"", "empty.txt: empty, there is nothing to learn from"),
        ("empty.bin", b"", "empty.bin: empty, there is nothing to learn from"),
        ("odd.bin", b"abc", r"odd.bin: 3 bytes are no whole number of uint16 tokens \(cut off\?\)"),
        ("zip.txt", b"PK\0", "zip.txt: .*zip.txt is not text: it holds zero bytes"),
        (
            "large.bin",
            np.array([3, 300, 5], dtype="<u2").tobytes(),
            "large.bin: token 300 at position 1 is outside the model's vocabulary of 256; use a model with a "
            "larger one, such as --model gpt2",
        ),
    ],
)
def test_wrong_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^--data .*{message}$"):
        opened(path, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))  # nothing half-written is left


def test_a_folder_without_text_says_how_many_files_it_saw(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "x.png").write_bytes(b"\0")
    with pytest.raises(UsageError, match=r"texts: no text files in this folder \(1 files looked at\)$"):
        opened(tmp_path / "texts", tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"^--data .*secret\.txt: cannot be read: Permission denied$"):
        opened(path, tmp_path / "cache")


def test_too_long_a_sequence_names_both_numbers() -> None:
    message = r"^--sequence-length 16 needs at least 34 tokens .* but numbers has 33; shorten it or give more"
    with pytest.raises(UsageError, match=message):
        stream(33)


def test_generated_text_is_printable() -> None:
    assert text_of([*b"a\0b\tc\n", 27, *b"[2J", 200]) == "a\nb\tc\n\ufffd[2J\ufffd"
    assert text_of([65, 256]) is None
