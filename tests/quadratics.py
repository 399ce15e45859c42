"""Unlike workers' quadratics: the problem on which DQGD and DIANA are held against their theory."""

from __future__ import annotations

import torch

__all__ = ["Quadratic"]


class Quadratic:
    """f_i(x) = x' A_i x / 2 + b_i' x, each A_i with eigenvalues 1 to 20 in a basis of its own."""

    def __init__(self, seed: int = 0, *, alike: bool = False, workers: int = 8, size: int = 40) -> None:
        n, d, generator = workers, size, torch.Generator().manual_seed(seed)
        spectrum = torch.linspace(1, 20, d, dtype=torch.float64)
        bases = [torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0] for _ in range(n)]
        self.a = torch.stack([q @ torch.diag(spectrum) @ q.T for q in bases])
        self.b = torch.randn(n, d, generator=generator, dtype=torch.float64)
        if alike:
            # Every worker's gradient vanishes at one point.
            self.b = -torch.einsum("nij,j->ni", self.a, torch.randn(d, generator=generator, dtype=torch.float64))
        mean = self.a.mean(0)
        values = torch.linalg.eigvalsh(mean)
        self.mu, self.smooth, self.worst = float(values[0]), float(values[-1]), 20.0
        self.best = torch.linalg.solve(mean, -self.b.mean(0))
        self.at_best = self.gradients(self.best)

    def gradients(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nij,j->ni", self.a, x) + self.b
