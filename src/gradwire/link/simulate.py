"""Exchanges between simulated workers in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.drivers import Meter, Traffic, dense_bytes, simulate_ranks
from gradwire.exchange.method import Method, is_whole, require
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.planning.options import Options, refuse_scatter
from gradwire.exchange.planning.planner import Planner
from gradwire.exchange.protocols import Context, Gauges, Memory, RoundParts, Workspace
from gradwire.exchange.segments import flat_view
from gradwire.link.checks import check_optimizer
from gradwire.link.diagnostics import Diagnostics, Judge, parameter_rows, wait_report
from gradwire.link.failures import WarnOnce
from gradwire.link.found_optimizers import LearningRates
from gradwire.link.memory_order import add_orders, check_orders, in_memory_order, memory_orders
from gradwire.link.parameters import names_of_round
from gradwire.link.selection.autotune import say_dropped
from gradwire.link.selection.link_cost import CoderSelection, CostKeeper
from gradwire.link.state import LINK_STATE, MOST_ROUNDS, check_state, of_another_size, remembered, with_rank
from gradwire.methods.spec import method as read_method
from gradwire.seeds import LinkNumber
from gradwire.version import __version__


class SimulatedLink:
    """Exchanges the gradients of N simulated workers by the code of a real link, without processes or network.

    Results have the same bits as those of a real group for every method with the property ``bit_stable``.

    Args:
        parameters: (name, tensor) pairs of the parameters with a gradient.
        method: A method or its spec.
        world_size: Number of workers N.
        optimizer: The optimizer of ``parameters``, for methods that use its learning rate, which is read when a round
            begins.
        options: See :class:`Options`. ``check`` has no effect here, and ``link_cost`` must be given if the method needs
            it, since there is no network to measure.

    Attributes:
        number: See :class:`Link`: 0, or the number of the link whose state was loaded.
        orders: Memory order of each parameter, or of those of which ``parameters`` are pieces.
        skipped_rounds: See :class:`Link`.

    Raises:
        HyperparameterError: a spec, an option or an exclude pattern is wrong, or ``parameters`` are not pairs of
            different names.
        IncompatibleError: there is no parameter, or the method needs a real link or an optimizer, or does not work with
            this number of workers.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        method: str | Method,
        world_size: int,
        *,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        if not is_whole(world_size, 1):
            raise HyperparameterError(f"world_size: at least one worker is needed, not {world_size!r}")
        self.method = read_method(method).with_files(world_size)
        if self.method.traits.tries:
            raise IncompatibleError(
                f"{self.method!r} chooses by the time that a real link takes: name a method to simulate, or use real"
                " workers"
            )
        if self.method.traits.needs_optimizer:
            raise IncompatibleError(
                f"{self.method!r} acts on the steps of an optimizer that gradwire.attach is given: there is none in "
                "a simulation or in gradwire train: leave prox to gradwire.ProximalSGD, or to --l1 of the task logreg"
            )
        self.options = Options.of(options)
        refuse_scatter(self.options.collective, "a simulation")
        if self.options.fallback is not None:
            raise IncompatibleError("a simulation measures no errors on its way: leave fallback= to gradwire.attach")
        self.world_size = world_size
        self._parameters = _pairs(parameters)
        if not self._parameters:
            raise IncompatibleError("there is no parameter to exchange")
        self.orders = memory_orders(self._parameters)
        check_optimizer(self.method, optimizer, self._parameters)
        self._optimizer = optimizer
        self._rates = LearningRates(self.method, optimizer, self._parameters)
        self._read: Mapping[str, float] | None = None
        self._coders = CoderSelection()
        self.number = LinkNumber()
        planner = Planner(self.method, self._parameters, world_size, self.options, self.number)
        self._planner = self._coders.watch(planner)
        self._planner.check()
        self._coders.agree([self._coders.measure()])
        self._spaces = [[Workspace()] for _ in range(world_size)]
        self._meters = [Meter(r) for r in range(world_size)]
        self._memories = [Memory() for _ in range(world_size)]
        self._gauges = [Gauges() for _ in range(world_size)]
        self._parts = [RoundParts() for _ in range(world_size)]
        self._cost = CostKeeper(self.method, self.options.link_cost)
        self._notices, self._own_notices = WarnOnce(), [WarnOnce(rank) for rank in range(world_size)]
        self._diagnostics = Diagnostics()
        self._judge = Judge(lambda: planner.method, self._diagnostics, self._notices)
        self._order = self._planner.step_order()
        self.numel = sum(p.numel() for p in self._parameters.values())
        self.round = self._rounds_here = self.skipped_rounds = self._elements = 0

    def take_place(self, number: int) -> None:
        """Be one of several links that warn of the same things: only number 0 logs what concerns all."""
        self._notices.take_place(number, 0)

    def reduce_(self, gradients: torch.Tensor, names: Sequence[str] | None = None) -> torch.Tensor:
        """Exchange one round.

        Args:
            gradients: Float32 ``[world_size, numel]``, overwritten: row r holds worker r's gradients, parameter after
                parameter, each in memory order.
            names: Names of the parameters in this round, in the order of a row; None: all, in the link's.

        Returns:
            The mean over workers, float32 ``[numel]``: row 0 of ``gradients``.

        Raises:
            IncompatibleError: ``gradients`` or ``names`` do not suit, or the method has an outcome for each worker.
        """
        if self.method.traits.outcomes_differ:
            raise IncompatibleError(
                f"{self.method!r} has an outcome for each worker, and none that all share: use exchange_, or "
                "gradwire.SimulatedLocalSteps"
            )
        self.exchange_(gradients, names)
        return gradients[0]

    def exchange_(self, gradients: torch.Tensor, names: Sequence[str] | None = None) -> None:
        """Exchange one round like :meth:`reduce_`; row 0 then is the outcome.

        If the method's outcomes differ, rows are parameters, and row r is the outcome of worker r.
        """
        names = names_of_round(names, self._parameters, self.method)
        numel = sum(self._parameters[name].numel() for name in names)
        shape, given = [self.world_size, numel], list(gradients.shape)
        if given != shape or gradients.dtype != torch.float32:
            raise IncompatibleError(f"gradients are float32 {shape}, not {gradients.dtype} {given}")
        self._read = self._rates.read()
        if self.method.traits.whole_step:
            rows = torch.stack([self._reordered(g, names, self._order) for g in gradients])
            self._exchange(self._order, rows)
            gradients[0] = self._reordered(rows[0], self._order, names)
        else:
            self._exchange(names, gradients)
        self.round += 1
        self._rounds_here += 1
        self._elements += numel

    def _exchange(self, names: list[str], rows: torch.Tensor) -> None:
        plan = self._planner.plan(names, self.round)
        finite = True
        # The first round is too early to be measured, and :func:`simulate` has no other.
        measured = self._rounds_here > 0 and self._diagnostics.wanted(self.round)
        gradient, sent = (rows[0].clone(), torch.zeros_like(rows[0])) if measured else (None, None)
        prepared: Any = simulate_ranks([plan.prepare(self._context(r, 0), g) for r, g in enumerate(rows)], self._meters)
        for chunk in range(plan.chunks):
            contexts = [replace(self._context(r, chunk), wants_sent=measured) for r in range(self.world_size)]
            runs = [plan.run(c, g, p) for c, g, p in zip(contexts, rows, prepared)]
            # Workers other than 0 must finish the protocol only if they have state or an outcome of their own.
            stateless = self.method.properties.state == "none" and not self.method.traits.remembers
            alike = stateless and not self.method.traits.outcomes_differ
            outcome = simulate_ranks(runs, self._meters, leader_only=alike)[0]
            finite = finite and outcome.finite is not False
            if outcome.sent is None:
                sent = None
            elif sent is not None:
                outcome.sent(sent, 1.0)
        self.skipped_rounds += not finite
        if gradient is not None and sent is not None:
            plan.target_(self._context(0, 0), gradient)
            self._diagnostics.measure(gradient, sent, self._planner.segments(names), self.round)
        for memory in self._memories:
            memory.commit() if finite else memory.discard()
        for gauges in self._gauges:
            gauges.end_round(skipped=not finite)
        if finite:
            self._judge.look(self._memories[0], self.round)
        if plan.finishes and finite:
            simulate_ranks([plan.finish(self._context(r, 0)) for r in range(self.world_size)], self._meters)
            for memory in self._memories:
                memory.commit()
        for parts in self._parts:
            parts.take()

    def _context(self, rank: int, chunk: int) -> Context:
        return Context(
            rank, self.world_size, self.round, 0, chunk, self._space(rank, chunk), memory=self._memories[rank],
            warn=self._notices.once, warn_here=self._own_notices[rank].here, gauge=self._gauges[rank].add,
            link=self._cost.value, parts=self._parts[rank], learning_rates=self._read,
        )  # fmt: skip

    def _reordered(self, row: torch.Tensor, names: list[str], wanted: list[str]) -> torch.Tensor:
        parts = dict(zip(names, row.split([self._parameters[n].numel() for n in names])))
        return torch.cat([parts[n] for n in wanted])

    def scatter_(self, mean: torch.Tensor) -> None:
        """Write a mean vector into the ``grad`` of the parameters."""
        parts = mean.split([p.numel() for p in self._parameters.values()])
        for p, part in zip(self._parameters.values(), parts):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            flat_view(p.grad).copy_(part)

    def traffic(self, worker: int = 0) -> Traffic:
        """Return the bytes that a worker would have sent and received; they differ only in broadcasts and trees.

        Rounds before a loaded state are not counted, as on a real link.
        """
        meter, elements = self._meters[worker], self._elements
        return Traffic(
            meter.sent_bytes,
            meter.received_bytes,
            dense_bytes(elements, self.world_size),
            elements,
            self._rounds_here,
            sent_to=dict(meter.sent_to),
            sent_within=dict(meter.sent_within),
        )

    def diagnostics(self) -> dict[str, Any]:
        """Return ``parameters`` and ``wait`` of :meth:`Link.diagnostics` for worker 0.

        The first round of a simulation is not measured.
        """
        compressed = {name: p for name, p in self._parameters.items() if name not in self._planner.dense}
        return {
            "parameters": parameter_rows(self._diagnostics, self._memories[0], self.method.traits.waiting),
            "wait": wait_report(self.method, self._optimizer, compressed, self._diagnostics.wait()),
        }

    def gauges(self) -> list[dict[str, float]]:
        """Return :meth:`Link.gauges` of each worker, by worker."""
        return [dict(gauges.latest) for gauges in self._gauges]

    def record(self) -> dict[str, Any]:
        """Return the method and options in force as plain values, as :meth:`Link.record` does."""
        return {
            "gradwire": __version__,
            "torch": torch.__version__,
            "method": repr(self.method),
            "world_size": self.world_size,
            "backend": self._planner.backend,
            "simulated": True,
            "coder": self._coders.record(self._planner),
            "link_cost": self._cost.record(),
            "collectives": dict(self._planner.chosen),
            "dense_parameters": sorted(self._planner.dense),
            **{k: getattr(self.options, k) for k in ("min_numel", "warmup_steps", "seed", "chunk_numel")},
        }

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state, in the form of :meth:`Link.state_dict`, with a "rank R" for every worker."""
        states = [memory.state() for memory in self._memories]
        shared = {
            **states[0]["global"],
            **self._coders.state(),
            **self._cost.state(),
            "round": torch.tensor(self.round, device="cpu"),
            LINK_STATE: torch.tensor(self.number.value, device="cpu"),
        }
        add_orders({"global": shared}, self.orders)
        own = {f"rank {r}": with_rank(state["rank"], r, self.method) for r, state in enumerate(states)}
        return {"global": shared, "replicated": states[0]["replicated"], **own}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue from a state of :meth:`state_dict`, with the same number of workers or another.

        State of another method is dropped, with a warning.

        Raises:
            IncompatibleError: it is not the whole state of a simulation, or does not suit this one.
        """
        check_state(state, self._parameters, self.method, rank=None)
        check_orders(state, self.orders, self.method)
        state = in_memory_order(state, self.orders, self.method)
        saved = len(state.keys() - {"global", "replicated"})
        if saved != self.world_size:
            state = of_another_size(state, self.method, saved, self.world_size, self._notices.once)
        self._coders.load(state["global"])
        self._cost.load(state["global"])
        say_dropped(state["global"], self._notices.once)
        self.round, self.number.value = int(state["global"]["round"]), int(state["global"][LINK_STATE])
        found = remembered(state, self._parameters, self.method, self._notices.once)
        for r, memory in enumerate(self._memories):
            memory.load({**found, "rank": found.get(f"rank {r}", {})})

    def _space(self, rank: int, chunk: int) -> Workspace:
        spaces = self._spaces[rank]
        while len(spaces) <= chunk:
            spaces.append(Workspace(bucket=spaces[0]))
        return spaces[chunk]


def _pairs(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pairs = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for pair in pairs:
        named = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not named or not isinstance(pair[1], torch.Tensor):
            raise HyperparameterError(
                f"parameters: (name, tensor) pairs are needed, such as model.named_parameters(), not "
                f"{type(pair).__name__}"
            )
    found = dict(pairs)
    if len(found) != len(pairs):
        raise HyperparameterError("parameters: two have the same name")
    return found


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of :func:`simulate`.

    Attributes:
        mean: The mean over workers: a vector, or a dict by name, as the gradients were given.
        state: State to pass to the next call.
        traffic: Traffic of worker 0 in this round.
    """

    mean: Any
    state: dict[str, dict[str, torch.Tensor]]
    traffic: Traffic


def simulate(
    gradients: torch.Tensor | Sequence[Mapping[str, torch.Tensor]],
    method: str | Method,
    *,
    state: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    seed: int = 0,
    round: int = 0,
    link_cost: LinkCost | None = None,
) -> Simulation:
    """Exchange given gradients once, with all workers in this process.

    Args:
        gradients: A float tensor ``[world_size, numel]`` (one parameter, named "0"), or a list of name-to-tensor dicts,
            one for each worker. Every parameter is compressed, however small.
        method: A method or its spec.
        state: ``state`` of an earlier result; its round replaces ``round``.
        seed: Seed of the random streams.
        round: Number of the round, up to 2^48 - 2, on which random numbers depend.
        link_cost: Cost of a message, for methods that depend on it.

    Returns:
        The mean over workers, the state for the next call, and the traffic of worker 0.

    Raises:
        HyperparameterError: the method, the seed or the round is wrong.
        IncompatibleError: the gradients are not floats in one of these forms, the method cannot exchange them, or
            ``state`` is not that of a simulation with these parameters.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.ones(2, 3), "fp32").mean
        tensor([1., 1., 1.])
    """
    if isinstance(gradients, torch.Tensor) and gradients.dim() < 2:
        raise IncompatibleError(
            f"gradients are [world_size, numel], a row a worker, not {list(gradients.shape)}: give gradients[None] for "
            "one worker"
        )
    workers = gradients if not isinstance(gradients, torch.Tensor) else [{"0": row} for row in gradients]
    if not all(isinstance(worker, Mapping) for worker in workers):
        raise IncompatibleError("gradients are a tensor [world_size, numel] or dicts of tensors by name, one a worker")
    if not len(workers) or any(w.keys() != workers[0].keys() for w in workers):
        raise IncompatibleError("every worker needs a gradient for the same names, and there is at least one worker")
    for name, g in (pair for worker in workers for pair in worker.items()):
        if not g.is_floating_point():
            raise IncompatibleError(f"the gradient of {name!r} is {g.dtype}: give floats, as by gradients.float()")
    like = {n: torch.empty_like(g, requires_grad=False) for n, g in workers[0].items()}
    link = SimulatedLink(like.items(), method, len(workers), seed=seed, min_numel=0, link_cost=link_cost)
    require(is_whole(round, 0, MOST_ROUNDS - 2), "round", f"a whole number from 0 to 2^48 - 2 is needed, not {round!r}")
    link.round = round
    if state is not None:
        link.load_state_dict(state)
    if any(w[n].shape != p.shape for w in workers for n, p in like.items()):
        raise IncompatibleError("the gradients of one name have different shapes")
    # Use the memory order of the first worker's gradients, whatever the order or the gaps of the others.
    rows = torch.stack(
        [torch.cat([flat_view(torch.empty_like(p).copy_(w[n])).float() for n, p in like.items()]) for w in workers]
    )
    mean = link.reduce_(rows)
    parts = {}
    for (name, p), part in zip(like.items(), mean.split([p.numel() for p in like.values()])):
        whole = torch.empty_like(p, requires_grad=False)
        flat_view(whole).copy_(part)
        parts[name] = whole
    single = isinstance(gradients, torch.Tensor)
    return Simulation(parts["0"] if single else parts, link.state_dict(), link.traffic())
