"""``text``: byte-level language models; by default on the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradwire.tools.experiments.errors import DataError, check_known
from gradwire.tools.experiments.tasks.base import Source, Task

LENGTH = 64
"""Number of bytes that a sample predicts."""
DEFAULT_BYTES = 2_000_000
EVALUATION_BYTES = 64_000
EVALUATION_BATCH = 50
BYTES_VALUES = 256


class Gru(nn.Module):
    """Embedding, one recurrent layer, and logits over the next byte."""

    def __init__(self, width: int = 192, embedding: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES_VALUES, embedding)
        self.recurrent = nn.GRU(embedding, width, batch_first=True)
        self.logits = nn.Linear(width, BYTES_VALUES)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits ``[batch, length, 256]`` for ``text`` ``[batch, length]``."""
        hidden, _ = self.recurrent(self.embed(text))
        out: Tensor = self.logits(hidden)
        return out


class Transformer(nn.Module):
    """Embeddings of bytes and places, causal encoder layers, and logits over the next byte."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 4, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES_VALUES, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.logits = nn.Linear(width, BYTES_VALUES)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits ``[batch, length, 256]`` for ``text`` ``[batch, length]``."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.tokens(text) + self.places[:length], mask=mask, is_causal=True)
        out: Tensor = self.logits(hidden)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"gru": Gru, "transformer": lambda: Transformer(width=96, layers=2)}


@dataclass(frozen=True)
class Windows:
    """All windows of ``LENGTH + 1`` bytes of a text; evaluation takes those of a held-out tail, without overlap."""

    text: Tensor
    held_out: Tensor

    @property
    def samples(self) -> int:
        """Number of windows in the training text."""
        return self.text.numel() - LENGTH

    def batch(self, indices: Tensor, part: slice, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return windows that start at ``indices``, and the same shifted by one."""
        rows = self.text[indices[part][:, None] + torch.arange(LENGTH + 1)].to(torch.int64)
        return rows[:, :-1], rows[:, 1:]

    def evaluation(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return every ``world_size``-th batch of windows of the held-out text."""
        count = (self.held_out.numel() - 1) // LENGTH
        for first in range(rank * EVALUATION_BATCH, count, world_size * EVALUATION_BATCH):
            starts = torch.arange(first, min(first + EVALUATION_BATCH, count)) * LENGTH
            rows = self.held_out[starts[:, None] + torch.arange(LENGTH + 1)].to(torch.int64)
            yield rows[:, :-1], rows[:, 1:]


def standard_library() -> bytes:
    """Join the source of the standard library's top-level modules in the order of their names, up to 2 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= DEFAULT_BYTES:
            break
    return bytes(text[:DEFAULT_BYTES])


def read_text(path: Path) -> bytes:
    """Read a file, or all .txt files of a folder in the order of their names; raises DataError."""
    if not path.exists():
        raise DataError(f"--data {path} does not exist; expected a text file or a folder of .txt files")
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"--data {path} holds no .txt file")
    try:
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Settings of the ``text`` task; accuracy is the share of next bytes that are guessed right.

    ``model`` is "gru" (one recurrent layer of width 192) or "transformer" (two encoder layers of width 96).
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = (
        "byte-level language model; the Python standard library's source, or --data FILE_OR_FOLDER of .txt"
    )
    evaluated_on: ClassVar[str] = "the text's last 64 000 bytes (at most a tenth), kept out of training"

    steps: int = 500
    batch: int = 64
    lr: float = 0.004
    optimizer: str = "adam"
    schedule: str = "cosine"
    eval_every: int = 50
    model: str = "gru"

    def __post_init__(self) -> None:
        """Refuse settings that make no sense; raises UsageError."""
        super().__post_init__()
        check_known("model", self.model, MODELS, " of the task text")

    def build_model(self) -> nn.Module:
        """Build the network."""
        return MODELS[self.model]()

    def check_data(self) -> None:
        """Check that the text exists."""
        if self.data is not None:
            read_text(self.data_path())

    def load(self) -> Source:
        """Read the text and keep its tail for evaluation."""
        data = standard_library() if self.data is None else read_text(self.data_path())
        tail = min(EVALUATION_BYTES, len(data) // 10)
        if tail <= LENGTH:
            least = 10 * (LENGTH + 1)
            raise DataError(f"{self.data or 'standard library'}: bytes of text: expected {least}, found {len(data)}")
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return Windows(text[:-tail], text[-tail:])
