"""State from one member to another: a table of what comes, the tensors one by one, and a keyed digest of each.

Nothing is unpickled. State is plain values and tensors in lists and dicts, as ``state_dict()`` of PyTorch's optimizers
and schedulers gives it. The receiver knows how many bytes come before it takes memory for them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.drivers.tables import MOST_BYTES, announce, announced, decode, encode
from gradwire.link.membership.epoch_group import EpochGroup

TENSOR, PAIRS, TUPLE = "$tensor", "$pairs", "$tuple"
"""Keys of tables for what JSON does not have: the number of a tensor, a dict with other keys than strings, a tuple."""

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
        torch.int32, torch.int64,
    )
}  # fmt: skip

MOST_TENSORS, MOST_TENSOR_BYTES = 1 << 20, 1 << 40
SUBJECT = "state of a member"


def flattened(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as plain values, with its tensors appended to a list and named by their numbers.

    Raises:
        IncompatibleError: it holds something else.
    """
    if isinstance(value, torch.Tensor):
        if str(value.dtype) not in DTYPES or value.layout != torch.strided:
            raise IncompatibleError(f"a tensor of type {value.dtype} cannot be handed to a new member")
        tensors.append(value.detach())
        return {TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: flattened(item, tensors) for key, item in value.items()}
        return {PAIRS: [[flattened(key, tensors), flattened(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [flattened(item, tensors) for item in value]}
    if isinstance(value, list):
        return [flattened(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise IncompatibleError(
        f"state of a new member can hold numbers, strings, tensors, lists, tuples and dicts, not {type(value).__name__}"
    )


def restored(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value that :func:`flattened` made plain.

    Raises:
        ValueError, IndexError, TypeError: it was not made by it.
    """
    if isinstance(value, list):
        return [restored(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        number = value[TENSOR]
        if type(number) is not int or number < 0 or len(value) != 1:
            raise ValueError("a tensor's number is needed")
        return tensors[number]
    if PAIRS in value:
        return {restored(key, tensors): restored(item, tensors) for key, item in value[PAIRS]}
    if TUPLE in value:
        return tuple(restored(item, tensors) for item in value[TUPLE])
    return {key: restored(item, tensors) for key, item in value.items()}


def copied(value: Any) -> Any:
    """Return a copy of state, with tensors of its own.

    Raises:
        IncompatibleError: it holds something that :func:`flattened` refuses.
    """
    tensors: list[torch.Tensor] = []
    plain = flattened(value, tensors)
    return restored(plain, [tensor.clone() for tensor in tensors])


def send_state(group: EpochGroup, to: int, state: Any, key: bytes) -> None:
    """Send state to one member; see :func:`receive_state`.

    Args:
        group: The members.
        to: Place of the receiver.
        state: Numbers, strings, tensors, lists, tuples and dicts.
        key: Secret under which digests are computed.

    Raises:
        IncompatibleError: the state holds something else.
        RuntimeError: the connection broke.
    """
    tensors: list[torch.Tensor] = []
    value = flattened(state, tensors)
    bodies = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    rows = [[str(t.dtype), list(t.shape), _digest(key, i, body)] for i, (t, body) in enumerate(zip(tensors, bodies))]
    message = torch.frombuffer(bytearray(encode([value, rows], SUBJECT, group.rank)), dtype=torch.uint8)
    if len(message) > MOST_BYTES:
        raise IncompatibleError(f"the table of a member's state takes {len(message)} bytes, more than {MOST_BYTES}")
    seal = torch.frombuffer(bytearray(hmac.digest(key, message.numpy().tobytes(), "sha256")), dtype=torch.uint8)
    group.send(to, announce(torch.tensor([len(message)], device="cpu"))[0])
    group.send(to, message, seal)
    group.send(to, *(body for body in bodies if len(body)))


def receive_state(group: EpochGroup, source: int, key: bytes) -> Any:
    """Receive the state that a member sends by :func:`send_state`.

    Raises:
        PayloadError: it is not what the member sent, or was not sent by one that knows the key.
        RuntimeError: the connection broke.
    """
    rank = group.ranks[source]
    told = torch.empty(8, dtype=torch.uint8, device="cpu")
    group.receive(source, told)
    message = torch.empty(
        int(announced(told.view(1, 8), -1, MOST_BYTES, first=rank)[0]), dtype=torch.uint8, device="cpu"
    )
    seal = torch.empty(hashlib.sha256().digest_size, dtype=torch.uint8, device="cpu")
    group.receive(source, message, seal)
    text = message.numpy().tobytes()
    if not hmac.compare_digest(seal.numpy().tobytes(), hmac.digest(key, text, "sha256")):
        raise PayloadError(f"the state from rank {rank} does not verify under the secret")
    try:
        table: Any = decode(text, SUBJECT, rank)
        value, rows = table
        tensors = [room(*row[:2]) for row in _listed(rows)]
        bodies = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        group.receive(source, *(body for body in bodies if len(body)))
        for number, (body, row) in enumerate(zip(bodies, rows)):
            if not hmac.compare_digest(_digest(key, number, body), row[2]):
                raise PayloadError(f"tensor {number} of the state from rank {rank} changed on the way")
        return restored(value, tensors)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise PayloadError(f"the state from rank {rank} has not the expected form: {str(error)[:200]}") from None


def _listed(rows: Any) -> Any:
    if not isinstance(rows, list) or len(rows) > MOST_TENSORS or not all(len(row) == 3 for row in rows):
        raise ValueError("a list of tensors is needed")
    return rows


def room(dtype: Any, shape: Any) -> torch.Tensor:
    """Return memory for a tensor."""
    kind = DTYPES[dtype]
    size = kind.itemsize
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError(f"shape {shape}")
        size *= length
    if size > MOST_TENSOR_BYTES:
        raise ValueError(f"a tensor of {size} bytes")
    return torch.empty(shape, dtype=kind, device="cpu")


def _digest(key: bytes, number: int, body: torch.Tensor) -> bytes:
    made = hashlib.blake2b(key=key, digest_size=32, salt=number.to_bytes(8, "big"))
    made.update(body.numpy().data)
    return made.digest()
