"""The state of a method on one rank between rounds."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence

import torch

from gradwire.exchange.norms import norm
from gradwire.exchange.segments import Segment, take_apart

WORKERS = "workers"
"""Value with the number of ranks that vectors depend on, such as the mean of all ranks' shifts."""

OWN_VALUE = "value"
"""Kind, in a saved state, of values that belong to one rank; the names of the values follow it."""


def kind_of_peer(kind: str, peer: int) -> str:
    """Return the kind of a vector that concerns one other rank alone.

    Example:
        >>> kind_of_peer("left", 3), base_kind("left@3")
        ('left@3', 'left')
    """
    return f"{kind}@{peer}"


def base_kind(kind: str) -> str:
    """Return the kind that a method declares, without the other rank in it, if there is one."""
    return kind.partition("@")[0]


class _Bank:
    """State of one kind for one bucket: the committed vector and the staged one.

    ``left`` says that the vectors of some of its parameters have moved to other banks.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: str) -> None:
        self.held = torch.zeros(numel, dtype=dtype, device=device)
        self.staged = torch.zeros(numel, dtype=dtype, device=device)
        self.changed = self.left = False
        self.before: torch.Tensor | None = None


class Memory:
    """A method's vectors by parameter, and a few values for all parameters; a round changes all of them or none.

    A vector follows its parameter if the layout of buckets changes. It is stored in a *bank*, with the layout of a
    bucket's flat vector, so that arithmetic with the gradient needs no copies. Of parameters that are joined, each has
    its own vector. New values of a round are *staged*, that is, take effect with :meth:`commit`; :meth:`discard` drops
    them, for example after a non-finite gradient.

    Attributes:
        undoes: True if :meth:`undo` can return to the state at the last :meth:`begin`. It costs nothing, unless a
            method commits twice in a round.
        sits_out: True while this rank takes part with zeros that are not its own: vectors and values of this rank alone
            read as zeros and do not change, so that nothing of them is sent. What all ranks hold changes as on the
            others.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device, self.undoes, self.sits_out = device, False, False
        self._values_before: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._banks: dict[tuple[str, tuple[tuple[str, bool], ...]], _Bank] = {}
        self._home: dict[tuple[str, str], tuple[_Bank, int, int]] = {}
        self._loaded: dict[tuple[str, str], torch.Tensor] = {}
        self._replicated: set[str] = set()
        self._values: dict[str, torch.Tensor] = {}
        self._staged_values: dict[str, torch.Tensor] = {}
        self._own_values: set[str] = set()

    def read(
        self, kind: str, segments: Sequence[Segment], *, replicated: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the committed vector of whole parameters, with the layout of ``segments``; zeros at first; read only.

        It includes dense segments, whose values are not kept.
        """
        held = self._bank(kind, segments, replicated, dtype).held
        return torch.zeros_like(held) if self._is_spared(kind) else held

    def stage(
        self, kind: str, segments: Sequence[Segment], *, replicated: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the staged vector, of the same layout, to be filled completely."""
        bank = self._bank(kind, segments, replicated, dtype)
        bank.changed = not self._is_spared(kind)
        if bank.before is bank.staged:
            bank.staged = torch.zeros_like(bank.staged)
        return bank.staged

    def has(self, kind: str, name: str) -> bool:
        """Return whether a parameter has a vector of a kind."""
        with self._lock:
            return (kind, name) in self._home or (kind, name) in self._loaded

    def norm(self, kind: str, name: str | None = None) -> float | None:
        """Return the Euclidean norm of a parameter's vector of a kind; with ``name=None``, of all its vectors.

        Use the latter for methods that keep one vector for all parameters joined, or for each part of a parameter.
        Return None if there is no vector of the kind.
        """
        with self._lock:
            keys = [key for key in {**self._loaded, **self._home} if key[0] == kind] if name is None else [(kind, name)]
            found = [held for held in map(self._held, keys) if held is not None]
            return math.hypot(*(norm(held) for held in found)) if found else None

    def forget(self, kind: str) -> None:
        """Set all committed vectors of a kind to zero, or drop a value, at once; nothing staged changes; idempotent."""
        with self._lock:
            self._values.pop(kind, None)
            self._loaded = {key: value for key, value in self._loaded.items() if key[0] != kind}
            for (held_kind, _), bank in self._banks.items():
                if held_kind == kind:
                    bank.held.zero_()

    def keep(self, kinds: Collection[str]) -> None:
        """Drop everything except the committed vectors of some kinds."""
        held = self.state()
        kept = {
            scope: {key: vector for key, vector in held[scope].items() if key.partition("/")[0] in kinds}
            for scope in ("replicated", "rank")
        }
        self.load(kept)

    def value(self, name: str) -> torch.Tensor | None:
        """Return a committed value, or None."""
        return self._values.get(name)

    def stage_value(self, name: str, value: torch.Tensor, *, own: bool = False) -> None:
        """Stage a value; it is the same on all ranks unless it is this rank's ``own``."""
        if own and self.sits_out:
            return
        self._staged_values[name] = value
        if own:
            self._own_values.add(name)

    def begin(self) -> None:
        """Make the committed state the one that :meth:`undo` returns to."""
        self._values_before = dict(self._values)
        for bank in self._banks.values():
            bank.before = None

    def undo(self) -> None:
        """Drop what was staged and committed since :meth:`begin`; :attr:`undoes` must be set."""
        self.discard()
        self._values = dict(self._values_before)
        for bank in self._banks.values():
            if bank.before is not None:
                bank.held, bank.staged, bank.before = bank.before, bank.held, None

    def add(self, kind: str, name: str, vector: torch.Tensor) -> None:
        """Add a vector to the committed one of a parameter, which counts as zeros if there is none."""
        with self._lock:
            held = self._held((kind, name))
            if held is None:
                self._loaded[kind, name] = vector.clone()
            else:
                held.add_(vector.reshape(held.shape))

    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Replace a committed value."""
        self._values[name] = value

    def drop_values(self, names: Collection[str]) -> None:
        """Drop committed values, as if they had never been staged."""
        self._values = {name: value for name, value in self._values.items() if name not in names}

    def commit(self) -> None:
        """Make staged vectors and values the committed ones."""
        for bank in self._banks.values():
            if bank.changed:
                if self.undoes and bank.before is None:
                    bank.before = bank.held
                bank.held, bank.staged, bank.changed = bank.staged, bank.held, False
        self._values.update(self._staged_values)
        self._staged_values = {}

    def discard(self) -> None:
        """Drop staged vectors and values."""
        for bank in self._banks.values():
            bank.changed = False
        self._staged_values = {}

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of the committed state: ``global``, ``replicated`` and ``rank``, with keys "kind/parameter".

        A value of this rank's own has the key "value/name".
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
        """Replace the committed state by one of :meth:`state`."""
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

    def _is_spared(self, kind: str) -> bool:
        return self.sits_out and kind not in self._replicated

    def _scope(self, kind: str) -> str:
        return "replicated" if kind in self._replicated else "rank"

    def _bank(self, kind: str, segments: Sequence[Segment], replicated: bool, dtype: torch.dtype) -> _Bank:
        # A plan's dense segments have no vector in its bank, while those of another plan of the same bucket may.
        key = (kind, tuple((s.parameter.name, s.dense) for s in take_apart(segments)))
        with self._lock:
            have = self._banks.get(key)
            # After an exchange of some of its parameters, a bank has old values of these.
            if have is None or have.left:
                have = self._banks[key] = self._move_in(kind, segments, dtype)
                if replicated:
                    self._replicated.add(kind)
            return have

    def _move_in(self, kind: str, segments: Sequence[Segment], dtype: torch.dtype) -> _Bank:
        """Make a bank, and move the vectors of its parameters into it from other banks."""
        bank = _Bank(max((s.offset + s.numel for s in segments), default=0), dtype, self._device)
        for s in take_apart(s for s in segments if not s.dense):
            place = bank.held[s.offset : s.offset + s.numel]
            before = self._home.get((kind, s.parameter.name))
            if before is not None:
                place.copy_(before[0].held[before[1] : before[1] + before[2]])
                before[0].left = True
            else:
                loaded = self._loaded.pop((kind, s.parameter.name), None)
                if loaded is not None and loaded.numel() == s.numel:
                    place.copy_(loaded.reshape(-1))
            self._home[kind, s.parameter.name] = (bank, s.offset, s.numel)
        alive = {id(home[0]) for home in self._home.values()}
        self._banks = {k: b for k, b in self._banks.items() if id(b) in alive}
        return bank


class ShardMemory(Memory):
    """The state of the exchange of one shard, in which nothing is common to all ranks of the link.

    All vectors and values are saved as this rank's own, even if the method declares them the same on all ranks.

    Args:
        memory: Memory of the link.
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

    def has(self, kind: str, name: str) -> bool:
        return self._memory.has(kind, name)

    def norm(self, kind: str, name: str | None = None) -> float | None:
        return self._memory.norm(kind, name)

    def forget(self, kind: str) -> None:
        self._memory.forget(kind)

    def value(self, name: str) -> torch.Tensor | None:
        return self._memory.value(name)

    def stage_value(self, name: str, value: torch.Tensor, *, own: bool = False) -> None:
        self._memory.stage_value(name, value, own=True)
