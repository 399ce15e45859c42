"""Weights as bytes: tensors in memory, and safetensors files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from gradwire.errors import IncompatibleError
from gradwire.publish.dcp_files import DistributedCheckpoint, is_dcp
from gradwire.publish.disk import OpenFiles
from gradwire.publish.following_file import FollowingFile
from gradwire.publish.layout import BY_DTYPE, BlockSpan, Entry, Layout
from gradwire.publish.safetensor_files import files_of, read_all_places

Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A module, or named tensors."""

Weights = Tensors | str | os.PathLike[str]
"""A module, named tensors, a safetensors file or folder, or, to publish, a folder of torch.distributed.checkpoint."""


class Readable(Protocol):
    """Weights to publish."""

    layout: Layout

    def read(self, span: BlockSpan) -> torch.Tensor:
        """Return the bytes of a span (uint8); they may be the weights' own memory."""
        ...

    def check_unchanged(self) -> None:
        """Refuse files that something else has written to since they were opened.

        Raises:
            IncompatibleError: it has.
        """
        ...


class Writable(Protocol):
    """Weights that follow a publisher's."""

    @property
    def layout(self) -> Layout | None:
        """The layout; None for a file that is not there yet."""
        ...

    def read(self, span: BlockSpan) -> torch.Tensor:
        """Return the bytes of a span, as they were written last."""
        ...

    @property
    def hidden(self) -> bool:
        """Whether nobody sees what is written before :meth:`commit`, and :meth:`abandon` drops all of it."""
        ...

    def open(self, layout: Layout, step: int, *, whole: bool = False) -> None:
        """Prepare to write the weights of a step; several may be written before :meth:`commit`.

        Args:
            layout: Layout of the weights.
            step: Their step.
            whole: Whether all bytes will be written.
        """
        ...

    def target(self, span: BlockSpan) -> torch.Tensor:
        """Return the bytes of a span to write to."""
        ...

    def commit(self) -> None:
        """Make what was written the weights.

        Raises:
            IncompatibleError: tensors that share memory cannot hold it.
        """
        ...

    def abandon(self) -> None:
        """Drop what was written, as far as it is not in the tensors' own memory."""
        ...


def named_tensors(weights: Tensors, sharded: bool = False) -> dict[str, torch.Tensor]:
    """Return tensors by name: of a module its parameters and the buffers that a checkpoint has, tied ones once.

    Args:
        weights: A module or named tensors.
        sharded: Whether DTensors are served.

    Raises:
        IncompatibleError: a tensor is sharded, sparse, quantised or of a type without a code, two have one name, or
            there is none.
    """
    if isinstance(weights, torch.nn.Module):
        seen, found = set[int](), dict[str, torch.Tensor]()
        for name, tensor in _unwrapped(weights).state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
    else:
        found = by_name(weights)
    if not found:
        raise IncompatibleError("there are no tensors: pass a module, named tensors, or a safetensors file or folder")
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            raise IncompatibleError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if not isinstance(name, str):
            raise IncompatibleError(f"the name {name!r} is a {type(name).__name__}: names of tensors are strings")
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise IncompatibleError(f"the name {name!r} is no text: it has a half of a surrogate pair")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain and not (sharded and hasattr(tensor, "to_local")):
            raise IncompatibleError(f"{name!r} is a {type(tensor).__name__}: pass plain tensors or DTensors")
        if tensor.dtype not in BY_DTYPE or tensor.layout is not torch.strided or tensor.is_meta:
            raise IncompatibleError(f"{name!r} is {tensor.dtype}, {tensor.layout} on {tensor.device}: not supported")
    return found


def by_name(weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return named tensors as a dict.

    Raises:
        IncompatibleError: two tensors have one name, as in the chained ``named_parameters()`` of two modules.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if found.setdefault(name, tensor) is not tensor:
            raise IncompatibleError(
                f"two tensors have the name {name!r}: give each a name of its own, such as one with its module's before"
            )
    return found


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module within DDP, a compiled module, or one in the other."""
    while True:
        inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
        inner = getattr(inner, "_orig_mod", inner)
        if inner is module:
            return module
        module = inner


def _entry(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Entry:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Entry(name, BY_DTYPE[kind], tuple(tensor.shape))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    flat = tensor.detach().reshape(-1)
    # A complex number, too, is viewed as bytes.
    return flat.view(torch.uint8)


def _is_resolved(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory has its values, and not those before a conjugation or a change of sign."""
    return not tensor.is_conj() and not tensor.is_neg()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory has the values."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _sharing(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """Return, for each tensor whose memory overlaps that of others, the numbers of all of them.

    Memory counts from a tensor's first byte to its last, also where a tensor with strides leaves bytes out.
    """
    rows = []
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            begin = tensor.data_ptr()
            rows.append((str(tensor.device), begin, begin + (last + 1) * tensor.element_size(), number))
    groups, latest, end = list[list[int]](), "", 0
    for device, begin, stop, number in sorted(rows):
        if device != latest or begin >= end:
            groups.append([])
            end = 0
        groups[-1].append(number)
        latest, end = device, max(end, stop)
    return {number: tuple(group) for group in groups if len(group) > 1 for number in group}


class LiveTensors:
    """Tensors in memory, to publish or to follow.

    Tensors on the CPU that are contiguous are read and written in place. Others pass through a copy on the CPU: spans
    of it to publish, the whole tensor to follow. So do tensors that share memory, such as tied weights under two names:
    a patch moves each of them once.

    Args:
        weights: A module or named tensors.
        dtype: Publish floating-point tensors rounded to this type; None: as they are.
    """

    def __init__(self, weights: Tensors, dtype: torch.dtype | None = None) -> None:
        tensors = named_tensors(weights)
        if dtype is not None and (dtype not in BY_DTYPE or not dtype.is_floating_point):
            raise IncompatibleError(f"dtype={dtype}: publish floating-point tensors as a floating-point type")
        self.layout = Layout(_entry(name, tensor, dtype) for name, tensor in tensors.items())
        self._tensors = [tensors[entry.name] for entry in self.layout.entries]
        self._copies: dict[int, torch.Tensor] = {}
        # Found before the first write of each update: a parameter may have other memory by then.
        self._shared: dict[int, tuple[int, ...]] | None = None
        self._lock = threading.Lock()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Go on with the tensors of these names; return whether any is another object than before.

        A tensor that is the same object may have another type or shape: ``Module.to`` replaces a parameter's memory.

        Raises:
            IncompatibleError: they have another layout.
        """
        layout = Layout(_entry(name, tensor) for name, tensor in tensors.items())
        if layout.entries != self.layout.entries:
            raise IncompatibleError(
                f"the tensors differ from those that the subscriber was given: {layout.difference(self.layout)}; "
                "build another subscriber for them"
            )
        before, self._tensors = self._tensors, [tensors[entry.name] for entry in self.layout.entries]
        return any(new is not old for new, old in zip(self._tensors, before))

    def own(self) -> dict[str, torch.Tensor]:
        """Return the very tensors by name."""
        return {entry.name: tensor for entry, tensor in zip(self.layout.entries, self._tensors)}

    def _direct(self, number: int) -> bool:
        tensor, entry = self._tensors[number], self.layout.entries[number]
        plain = tensor.device.type == "cpu" and tensor.is_contiguous() and _is_resolved(tensor)
        return plain and tensor.dtype == getattr(torch, entry.kind.dtype)

    def read(self, span: BlockSpan) -> torch.Tensor:
        tensor, kind = self._tensors[span.tensor].detach(), span.kind
        if span.tensor in self._copies:
            return _octets(self._copies[span.tensor])[span.octets]
        if self._direct(span.tensor):
            return _octets(tensor)[span.octets]
        part = tensor.reshape(-1)[span.begin // kind.numbers : span.stop // kind.numbers]
        return _octets(_resolved(part.to(device="cpu", dtype=getattr(torch, kind.dtype))))

    def check_unchanged(self) -> None:
        """Do nothing: who trains publishes between two steps."""

    @property
    def hidden(self) -> bool:
        return False

    def open(self, layout: Layout, step: int, *, whole: bool = False) -> None:
        """Do nothing: copies are made when they are written to."""

    def target(self, span: BlockSpan) -> torch.Tensor:
        shared = self._shared
        if shared is None:
            shared = self._shared = _sharing(self._tensors)
        group = shared.get(span.tensor)
        if group is None and self._direct(span.tensor):
            return _octets(self._tensors[span.tensor])[span.octets]
        with self._lock:
            # All that share memory are copied before one of them is written, so that commit can compare them.
            for number in group or (span.tensor,):
                if number not in self._copies:
                    self._copies[number] = _resolved(self._tensors[number].detach().to("cpu", copy=True))
        return _octets(self._copies[span.tensor])[span.octets]

    def commit(self) -> None:
        copies, shared = self._copies, self._shared or {}
        self.abandon()
        with torch.no_grad():
            for number, copy in copies.items():
                self._tensors[number].copy_(copy)
        self._check_shared(shared, copies)

    def abandon(self) -> None:
        self._copies, self._shared = {}, None

    def _check_shared(self, shared: Mapping[int, tuple[int, ...]], sources: Mapping[int, torch.Tensor]) -> None:
        """Refuse values that tensors which share memory cannot all hold, after they have been written."""
        for number, source in sources.items():
            if number not in shared:
                continue
            held, wanted = (_octets(_resolved(tensor.detach().cpu())) for tensor in (self._tensors[number], source))
            if not torch.equal(held, wanted):
                names = " and ".join(repr(self.layout.entries[other].name) for other in shared[number][:8])
                raise IncompatibleError(
                    f"{names} share memory here, and the published values under these names differ: give each of them "
                    "memory of its own, or publish and follow the module, which has tied weights once"
                )

    def clone(self) -> LiveTensors:
        """Return copies of the tensors, on the CPU."""
        copies = {}
        for entry, tensor in zip(self.layout.entries, self._tensors):
            # NumPy asks for large pages, to which patches are written faster.
            room = torch.from_numpy(np.empty(max(1, entry.nbytes), np.uint8))[: entry.nbytes]
            copies[entry.name] = room.view(tensor.dtype).reshape(tensor.shape).copy_(tensor.detach())
        return LiveTensors(copies)

    def copy_from(self, other: LiveTensors) -> None:
        """Copy the values of tensors of the same layout.

        Raises:
            IncompatibleError: tensors that share memory cannot hold them.
        """
        with torch.no_grad():
            for tensor, source in zip(self._tensors, other._tensors):
                tensor.copy_(source)
        self._check_shared(_sharing(self._tensors), dict(enumerate(other._tensors)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: tensor.detach() for name, tensor in self.own().items()}


class SavedTensors:
    """Weights in a safetensors file, or in the safetensors files of a folder, to publish.

    Bytes are read when they are needed, not mapped: a file that is cut short meanwhile is an error, not a crash. A file
    that another one replaces meanwhile is read to its end.

    Raises:
        IncompatibleError: a file is missing or not complete, or has types without a code, or two files have a tensor of
            the same name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._files = OpenFiles(files_of(self.path))
        except OSError as error:
            raise IncompatibleError(f"{error.filename} cannot be read: {error.strerror or error}") from error
        places = read_all_places(self._files.handles)
        self.layout = Layout(places)
        self._places = [places[entry] for entry in self.layout.entries]

    def read(self, span: BlockSpan) -> torch.Tensor:
        place, part = self._places[span.tensor], span.octets
        count = part.stop - part.start
        try:
            out = self._files.read(place.file, place.offset + part.start, count)
        except OSError as error:
            raise IncompatibleError(f"{place.file} cannot be read: {error.strerror or error}") from error
        if len(out) < count:
            raise IncompatibleError(f"{place.file} was cut short while it was read: publish it again")
        return torch.from_numpy(out)

    def check_unchanged(self) -> None:
        file = self._files.rewritten()
        if file is not None:
            raise IncompatibleError(f"{file} was written to while it was read: publish it again")


def readable(weights: Weights, dtype: torch.dtype | None = None) -> Readable:
    """Return weights to publish.

    Raises:
        IncompatibleError: they cannot be published.
    """
    if isinstance(weights, str | os.PathLike):
        if dtype is not None:
            raise IncompatibleError(f"dtype={dtype}: files are published as they are")
        return DistributedCheckpoint(weights) if is_dcp(Path(weights)) else SavedTensors(weights)
    return LiveTensors(weights, dtype)


def writable(weights: Weights) -> LiveTensors | FollowingFile:
    """Return weights that follow a publisher's.

    Raises:
        IncompatibleError: they cannot be written.
    """
    return FollowingFile(weights) if isinstance(weights, str | os.PathLike) else LiveTensors(weights)
