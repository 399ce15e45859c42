"""The record and the state of a link, for users and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options
from gradwire.link.handshake import ReplicaCheck
from gradwire.link.link_runtime import LinkRuntime
from gradwire.link.local_steps import LocalSteps
from gradwire.link.memory_order import add_orders, check_orders, in_memory_order
from gradwire.link.reports import LinkReports
from gradwire.link.round import Round
from gradwire.link.selection.autotune import OWN_STATE, Selection, say_dropped
from gradwire.link.selection.link_cost import CoderSelection, CostKeeper
from gradwire.link.site import Site
from gradwire.link.state import LINK_STATE, check_state, remembered, with_rank
from gradwire.seeds import LinkNumber
from gradwire.version import __version__

RECORDED = ("min_numel", "warmup_steps", "seed", "chunk_numel", "check", "check_every", "fallback_limit")
"""Options that a link's record holds."""


class LinkState(LinkReports):
    """The record and the state of a link."""

    method: Method
    rank: int
    world_size: int
    number: LinkNumber
    options: Options
    _exchanged: Mapping[str, torch.Tensor]
    """The parameters that are exchanged, by name; parts of them if ranks have shards."""
    _site: Site
    _selection: Selection
    _coders: CoderSelection
    _cost: CostKeeper
    _replicas: ReplicaCheck
    _runtime: LinkRuntime
    _round: Round | None = None
    _local: LocalSteps | None = None

    def record(self) -> dict[str, Any]:
        """Return the method and options in force as plain values, with the choice of ``"auto"``."""
        planner = self._selection.planner
        return {
            "gradwire": __version__,
            "torch": torch.__version__,
            "method": repr(self.method),
            "world_size": self.world_size,
            "link_number": self.number.value,
            "backend": planner.backend,
            **self._site.record(),
            "kernels": planner.chosen_kernels,
            "lanes": len(self._runtime.lanes),
            "collectives": dict(planner.chosen),
            "dense_parameters": sorted(planner.dense),
            "choice": self._selection.record(),
            "coder": self._coders.record(planner),
            "link_cost": self._cost.record(),
            "fallback": self._selection.returned(),
            "fallback_to": self.options.fallback,
            **{k: getattr(self.options, k) for k in RECORDED},
        }

    def choose_again(self) -> None:
        """Start a new trial of candidates with the next round if the method is ``"auto"``; call it on all ranks.

        It also ends a fallback.

        Raises:
            IncompatibleError: the link has one method.
        """
        self._selection.again()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's state: a local call; tensors only, so that it loads with ``weights_only=True``.

        ``global`` holds the round and values of the method. ``replicated`` holds its vectors that are the same on all
        ranks, and ``rank`` those of this rank, both by "kind/parameter"; if these suit no other rank, also its number.
        Vectors lie in memory order, which ``global`` names for parameters that lie in another order than that of their
        shape.
        """
        if self._local is not None:
            self._local.waited()
        self._settle()
        self._runtime.device.join()
        state = self._runtime.memory.state()
        kept = {**self._coders.state(), **self._cost.state()}
        state["global"].update(kept, round=torch.tensor(self._runtime.round, device="cpu"))
        state["global"][LINK_STATE] = torch.tensor(self.number.value, device="cpu")
        add_orders(state, self._site.orders)
        with_rank(state["rank"], self.rank, self.method)
        for key, value in self._selection.state().items():
            state["rank" if key in OWN_STATE else "global"][key] = value
        if self._local is not None:
            self._local.parameters.add_state(state, self._local.waited())
        return state

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Continue from a state of :meth:`state_dict`; state of another method is dropped, with a warning.

        Parameters may have another memory format than when it was saved. Then vectors with one value an element are put
        into the order that they have now.

        Raises:
            IncompatibleError: it is not the whole state of a link, its choice is not a candidate here, it suits another
                rank only, or a factor's parameter has another memory format than when it was saved.
            ExchangeError: an exchange of local steps in flight failed, so that the link is broken; nothing was loaded.
        """
        self.check_state_dict(state)
        state = in_memory_order(state, self._site.orders, self.method)
        if self._local is not None:
            # An exchange in flight commits its state when it ends, which must not come after what is loaded.
            self._local.waited()
        self._settle()
        self._replicas.forget()
        self._coders.load(state["global"])
        self._cost.load(state["global"])
        self._runtime.link_cost = self._cost.value
        warn = self._runtime.warnings.once
        if self.options.fallback is None:
            say_dropped(state["global"], warn)
        self._selection.load({**state["global"], **state["rank"]})
        self.number.value = int(state["global"][LINK_STATE])
        # A skipped round may come again, with other gradients.
        self._round, self._runtime.round = None, int(state["global"]["round"])
        self._runtime.diagnostics.forget()
        if self._local is not None:
            state = self._local.load(state)
        found = remembered(state, self._exchanged, self.method, warn)
        # The link's stream copies what is loaded, and its memory is freed then: it must be that stream's own.
        with self._runtime.device.in_order():
            self._runtime.memory.load(found)

    def check_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Check the types and ranges of all values of a state without loading any.

        Raises:
            IncompatibleError: it is not the whole state of a link, a value is invalid, or its choice of a method or of
                a coder is none that this link has.
        """
        check_state(state, self._exchanged, self.method, rank=self.rank)
        self._coders.check(state["global"])
        self._selection.check(state["global"])
        check_orders(state, self._site.orders, self.method)
        if self._local is not None:
            self._local.parameters.check(state)
