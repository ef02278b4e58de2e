"""Tokens from any text, split and batched as pure functions of the seed.

**Sources.** A folder (its text files, recursively, in order of their paths), one text file, or a ``.bin``
of uint16 tokens; without a path, the source text of this Python's standard library (about 12 MB). Text is
read as bytes, one token a byte, with token 0 (which text does not contain) at the end of each file. Text
is turned into tokens once, into a ``.bin`` in the cache directory, and mapped into memory from there.

**Split.** The stream is cut into contiguous segments of 8192 tokens (fewer in a short text). Of every 20
segments in a row one, drawn by the seed, is for validation: so validation runs through the whole text
evenly, and about a twentieth of it. A sequence never leaves its segment, so no token is seen both in
training and validation. (Passages that a text repeats are not looked for.)

**Order.** Training segments are cut into windows of T + 1 tokens that overlap by one. Epoch e goes through
all windows once, in an order, and from a start inside each segment, drawn from (seed, e). Sample number i
of the run is therefore a pure function of (seed, i), and batch k is the samples k * B to k * B + B - 1:
resuming needs only a number.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from elbowroom.errors import UsageError

Batch = tuple[torch.Tensor, torch.Tensor]
Tokens = npt.NDArray[np.uint16]

_SEGMENT_TOKENS = 8192
_SEGMENTS_PER_VALIDATION = 20
_END_OF_FILE = 0
_BYTE_VOCABULARY = 256
# First number of every generator's seed sequence: draws for different purposes never share a stream.
_SPLIT, _ORDER = 1, 2


class TokenData:
    """A split token stream; its batches are ``(tokens, targets)``, each (B, T) int64 on CPU."""

    def __init__(self, tokens: Tokens, *, seed: int, sequence_length: int, batch_size: int, name: str) -> None:
        """Raises UsageError if the stream is too short for one training and one validation sequence."""
        self.n_tokens = len(tokens)
        self._tokens = tokens
        self._seed = seed
        self._length = sequence_length
        self._batch_size = batch_size
        needed = 2 * (sequence_length + 1)
        if self.n_tokens < needed:
            raise UsageError(
                f"--sequence-length {sequence_length} needs at least {needed} tokens (one sequence to train "
                f"on, one to validate), but {name} has {self.n_tokens}; shorten it or give more text"
            )
        n_even = self.n_tokens // _SEGMENTS_PER_VALIDATION
        self._segment_tokens = max(sequence_length + 1, min(_SEGMENT_TOKENS, n_even))
        self.validation_segments, self.training_segments = self._split()
        self._windows_per_segment = (self._segment_tokens - 1) // sequence_length
        self.tokens_per_batch = batch_size * sequence_length
        self.n_windows = len(self.training_segments) * self._windows_per_segment

    def batch(self, step: int) -> Batch:
        """Training batch number ``step``, counted from 0."""
        first = step * self._batch_size
        return self._gather([self.training_start(index) for index in range(first, first + self._batch_size)])

    def validation_batches(self, n_batches: int) -> Iterator[Batch]:
        """At most ``n_batches`` batches, always the same, evenly spread over the validation segments."""
        starts = [
            int(segment) * self._segment_tokens + window * self._length
            for segment in self.validation_segments
            for window in range(self._windows_per_segment)
        ]
        n_wanted = min(n_batches * self._batch_size, len(starts))
        chosen = [starts[index * len(starts) // n_wanted] for index in range(n_wanted)]
        for first in range(0, n_wanted, self._batch_size):
            yield self._gather(chosen[first : first + self._batch_size])

    def n_validation_targets(self, n_batches: int) -> int:
        """How many targets ``validation_batches(n_batches)`` holds in all."""
        n_windows = len(self.validation_segments) * self._windows_per_segment
        return min(n_batches * self._batch_size, n_windows) * self._length

    def training_start(self, sample: int) -> int:
        """Where sample number ``sample`` of the run begins in the token stream."""
        epoch, place = divmod(sample, self.n_windows)
        order, shifts = self._epoch(epoch)
        segment, window = divmod(int(order[place]), self._windows_per_segment)
        start_of_segment = int(self.training_segments[segment]) * self._segment_tokens
        return start_of_segment + int(shifts[segment]) + window * self._length

    def _split(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        generator = np.random.default_rng((_SPLIT, self._seed))
        n_segments = self.n_tokens // self._segment_tokens
        groups = np.array_split(np.arange(n_segments), max(1, n_segments // _SEGMENTS_PER_VALIDATION))
        validation = np.array([generator.choice(group) for group in groups])
        return validation, np.setdiff1d(np.arange(n_segments), validation)

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        spare = (self._segment_tokens - 1) % self._length
        return _draw_epoch(self._seed, epoch, self.n_windows, len(self.training_segments), spare)

    def _gather(self, starts: list[int]) -> Batch:
        rows = np.stack([self._tokens[start : start + self._length + 1] for start in starts]).astype(np.int64)
        both = torch.from_numpy(rows)  # (B, T + 1)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@lru_cache(maxsize=2)
def _draw_epoch(
    seed: int, epoch: int, n_windows: int, n_segments: int, spare: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The order of an epoch's windows, and how far into its segment each segment's first window begins."""
    generator = np.random.default_rng((_ORDER, seed, epoch))
    return generator.permutation(n_windows), generator.integers(0, spare + 1, n_segments)


# ----------------------------------------------------------------------------------------------------
# Reading
# ----------------------------------------------------------------------------------------------------


def open_tokens(path: Path | None, *, vocabulary: int, cache_dirs: tuple[Path, ...]) -> tuple[Tokens, str]:
    """The memory-mapped tokens of ``path`` (see the module), and a name for messages.

    ``cache_dirs``: where the tokens of a text may be written; the first that can be.
    Raises UsageError for a path that is missing, unreadable or empty, and for tokens outside the vocabulary.
    """
    if path is None:
        name, files = "the standard library's text", _standard_library()
    elif not path.exists():
        raise UsageError(f"--data {path}: no such file or folder")
    elif path.suffix == ".bin" and path.is_file():
        name = str(path)
        return _checked(_map_bin(path), vocabulary, name), name
    else:
        name, files = str(path), _text_files(path)
    return _checked(_map_bin(_tokenised(files, name, cache_dirs)), vocabulary, name), name


def text_of(tokens: list[int]) -> str | None:
    """Byte tokens as printable text (ends of files as line feeds); None if they are not bytes."""
    if any(token >= _BYTE_VOCABULARY for token in tokens):
        return None
    text = bytes(tokens).decode("utf-8", errors="replace").replace("\0", "\n")
    # A model may write anything, also what a terminal obeys.
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def user_cache_dir() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elbowroom"


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return [file for file in sorted(root.rglob("*.py")) if not left_out & set(file.relative_to(root).parts)]


def _text_files(path: Path) -> list[Path]:
    """The text files of a folder, hidden ones left out, or the one file itself."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*"))
    files = [
        file
        for file in found
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    with _readable(path):
        texts = [file for file in files if _looks_like_text(file)]
    if not texts:
        raise UsageError(f"--data {path}: no text files in this folder ({len(files)} files looked at)")
    return texts


def _looks_like_text(file: Path) -> bool:
    with file.open("rb") as stream:
        beginning = stream.read(8192)
    return bool(beginning) and b"\0" not in beginning


def _tokenised(files: list[Path], name: str, cache_dirs: tuple[Path, ...]) -> Path:
    """The ``.bin`` of these files, written unless it is there; its name tells their paths, sizes and
    times."""
    with _readable(Path(name)):
        facts = [f"{file}|{file.stat().st_size}|{file.stat().st_mtime_ns}" for file in files]
    if sum(file.stat().st_size for file in files) == 0:
        raise UsageError(f"--data {name}: empty, there is nothing to learn from")
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    for number, cache_dir in enumerate(cache_dirs):
        target = cache_dir / f"tokens-{digest}.bin"
        if target.exists():
            return target
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=cache_dir, suffix=".tmp")
        except OSError as error:
            if number + 1 < len(cache_dirs):
                continue
            raise UsageError(f"cannot write the tokens of {name} to {cache_dir}: {error.strerror}") from error
        _write_tokens(files, name, handle, temporary)
        os.replace(temporary, target)
        return target
    raise AssertionError("no cache directory was given")


def _write_tokens(files: list[Path], name: str, handle: int, temporary: str) -> None:
    try:
        with open(handle, "wb") as out:
            for file in files:
                with _readable(file):
                    content = file.read_bytes()
                if b"\0" in content:
                    raise UsageError(f"--data {name}: {file} is not text: it holds zero bytes")
                one_byte = np.frombuffer(content + bytes([_END_OF_FILE]), dtype=np.uint8)
                out.write(one_byte.astype("<u2").tobytes())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _map_bin(path: Path) -> Tokens:
    with _readable(path):
        n_bytes = path.stat().st_size
        if n_bytes == 0:
            raise UsageError(f"--data {path}: empty, there is nothing to learn from")
        if n_bytes % 2:
            raise UsageError(f"--data {path}: {n_bytes} bytes are no whole number of uint16 tokens (cut off?)")
        return np.memmap(path, dtype="<u2", mode="r")


def _checked(tokens: Tokens, vocabulary: int, name: str) -> Tokens:
    """``tokens`` if all are in the vocabulary; read through once, in pieces."""
    piece = 1 << 24
    for start in range(0, len(tokens), piece):
        part = tokens[start : start + piece]
        place = int(part.argmax())
        if part[place] >= vocabulary:
            raise UsageError(
                f"--data {name}: token {part[place]} at position {start + place} is outside the model's "
                f"vocabulary of {vocabulary}; use a model with a larger one, such as --model gpt2"
            )
    return tokens


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--data {error.filename or path}: cannot be read: {error.strerror}") from error
