"""NoLoCo: local steps after which each worker meets one other, drawn anew each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Pairs"]


class Pairs:
    """Local steps of simulated workers with NoLoCo's outer step, in pairs.

    With f_i worker i's parameters after the last exchange, x_i those now, and means over the pair::

        m_i <- outer_momentum m_i + outer_lr (mean(x - f) + mean(f) - f_i)
        f_i <- f_i + m_i        x_i <- f_i

    The last term draws the two together. Without momentum and with an outer rate of 1 the two average their parameters.
    It is not a method of the library, whose gossip has a fixed graph.

    Args:
        workers: For each worker, its parameters, changed in place; an even number of workers.
        every: Optimizer steps between exchanges.
        outer_lr, outer_momentum: As above; 0.7 and 0.5 in the authors' configurations.
        seed: Seed of the pairs.

    Reference: J. Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025
    (arXiv:2506.10911), by the authors' program (jkolehm/noloco, ``src/noloco/sparse_optimizer_c.py``).
    """

    def __init__(
        self, workers: Sequence[Sequence[Tensor]], *, every: int, outer_lr: float, outer_momentum: float, seed: int
    ) -> None:
        if len(workers) % 2:
            raise ValueError(f"{len(workers)} workers do not meet in pairs")
        self._workers, self._every, self._seed = workers, every, seed
        self._rate, self._momentum = outer_lr, outer_momentum
        self.steps = 0
        self.held = torch.stack([self._flat(mine) for mine in workers])
        self.moved = torch.zeros_like(self.held)

    @staticmethod
    def _flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.detach().reshape(-1) for x in tensors])

    @property
    def sent_bytes(self) -> int:
        """Bytes that a worker has sent, and received: two float32 vectors an exchange."""
        return self.steps // self._every * 2 * 4 * self.held.shape[1]

    def partners(self, exchange: int) -> list[int]:
        """Return the partner of each worker in an exchange, a function of the seed and its number."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + exchange)
        order = torch.randperm(len(self._workers), generator=generator).tolist()
        met = dict(zip(order[::2], order[1::2]))
        met |= {b: a for a, b in met.items()}
        return [met[worker] for worker in range(len(order))]

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step of all optimizers, and exchange if it is due."""
        self.steps += 1
        if self.steps % self._every:
            return
        partners = self.partners(self.steps // self._every)
        now = torch.stack([self._flat(mine) for mine in self._workers])
        changes = now - self.held
        difference = (changes + changes[partners]) / 2 + (self.held[partners] - self.held) / 2
        self.moved.mul_(self._momentum).add_(difference, alpha=self._rate)
        self.held.add_(self.moved)
        self._put(self.held)

    def _put(self, rows: Tensor) -> None:
        for mine, row in zip(self._workers, rows):
            for x, part in zip(mine, row.split([x.numel() for x in mine])):
                x.data.copy_(part.view(x.shape))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Return a context in which all workers have the mean of their parameters."""
        own = torch.stack([self._flat(mine) for mine in self._workers])
        self._put(own.mean(0).expand_as(own))
        try:
            yield
        finally:
            self._put(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state, without the workers' parameters."""
        return {"held": self.held.clone(), "moved": self.moved.clone(), "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state; the caller loads the workers' parameters."""
        self.held.copy_(state["held"])
        self.moved.copy_(state["moved"])
        self.steps = int(state["steps"])
