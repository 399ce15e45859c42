"""What one rank remembers between rounds."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence

import torch

from gradwire.exchange.segments import Segment

OWN_VALUE = "value"
"""Kind under which a state holds, by its name, a value that is not the same on all ranks."""


def kind_of_peer(kind: str, peer: int) -> str:
    """Return the kind under which a vector is kept that concerns one other rank alone.

    Example:
        >>> kind_of_peer("left", 3), base_kind("left@3")
        ('left@3', 'left')
    """
    return f"{kind}@{peer}"


def base_kind(kind: str) -> str:
    """Return the kind that a method declares, of one that may be of one other rank."""
    return kind.partition("@")[0]


class _Bank:
    """One kind of memory of one bucket: what was committed, and what this round would make of it."""

    def __init__(self, numel: int, dtype: torch.dtype, device: str) -> None:
        self.held = torch.zeros(numel, dtype=dtype, device=device)
        self.staged = torch.zeros(numel, dtype=dtype, device=device)
        self.changed = False


class Memory:
    """Vectors beside gradients, and a few values beside them all; a round changes either all of it or nothing.

    A vector is kept by parameter: where buckets are laid out anew, it follows. It lies in a *bank*, which has the
    layout of a bucket's flat vector, so that arithmetic with the gradient needs no copying about. What a round writes
    is *staged*, and holds from :meth:`commit` on; :meth:`discard` forgets it, as after a non-finite gradient.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._lock = threading.Lock()
        self._banks: dict[tuple[str, tuple[str, ...]], _Bank] = {}
        self._home: dict[tuple[str, str], tuple[_Bank, int, int]] = {}
        self._loaded: dict[tuple[str, str], torch.Tensor] = {}
        self._replicated: set[str] = set()
        self._values: dict[str, torch.Tensor] = {}
        self._staged_values: dict[str, torch.Tensor] = {}
        self._own_values: set[str] = set()

    def read(
        self, kind: str, segments: Sequence[Segment], *, replicated: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return what is held for whole parameters, laid out as ``segments`` are; zeros at first; not to be written.

        There is room for dense segments, but what lies there is not kept.
        """
        return self._bank(kind, segments, replicated, dtype).held

    def stage(
        self, kind: str, segments: Sequence[Segment], *, replicated: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the vector, of the same layout, that takes the place of what is held; fill it all."""
        bank = self._bank(kind, segments, replicated, dtype)
        bank.changed = True
        return bank.staged

    def norm(self, kind: str, name: str | None = None) -> float | None:
        """Return the Euclidean norm of what is held of a parameter, or, with None, of all that is held of a kind.

        Some methods keep one vector for all parameters joined, or one for each part of a parameter; only the norm of
        all tells of these. None where nothing of that kind is held.
        """
        with self._lock:
            keys = [key for key in {**self._loaded, **self._home} if key[0] == kind] if name is None else [(kind, name)]
            found = [held for held in map(self._held, keys) if held is not None]
            return math.hypot(*(float(held.norm()) for held in found)) if found else None

    def forget(self, kind: str) -> None:
        """Make zeros of all that is held of a kind, at once; what was staged stays; twice is as once."""
        with self._lock:
            self._loaded = {key: value for key, value in self._loaded.items() if key[0] != kind}
            for (held_kind, _), bank in self._banks.items():
                if held_kind == kind:
                    bank.held.zero_()

    def keep(self, kinds: Collection[str]) -> None:
        """Drop all that is held but vectors of these kinds, and what was staged."""
        held = self.state()
        kept = {
            scope: {key: vector for key, vector in held[scope].items() if key.partition("/")[0] in kinds}
            for scope in ("replicated", "rank")
        }
        self.load(kept)

    def value(self, name: str) -> torch.Tensor | None:
        """Return a value that was committed; None where there is none."""
        return self._values.get(name)

    def stage_value(self, name: str, value: torch.Tensor, *, own: bool = False) -> None:
        """Replace a value from :meth:`commit` on; one that is not this rank's ``own`` is the same on all ranks."""
        self._staged_values[name] = value
        if own:
            self._own_values.add(name)

    def commit(self) -> None:
        """Make what was staged what is held."""
        for bank in self._banks.values():
            if bank.changed:
                bank.held, bank.staged, bank.changed = bank.staged, bank.held, False
        self._values.update(self._staged_values)
        self._staged_values = {}

    def discard(self) -> None:
        """Forget what was staged."""
        for bank in self._banks.values():
            bank.changed = False
        self._staged_values = {}

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of all that is held: ``global``, ``replicated`` and ``rank``, keys "kind/parameter".

        A value of this rank's own is under "value/name".
        """
        found: dict[str, dict[str, torch.Tensor]] = {"global": {}, "replicated": {}, "rank": {}}
        for name, value in self._values.items():
            scope, key = ("rank", f"{OWN_VALUE}/{name}") if name in self._own_values else ("global", name)
            found[scope][key] = value.clone()
        for (kind, name), tensor in self._loaded.items():
            found[self._scope(kind)][f"{kind}/{name}"] = tensor.clone()
        for (kind, name), (bank, offset, numel) in self._home.items():
            found[self._scope(kind)][f"{kind}/{name}"] = bank.held[offset : offset + numel].clone()
        return found

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the place of all that is held by what :meth:`state` gave."""
        self._banks, self._home, self._loaded = {}, {}, {}
        self._values = {name: value.clone() for name, value in state.get("global", {}).items()}
        self._staged_values, self._own_values = {}, set()
        for scope in ("replicated", "rank"):
            for key, tensor in state.get(scope, {}).items():
                kind, _, name = key.partition("/")
                if kind == OWN_VALUE:
                    self._values[name] = tensor.clone()
                    self._own_values.add(name)
                    continue
                self._loaded[kind, name] = tensor.clone()
                if scope == "replicated":
                    self._replicated.add(kind)

    def _held(self, key: tuple[str, str]) -> torch.Tensor | None:
        home = self._home.get(key)
        return self._loaded.get(key) if home is None else home[0].held[home[1] : home[1] + home[2]]

    def _scope(self, kind: str) -> str:
        return "replicated" if kind in self._replicated else "rank"

    def _bank(self, kind: str, segments: Sequence[Segment], replicated: bool, dtype: torch.dtype) -> _Bank:
        key = (kind, tuple(s.parameter.name for s in segments))
        with self._lock:
            have = self._banks.get(key)
            if have is None:
                have = self._banks[key] = self._move_in(kind, segments, dtype)
                if replicated:
                    self._replicated.add(kind)
            return have

    def _move_in(self, kind: str, segments: Sequence[Segment], dtype: torch.dtype) -> _Bank:
        """Make a bank, and bring what is held of its parameters from wherever it lay before."""
        bank = _Bank(max((s.offset + s.numel for s in segments), default=0), dtype, self._device)
        for s in (s for s in segments if not s.dense):
            place = bank.held[s.offset : s.offset + s.numel]
            before = self._home.get((kind, s.parameter.name))
            if before is not None:
                place.copy_(before[0].held[before[1] : before[1] + before[2]])
            else:
                loaded = self._loaded.pop((kind, s.parameter.name), None)
                if loaded is not None and loaded.numel() == s.numel:
                    place.copy_(loaded.reshape(-1))
            self._home[kind, s.parameter.name] = (bank, s.offset, s.numel)
        alive = {id(home[0]) for home in self._home.values()}
        self._banks = {k: b for k, b in self._banks.items() if id(b) in alive}
        return bank


class ShardMemory(Memory):
    """A memory as the exchange of one shard sees it: what its ranks have in common, those of other shards have not.

    Vectors and values are this rank's own, whatever the method says of them, so that each rank's are saved.

    Args:
        memory: Of the link.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def read(
        self, kind: str, segments: Sequence[Segment], *, replicated: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return self._memory.read(kind, segments, dtype=dtype)

    def stage(
        self, kind: str, segments: Sequence[Segment], *, replicated: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return self._memory.stage(kind, segments, dtype=dtype)

    def norm(self, kind: str, name: str | None = None) -> float | None:
        return self._memory.norm(kind, name)

    def forget(self, kind: str) -> None:
        self._memory.forget(kind)

    def value(self, name: str) -> torch.Tensor | None:
        return self._memory.value(name)

    def stage_value(self, name: str, value: torch.Tensor, *, own: bool = False) -> None:
        self._memory.stage_value(name, value, own=True)
