"""Attach a method to a module, whichever way PyTorch trains it in parallel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Collective, Fallback, KernelBackend, RareOptions, TransportName
from gradwire.link.adapters.ddp import attach_ddp
from gradwire.link.link import Link
from gradwire.link.weight_link import WeightLink

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import Unpack


def attach(
    module: DistributedDataParallel | FSDPModule,
    method: str | Method,
    *,
    optimizer: Any = None,
    grad_scaler: Any = None,
    collective: Collective = "auto",
    exclude: str | Iterable[str] = (),
    min_numel: int | None = None,
    lanes: int | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    check: bool = False,
    check_every: int = 0,
    fallback: Fallback | None = None,
    fallback_limit: float | None = None,
    backend: KernelBackend = "auto",
    transport: TransportName = "auto",
    **more: Unpack[RareOptions],
) -> Link:
    """Exchange the gradients of a module by a method from now on (collective).

    Of a module that :func:`torch.distributed.fsdp.fully_shard` has sharded, the exchange is that between the replicas
    of a shard where there are any: on a mesh of two dimensions, or with ``process_group``. Otherwise it is the
    reduce-scatter of the gradients, and collectives of parameters are left as they are. See ``docs/fsdp.md``.

    Args:
        module: A DistributedDataParallel module without a communication hook, or the root of a module sharded by
            ``fully_shard``.
        method: A method object or a spec such as ``"terngrad"`` or ``"TernGrad(clip=2.5)"``.
        optimizer: For methods that act on its steps, such as DIANA with a proximal operator, and for those that are
            told its learning rates, which are read when a round begins. With a method that brings its own
            momentum (Signum, DGC, DIANA or error feedback with one) an optimizer that has another is refused: this one
            here, and any other that steps a parameter before its first step. Beside a
            method whose residual may grow large (EF-signSGD and 1-bit SGD without small blocks) it is warned of. Of
            methods with local steps its steps are counted; None: those of whichever optimizer holds the parameters.
        grad_scaler: The scaler of automatic mixed precision, for methods that keep a residual or a momentum, or give a
            direction: they refuse gradients of a scaled loss without it. False: this module's gradients are not scaled,
            whatever scalers there are.
        collective: ``"all_reduce"``, ``"all_gather"``, ``"two_shot"``, or ``"auto"``: the one that sends the fewest
            bytes, by exact count, bucket by bucket.
        exclude: Patterns of parameter names that travel in float32, such as ``"fc.*"`` for the last layer.
        min_numel: Parameters with fewer elements travel in float32; by default 1024, and 0 for casts.
        lanes: Process groups and threads that exchange side by side.
        warmup_steps: Rounds at the start that travel in float32.
        seed: Of all random streams; the same on all ranks.
        process_group: The module's own, which is also the default; of a sharded module the ranks that hold the same
            shard, which have equal parameters when this is called.
        check: Verify after every bucket that all ranks hold the same bits.
        check_every: Compare digests of all parameters over ranks every so many rounds, with local steps those of the
            global parameters every so many exchanges; 0: never. A difference, as after an optimizer step that one rank
            left out, is an error on all ranks when the next round begins. The cost of a comparison is a CRC-32 of all
            parameters on each rank, and 8 bytes a parameter to every other rank. Refused for gossip, and where a
            reduce-scatter leaves each rank its own shard.
        fallback: ``"bf16"`` or ``"fp32"``: once what any rank sends strays too far from its gradient, all ranks return
            to it in the same round, with a warning, and stay; ``link.record()["fallback"]`` says when and why.
        fallback_limit: The relative error above which that is so: |sent - gradient| over all parameters of any rank,
            over the root mean square of |gradient| over ranks, looked at in rounds 10, 30 and every 100. Biased
            methods that go astray send a growing residual, and unbiased ones what their variance makes of the
            gradient: ``link.diagnostics()`` tells usual values.
        backend: Of the kernels.
        transport: ``"gloo"`` for CPU tensors, ``"nccl"`` or ``"staged"`` (through page-locked memory, by Gloo) for CUDA
            tensors, or ``"auto"``; see ``docs/gpu.md``.

    Returns:
        The link: ``traffic()``, ``diagnostics()``, ``state_dict()``, ``record()``, ``error``.

    Raises:
        HyperparameterError: a spec, a field, an option or a pattern is wrong.
        IncompatibleError: the module is in a mode that cannot work with a hook; the message says what to change.
        RankMismatchError: ranks differ in version, method, options or parameters, or in the values of parameters.
        BackendError: a kernel backend is missing.
    """
    options: dict[str, Any] = dict(
        lanes=lanes,
        grad_scaler=grad_scaler,
        optimizer=optimizer,
        collective=collective,
        exclude=exclude,
        min_numel=min_numel,
        warmup_steps=warmup_steps,
        seed=seed,
        check=check,
        check_every=check_every,
        fallback=fallback,
        fallback_limit=fallback_limit,
        backend=backend,
        transport=transport,
        **more,
    )
    if isinstance(module, DistributedDataParallel):
        return attach_ddp(module, method, process_group, options)
    if _is_sharded(module):
        # Not before there is such a module: its part of PyTorch takes a second to import.
        from gradwire.link.adapters.fsdp import attach_fsdp

        return attach_fsdp(module, method, process_group, options)
    if hasattr(module, "_orig_mod"):
        raise IncompatibleError(
            "attach needs the module that was compiled, not what torch.compile returned: call gw.attach(ddp, method) "
            "before or after torch.compile(ddp)"
        )
    raise IncompatibleError(
        f"attach needs a DistributedDataParallel module, not {type(module).__name__}; wrap it first, shard it by "
        "torch.distributed.fsdp.fully_shard, or use gradwire.Link in a loop without DDP"
    )


def compress_weights(
    module: FSDPModule,
    method: str | Method = "QSGDinf(levels=7, block_size=128)",
    *,
    seed: int = 0,
    backend: KernelBackend = "auto",
) -> WeightLink:
    r"""Gather the parameters of a module sharded by ``fully_shard`` by what changed of them (collective).

    FSDP2 gathers every unit's parameters before forward and backward. From now on a rank sends of its shard w what
    changed since it was last sent. With k what all ranks know of it, the same bits on all of them, and C the operator::

        k <- w in the first gather        k <- k + C(w - k) where the shard of any rank has changed

    and nothing but a flag where none has, as in backward. Forward and backward compute with k; the optimizer steps w,
    which stays exact. The error of a gather is part of the next difference, so that k follows w as far as one step's
    difference errs, and :meth:`WeightLink.drift` tells how far it is off. Off unless this is called: losses may differ
    from those with exact weights.

    Args:
        module: The root of a module sharded by ``fully_shard``, with replicas or without.
        method: An operator on one vector, without a scale that ranks share: four bits a value by default.
        seed: Of random numbers; the same on all ranks.
        backend: Of the kernels.

    Returns:
        The link: ``drift()``, ``traffic()``, ``begin_anew()``, ``close()``. Call ``begin_anew()`` on all ranks when
        weights were loaded; the next gathers are then exact, and so they are after a restart.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: the module or the method cannot be served; the message says what to change.
        RankMismatchError: ranks differ in version, method, seed or units.

    Memory: all of the module's parameters in float32 on every rank, which is what sharding saves: for models that fit.

    Reference: J. Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM
    Training", NeurIPS 2024, section 3.1, where differences are those of the weights themselves and the operator rounds
    groups of values to the nearest of 16 levels.
    """
    if not _is_sharded(module):
        raise IncompatibleError(
            "compress_weights needs a module sharded by torch.distributed.fsdp.fully_shard, not "
            f"{type(module).__name__}: other modules gather no weights"
        )
    from gradwire.link.adapters.fsdp_weights import compress_sharded_weights

    return compress_sharded_weights(module, method, seed, backend)


def _is_sharded(module: object) -> TypeGuard[torch.nn.Module]:
    return isinstance(module, torch.nn.Module) and any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
