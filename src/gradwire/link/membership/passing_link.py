"""A link that passes its state to the ranks of others: all of it to new ones, and what was not sent yet to an heir."""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gradwire.errors import IncompatibleError, PayloadError, RankMismatchError
from gradwire.exchange.segments import flat_view
from gradwire.link.global_parameters import CLOCK, GlobalParameters
from gradwire.link.handshake import digest
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.epoch_link import EpochLink
from gradwire.link.membership.records import Epoch
from gradwire.link.membership.steps import Hand
from gradwire.link.membership.transfer import receive_state, send_state
from gradwire.link.parameters import named_parameters
from gradwire.link.state import OWN_VALUES


class PassingLink(EpochLink):
    """Passes state between the members of an epoch, and compares what must be the same on all."""

    _opened: bool
    """True once the link was open."""
    _voted_out: frozenset[str] = frozenset()
    """Ids of members that said by their votes that they leave, since members have met last."""
    _misses_residuals: bool = False
    """Whether something that was to be handed over has not arrived, as far as this member knows, since the last round
    that counted: members that meet tell each other."""

    def _hand(self, step: Hand, epoch: Epoch) -> None:
        """Hand over what a member that leaves has not sent yet: to be added to what the heir has not sent."""
        kind, group = self.method.traits.waiting, self._epoch_group
        self._voted_out |= set(step.leavers)
        if group is None or kind not in self.method.traits.remembers:
            return
        places, key = epoch.ids(), self._key(epoch)
        missing = set(step.leavers)
        group.parting = frozenset(map(places.index, step.leavers))
        try:
            if self._seat.me.id in step.leavers:
                state = self._runtime.memory.state()["rank"]
                kept = {name: x for name, x in state.items() if name.partition("/")[0] == kind}
                send_state(group, places.index(step.heir), kept, key)
            elif self._seat.me.id == step.heir:
                for leaver in step.leavers:
                    kept = receive_state(group, places.index(leaver), key)
                    for key_of, vector in kept.items():
                        memory_kind, _, name = key_of.partition("/")
                        self._runtime.memory.add(memory_kind, name, vector)
                    self._party.counts["residuals_handed"] += 1
                    missing.remove(leaver)
        except (RuntimeError, PayloadError):
            self._party.miss_residuals(missing)
            self._misses_residuals = True
            # A trace has them as lost members, of whom nothing was left.
            self._seat.parted = tuple(id for id in self._seat.parted if id not in missing)

    def _pass_state(self, group: EpochGroup, epoch: Epoch) -> Any:
        """Send the state to new members, if this is the first member that has it; receive it, if this one is new."""
        source = next(place for place, id in enumerate(epoch.ids()) if id not in epoch.new)
        key = self._key(epoch)
        if self._seat.me.id in epoch.new:
            return receive_state(group, source, key)
        if group.place == source and epoch.new:
            state = self._state_for_others()
            with ThreadPoolExecutor(len(epoch.new)) as pool:
                sent = [pool.submit(send_state, group, epoch.ids().index(id), state, key) for id in epoch.new]
            for one in sent:
                one.result()
        return None

    def _key(self, epoch: Epoch) -> bytes:
        secret = self._party.board.seal.secret.encode()
        return hashlib.blake2b(f"gradwire state\0{epoch.digest()}".encode(), key=secret, digest_size=32).digest()

    def _state_for_others(self) -> dict[str, Any]:
        link = self.state_dict() if self._opened else None
        parameters = named_parameters(self._asked[0])
        # Global parameters are in the state of the link.
        own = link is not None and self._local is not None and isinstance(self._local.parameters, GlobalParameters)
        return {
            "parameters": None if own else {name: flat_view(x.detach()) for name, x in parameters.items()},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "carried": self._party.carried_state(),
            "link": None if link is None else {part: link[part] for part in ("global", "replicated")},
        }

    @torch.no_grad()
    def _take_values(self, state: Any) -> None:
        """Take over parameters, the optimizer's state, and that of what is carried."""
        own = {name: flat_view(x.detach()) for name, x in named_parameters(self._asked[0]).items()}
        theirs = own if state["parameters"] is None else state["parameters"]
        if {n: (x.shape, x.dtype) for n, x in own.items()} != {n: (x.shape, x.dtype) for n, x in theirs.items()}:
            raise IncompatibleError("the parameters of the other members have other names, types or sizes")
        for name, x in own.items():
            x.copy_(theirs[name])
        if (self.optimizer is None) != (state["optimizer"] is None):
            raise IncompatibleError("pass the optimizer to the link on all members, or on none")
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self._party.load_carried(state["carried"])

    def _take_state(self, state: Any) -> None:
        """Take over the round, and what is the same on all members."""
        self.load_state_dict({**state, "rank": {}})
        if self._local is not None and isinstance(self._local.parameters, GlobalParameters):
            self._local.parameters.restore()

    def _compares_values(self) -> bool:
        return not self.method.traits.local_steps

    def _compare_state(self) -> None:
        """Compare what must be the same on all members beside the parameters.

        Raises:
            RankMismatchError: it is not.
        """
        if self.world_size == 1:
            self._forget_if_missing(self._misses_residuals)
            return
        state = self.state_dict()
        skipped = {*OWN_VALUES, *CLOCK, *self.method.traits.of_first} - {"round"}
        found = 0
        for part in ("global", "replicated"):
            for key in sorted(state[part].keys() - skipped):
                found = zlib.crc32(f"{key} {digest(state[part][key]):08x}".encode(), found)
        told = self._channel.gather([float(found), float(self._misses_residuals)])
        rows = [int(row[0]) for row in told]
        self._party.counts["digests_compared"] += 1
        if len(set(rows)) > 1:
            self._party.counts["digests_differed"] += 1
            raise RankMismatchError(
                f"epoch {self._seat.current.number}: members hold different states of {self.method!r}: load a "
                "checkpoint on all of them"
            )
        self._forget_if_missing(any(row[1] for row in told))

    def _forget_if_missing(self, misses: bool) -> None:
        """Let what waits on all members begin anew where a part of it has not arrived, if it makes sense only whole."""
        # Until the next round counts: a member that learns of it now may end before one that does not has met others.
        self._misses_residuals = misses
        if misses and self.method.traits.subtracts_mean:
            self._runtime.memory.forget(self.method.traits.waiting)
