"""Messages between ranks beside payloads: lengths of rows, and tables of plain values."""

from __future__ import annotations

import base64
import hmac
import json
import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.digests import DIGEST_BYTES, digest_of
from gradwire.exchange.drivers.groups import Group, group_of


def announce(lengths: torch.Tensor) -> torch.Tensor:
    """Return the message with a length for each rank, uint8 ``[ranks, 8]``: 32 bits, then their complement."""
    words = lengths.numpy().astype(np.uint32)
    return torch.from_numpy(np.stack([words, ~words], 1)).view(torch.uint8)


def announced(received: torch.Tensor, rank: int, most: int, first: int = 0) -> torch.Tensor:
    """Return the lengths that ranks from ``first`` on announced, 0 for this rank itself, int64 ``[ranks]``.

    Raises:
        PayloadError: a length changed in transit, or is larger than ``most``.
    """
    words, complements = received.numpy().view(np.uint32).T
    for sender, (length, complement) in enumerate(zip(words.tolist(), complements.tolist()), first):
        if sender != rank and (length ^ complement != 0xFFFFFFFF or length > most):
            raise PayloadError(
                f"{{sender}} announced a row of {length} bytes, with {complement ^ 0xFFFFFFFF} to confirm it, where at "
                f"most {most} fit",
                sender,
            )
    told = torch.from_numpy(words.astype(np.int64))
    if rank >= 0:
        told[rank] = 0
    return told


Plain: TypeAlias = "bool | int | float | str | bytes | list[Plain] | dict[str, Plain] | None"
"""Values of a table."""

T = TypeVar("T")

MOST_BYTES = 1 << 24
"""Largest number of bytes of a message: the layout of a model with 100,000 parameters takes about ten million."""

MOST_DEPTH = 32
"""Largest depth of nested lists and objects."""

MOST_BITS = 2048
"""Largest number of bits of a whole number."""

MOST_DIGITS = 640
"""Largest number of characters of a number, enough for those bits; Python may be set to read no more."""

_BYTES = "$bytes"
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_NESTS = {"[": 1, "{": 1, "]": -1, "}": -1}


def plain(value: object, depth: int = MOST_DEPTH) -> Plain:
    """Return a value as another rank receives it, with lists instead of tuples.

    Args:
        value: None, a number, a string, bytes, or lists, tuples and mappings by strings of these.
        depth: Largest depth of nested lists and mappings.

    Raises:
        IncompatibleError: it holds another type, or is nested more deeply.
    """
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int) and value.bit_length() <= MOST_BITS:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth == 0:
        raise IncompatibleError(f"ranks tell one another lists and dicts at most {MOST_DEPTH} deep: tell flatter ones")
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) and key != _BYTES for key in value):
        return {key: plain(item, depth - 1) for key, item in value.items()}
    raise IncompatibleError(
        f"ranks tell one another None, floats, whole numbers of at most {MOST_BITS} bits, strings, bytes, lists, and "
        f"dicts by strings other than {_BYTES!r}, and this is none of them but of type {type(value).__name__}"
    )


def encode(value: object, subject: str, sender: int, key: bytes = b"") -> bytes:
    """Return the message of a table.

    Args:
        value: See :func:`plain`.
        subject: Name of the table, such as "handshake"; messages with different names cannot be confused.
        sender: Rank that sends it, by its number in the default group.
        key: Key of the digest, which the receiver has, too; empty: anybody can compute it.

    Raises:
        IncompatibleError: the value is not a table.
    """
    try:
        text = _text(plain(value)).encode()
    except UnicodeEncodeError as error:
        raise IncompatibleError(f"a string of the {subject} is not Unicode text: {error}") from None
    return _digest(text, subject, sender, key) + text


def decode(message: bytes, subject: str, sender: int, key: bytes = b"") -> Plain:
    """Return the table of a message, as :func:`plain` gives it.

    Nothing in the message is executed, and memory is bounded by a multiple of its length.

    Raises:
        PayloadError: it is not whole, is of another subject or sender, or was not made by :func:`encode`; the error
            names the sender.
    """
    text = message[DIGEST_BYTES:]
    if not hmac.compare_digest(_digest(text, subject, sender, key), message[:DIGEST_BYTES]):
        stranger = ", or somebody sent it who does not know the secret" if key else ""
        raise PayloadError(
            f"the {subject} from rank {sender}: its checksum differs, so that bytes changed on the way, or it is "
            f"another message{stranger}; run the same version of gradwire on all ranks"
        )
    try:
        return _parsed(text.decode())
    except (TypeError, ValueError) as error:
        # The inner error may quote much of the message.
        raise PayloadError(f"the {subject} from rank {sender} is not a table: {str(error)[:200]}") from None


def all_gather_tables(
    value: object,
    subject: str,
    group: Group | dist.ProcessGroup,
    read: Callable[[Any], T],
    most_bytes: int = MOST_BYTES,
    wait: Callable[[dist.Work], object] = dist.Work.wait,
) -> list[T]:
    """Gather a value from each rank of a group, in the order of ranks in the group (collective call).

    The length of each message is gathered first, together with its first :attr:`Group.table_bytes` bytes, and checked.
    Then memory for the rest is allocated: ``world_size`` times the longest rest.

    Args:
        value: See :func:`plain`.
        subject: Name of the table, the same on all ranks.
        group: The ranks, or a process group over CPU or CUDA tensors.
        read: Called with the table of one rank; its result is returned for that rank. It raises AttributeError,
            KeyError, TypeError or ValueError if the table has another form.
        most_bytes: Largest number of bytes of a message.
        wait: Waits for a collective over CPU tensors.

    Raises:
        IncompatibleError: the value is not a table, or longer than ``most_bytes``; raised before anything is sent.
        PayloadError: a rank sent an invalid message; the error names the rank by its number in the default group.
    """
    group = group_of(group)
    device, ranks, key = group.device, group.ranks, _next_key(group)
    own = _message(value, subject, group.rank, most_bytes, key)
    room = group.table_bytes
    told = torch.empty(len(ranks), 8 + room, dtype=torch.uint8, device=device)
    begin = torch.cat([announce(torch.tensor([len(own)], device="cpu"))[0], _padded(own[:room], room)])
    _gather(told, begin.to(device), group, wait)
    lengths = [_length(row[:8], rank, most_bytes) for row, rank in zip(told, ranks)]
    rows = told[:, 8:]
    if max(lengths) > room:
        rest = torch.empty(len(ranks), max(lengths) - room, dtype=torch.uint8, device=device)
        _gather(rest, _padded(own[room:], max(lengths) - room).to(device), group, wait)
        rows = torch.cat([rows, rest], 1)
    return [_read(row[:length], subject, rank, read, key) for row, length, rank in zip(rows, lengths, ranks)]


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.uint8, device="cpu")
    padded[: len(part)] = part
    return padded


def _next_key(group: Group) -> bytes:
    """Return the key of the next table, another one for each: an earlier table cannot be sent again."""
    group.tables += 1
    return group.key(f"table {group.tables}")


def _gather(rows: torch.Tensor, own: torch.Tensor, group: Group, wait: Callable[[dist.Work], object]) -> None:
    work = group.all_gather(rows, own)
    if own.device.type == "cpu":
        wait(work)
    else:
        work.wait()


def broadcast_table(
    value: object,
    subject: str,
    group: Group | dist.ProcessGroup,
    read: Callable[[Any], T],
    source: int = 0,
    most_bytes: int = MOST_BYTES,
) -> T:
    """Return the value of one rank of a group on all ranks (collective call); see :func:`all_gather_tables`.

    Args:
        value: The value; used on the source only.
        source: Rank of the source in the group.
    """
    group = group_of(group)
    device, rank, key = group.device, group.ranks[source], _next_key(group)
    sends = group.place == source
    own = _message(value, subject, rank, most_bytes, key) if sends else torch.empty(0, dtype=torch.uint8, device="cpu")
    told = announce(torch.tensor([len(own)], device="cpu"))[0].to(device)
    group.broadcast(told, source)
    length = _length(told, rank, most_bytes)
    row = own.to(device) if sends else torch.empty(length, dtype=torch.uint8, device=device)
    group.broadcast(row, source)
    return _read(row, subject, rank, read, key)


def _message(value: object, subject: str, sender: int, most_bytes: int, key: bytes) -> torch.Tensor:
    message = encode(value, subject, sender, key)
    if len(message) > most_bytes:
        raise IncompatibleError(
            f"the {subject} of this rank takes {len(message)} bytes, and ranks take at most {most_bytes} of one "
            "another: exchange fewer parameters by one link"
        )
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _length(told: torch.Tensor, rank: int, most_bytes: int) -> int:
    return int(announced(told.cpu().reshape(1, 8), -1, most_bytes, first=rank)[0])


def _read(row: torch.Tensor, subject: str, rank: int, read: Callable[[Any], T], key: bytes) -> T:
    table = decode(row.cpu().numpy().tobytes(), subject, rank, key)
    try:
        return read(table)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PayloadError(
            f"the {subject} from rank {rank} has not the expected form ({type(error).__name__}: {str(error)[:200]}): "
            "run the same version of gradwire on all ranks"
        ) from None


def _digest(text: bytes, subject: str, sender: int, key: bytes) -> bytes:
    return digest_of(f"gradwire table\0{subject}\0{sender}\0".encode() + text, key)


def _text(value: Plain) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_tagged)


def _tagged(value: bytes) -> dict[str, str]:
    return {_BYTES: base64.b64encode(value).decode()}


def _parsed(text: str) -> Plain:
    """Return the value of a text.

    Raises:
        ValueError: it is not JSON, or was not made by :func:`_text`.
    """
    nesting = (_NESTS[found[0]] for found in _STRING_OR_BRACKET.findall(text) if found[0] != '"')
    if max(accumulate(nesting), default=0) > MOST_DEPTH + 1:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    value: Plain = json.loads(text, object_hook=_untagged, parse_int=_whole, parse_float=_float)
    if _text(value) != text:
        raise ValueError("it is not written as tables are: keys occur twice, or there is white space")
    return value


def _untagged(found: dict[str, Any]) -> Plain:
    if _BYTES in found:
        return base64.b64decode(found[_BYTES], validate=True)
    return found


def _whole(digits: str) -> int:
    return int(_short(digits))


def _float(digits: str) -> float:
    return float(_short(digits))


def _short(digits: str) -> str:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} characters, more than {MOST_DIGITS}")
    return digits
