"""A link: the gradient exchange of one set of parameters over one group."""

from __future__ import annotations

import atexit
import difflib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire import catalogue
from gradwire.adapters.buckets import Planner
from gradwire.adapters.diagnostics import Diagnostics
from gradwire.adapters.failures import Breakage
from gradwire.adapters.handshake import agreement
from gradwire.adapters.options import Options
from gradwire.adapters.task import Task
from gradwire.algorithms import Plan
from gradwire.compressors import Cast
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.groups import Lane, RollCall, Traffic, dense_bytes
from gradwire.methods import Method, require
from gradwire.protocols import Context, Workspace
from gradwire.segments import flat_view
from gradwire.version import __version__

__all__ = ["Link"]

LANES = 2
"""Lanes on CPU, where a lane's thread computes and sends by turns."""

DIAGNOSTICS_INTERVAL = 100
"""Rounds from one measurement of :meth:`Link.diagnostics` to the next."""


class Link:
    """Exchanges the gradients of some parameters over a process group by a method.

    Use :func:`gradwire.attach` for a DDP module. For a loop without DDP::

        link = gw.Link(model.named_parameters(), "terngrad")
        loss.backward()
        link.reduce_()
        optimizer.step()

    Building a link is collective: all ranks of the group build the same one, in the same order.

    Args:
        parameters: (name, parameter) pairs, or parameters (then named "0", "1", ...).
        method: A method or its spec.
        group: Process group; the default group if None.
        lanes: Process groups and threads that exchange side by side; the bits do not depend on it.
        grad_scaler: The scaler of automatic mixed precision. A method without memory does not need it: a non-finite
            gradient on any rank becomes non-finite on all, so that every rank's scaler skips.
        optimizer: For methods that need the learning rate or own the momentum.
        options: See :class:`Options`.

    Raises:
        HyperparameterError: a spec, an option or an exclude pattern is wrong.
        IncompatibleError: the group has one rank, or a parameter cannot be exchanged.
        RankMismatchError: ranks differ in version, method, options or parameters.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
        method: str | Method,
        *,
        group: dist.ProcessGroup | None = None,
        lanes: int | None = None,
        grad_scaler: Any = None,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        self.group = group if group is not None else _default_group()
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self.grad_scaler, self.optimizer = grad_scaler, optimizer
        count = LANES if lanes is None else lanes
        with agreement(self.group) as mine:
            self.method = catalogue.method(method)
            self.options = _options(options)
            self._parameters = _named(parameters)
            _check(self._parameters, self.world_size)
            require(isinstance(count, int) and count >= 1, "lanes", f"at least 1 is needed, not {lanes!r}")
            self._planner = Planner(self.method, self._parameters, self.world_size, self.options)
            mine.fields = self._fields(count)
        token = mine.token
        store = dist.PrefixStore(f"gradwire/{token}", dist.distributed_c10d._get_default_store())
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout
        self._lanes = [
            Lane(dist.PrefixStore(f"lane/{i}", store), self.rank, self.world_size, timeout, f"gradwire lane {i}")
            for i in range(count)
        ]
        self._roll_call = RollCall(store, self.rank, self.world_size)
        self._breakage = Breakage(self.rank, self._roll_call)
        self._diagnostics = Diagnostics(DIAGNOSTICS_INTERVAL)
        self._lock = threading.Lock()
        self.round = 0
        self._rounds_here = 0
        self.skipped_rounds = 0
        self._elements = 0
        self._open_buckets = 0
        self._finite: dict[int, list[bool | None]] = {}
        self._spaces: dict[tuple[int, int | None], Workspace] = {}
        self.buffer_bytes: Callable[[], int] = lambda: 0
        _open_links.add(self)

    # ------------------------------------------------------------------ exchanging

    def exchange(
        self, index: int, names: Sequence[str], flat: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of one bucket; to be called in the same order on all ranks.

        Args:
            index: Of the bucket in this step.
            names: The whole parameters that lie in ``flat``, one after the other, in memory order.
            flat: Their gradients, overwritten by the mean over ranks.
            last: Whether the step ends with this bucket.

        Returns:
            A future of ``flat``.
        """
        self._breakage.refuse()
        round = self.round
        work = flat if flat.dtype == torch.float32 or isinstance(self.method, Cast) else flat.float()
        plan = self._planner.plan(names, round)
        task = Task(
            plan=plan,
            segments=self._planner.segments(names),
            flat=flat,
            work=work,
            bucket=index,
            round=round,
            context=lambda chunk: self._context(plan, index, chunk, round),
            breakage=self._breakage,
            diagnostics=self._diagnostics,
            check=self.options.check,
            ended=self._ended,
        )
        self._elements += flat.numel()
        with self._lock:
            self._open_buckets += 1
        task.submit(self._lanes)
        if last:
            self.round += 1
            self._rounds_here += 1
        return task.future

    def reduce_(self) -> None:
        """Replace the gradient of every parameter by its mean over ranks; for loops without DDP (collective).

        A parameter without a gradient here takes part with zeros, and receives the mean.
        """
        buckets = self._own_buckets()
        started = []
        for i, names in enumerate(buckets):
            grads = [flat_view(_gradient(self._parameters[n])) for n in names]
            started.append((grads, self.exchange(i, names, torch.cat(grads), i == len(buckets) - 1)))
        for grads, future in started:
            try:
                flat = future.wait()
            except Exception:
                self._breakage.refuse()
                raise
            torch._foreach_copy_(grads, list(flat.split([g.numel() for g in grads])))

    def _own_buckets(self) -> list[list[str]]:
        buckets: dict[tuple[torch.dtype, int], list[str]] = {}
        filled: dict[torch.dtype, list[int]] = {}
        for name, p in reversed(self._parameters.items()):
            at = filled.setdefault(p.dtype, [0, 0])
            if at[1] and at[1] + p.numel() > 4 * self.options.chunk_numel:
                at[0], at[1] = at[0] + 1, 0
            at[1] += p.numel()
            buckets.setdefault((p.dtype, at[0]), []).append(name)
        return list(buckets.values())

    def _context(self, plan: Plan, bucket: int, chunk: int | None, round: int) -> Context:
        key = (id(plan), chunk)
        with self._lock:
            space = self._spaces.setdefault(key, Workspace())
        return Context(
            rank=self.rank,
            world_size=self.world_size,
            round=round,
            bucket=bucket,
            chunk=chunk or 0,
            workspace=space,
            wants_sent=self._diagnostics.wanted(round),
        )

    def _ended(self, task: Task) -> None:
        """Take note that a bucket has been exchanged; the round ends with its last one."""
        with self._lock:
            self._finite.setdefault(task.round, []).append(task.finite)
            self._open_buckets -= 1
            if self._open_buckets == 0:
                self.skipped_rounds += sum(False in found for found in self._finite.values())
                self._finite.clear()

    # ------------------------------------------------------------------ what users ask

    @property
    def error(self) -> Exception | None:
        """The error that broke the link, in full; DDP shows only a mangled part of it."""
        return self._breakage.error

    def traffic(self) -> Traffic:
        """Bytes that this rank sent and received so far."""
        meters = [lane.meter for lane in self._lanes]
        return Traffic(
            sent_bytes=sum(m.sent_bytes for m in meters),
            received_bytes=sum(m.received_bytes for m in meters),
            dense_bytes=dense_bytes(self._elements, self.world_size),
            elements=self._elements,
            rounds=self._rounds_here,
            buffer_bytes=self.buffer_bytes(),
        )

    def diagnostics(self) -> dict[str, Any]:
        """Report how the exchange serves the training.

        Returns:
            ``parameters``: by name, relative error and cosine of what this rank sent against its gradient, at the
            last measured round (every 100th); ``skipped_rounds``: rounds with a non-finite value somewhere, where the
            method looks; ``encode_s``, ``wire_s``, ``decode_s``: seconds this rank's lanes spent so far.
        """
        meters = [lane.meter for lane in self._lanes]
        return {
            "parameters": self._diagnostics.rows(),
            "rounds": self.round,
            "skipped_rounds": self.skipped_rounds,
            "encode_s": sum(m.encode_s for m in meters),
            "wire_s": sum(m.wire_s for m in meters),
            "decode_s": sum(m.decode_s for m in meters),
        }

    def record(self) -> dict[str, Any]:
        """What runs, in plain values, for a run's record: also what "auto" chose."""
        return {
            "gradwire": __version__,
            "torch": torch.__version__,
            "method": repr(self.method),
            "world_size": self.world_size,
            "backend": self._planner.backend,
            "lanes": len(self._lanes),
            "collectives": dict(self._planner.chosen),
            "dense_parameters": sorted(self._planner.dense),
            **{k: getattr(self.options, k) for k in ("min_numel", "warmup_steps", "seed", "chunk_numel", "check")},
        }

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Give this rank's state: local, tensors only, loads with ``weights_only=True``.

        ``global`` holds the round; ``replicated`` and ``rank`` hold a method's memory by parameter name, the same on
        all ranks or this rank's own (empty for the methods of this version).
        """
        return {"global": {"round": torch.tensor(self.round)}, "replicated": {}, "rank": {}}

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Continue where :meth:`state_dict` was taken.

        Raises:
            IncompatibleError: it is not a link's state.
        """
        try:
            self.round = int(state["global"]["round"])
        except (KeyError, TypeError, ValueError):
            raise IncompatibleError("this is not the state of a link: it has no global round") from None

    def close(self) -> None:
        """End the lanes; the link cannot be used afterwards."""
        self._roll_call.close()
        for lane in self._lanes:
            lane.close()

    # ------------------------------------------------------------------ pickling

    def __reduce__(self) -> Any:
        return _lost, (repr(self.method),)

    def _fields(self, lanes: int) -> dict[str, object]:
        shapes = [f"{n} {tuple(p.shape)} {p.dtype} {p.stride()}" for n, p in self._parameters.items()]
        settings = {k: getattr(self.options, k) for k in self.options.__dataclass_fields__}
        return {
            "gradwire version": __version__,
            "method": repr(self.method),
            "lanes": lanes,
            **settings,
            "parameters": shapes,
        }


_open_links: weakref.WeakSet[Link] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Threads that are still in a collective when the interpreter is torn down may abort the process.
    for link in list(_open_links):
        link.close()


class LostLink:
    """What remains of a link in a pickled and reloaded module: nothing exchanges by it."""

    def __init__(self, spec: str) -> None:
        self.spec = spec


def _lost(spec: str) -> LostLink:
    warnings.warn(
        f"a module that exchanged gradients by {spec} was reloaded or copied without its link: DDP now sends float32; "
        "call gradwire.attach on it again",
        stacklevel=2,
    )
    return LostLink(spec)


def _options(given: dict[str, Any]) -> Options:
    known = list(Options.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise HyperparameterError(f"unknown option {name!r}{hint} (known: {', '.join(known)})")
    return Options(**given)


def _named(parameters: Iterable[Any]) -> dict[str, torch.Tensor]:
    pairs = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(parameters)]
    named = {name: p for name, p in pairs if p.requires_grad}
    if len({name for name, _ in pairs}) != len(pairs):
        raise HyperparameterError("two parameters have the same name")
    return named


def _check(parameters: dict[str, torch.Tensor], world_size: int) -> None:
    if world_size < 2:
        raise IncompatibleError(
            "a group of one rank has nothing to exchange: train without gradwire, or start at least two ranks"
        )
    if not parameters:
        raise IncompatibleError("no parameter requires a gradient: there is nothing to exchange")
    for name, p in parameters.items():
        if p.device.type != "cpu":
            raise IncompatibleError(
                f"parameter {name!r} is on {p.device}: this version exchanges CPU gradients; use the CPU, or DDP's own"
                " hooks"
            )
        if not p.is_floating_point():
            raise IncompatibleError(f"parameter {name!r} is {p.dtype}: only floating-point gradients can be exchanged")
        if not bool(torch.isfinite(p.detach()).all()):
            raise IncompatibleError(f"parameter {name!r} holds a NaN or inf before the first step: mend it first")


def _gradient(p: torch.Tensor) -> torch.Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    if p.grad.stride() != p.stride():
        # The same elements must lie at the same place on all ranks, whatever backward made of them here.
        p.grad = torch.empty_like(p).copy_(p.grad)
    return p.grad


def _default_group() -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise IncompatibleError("no process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD
    if group is None:
        raise IncompatibleError("this process is in no group")
    return group
