"""The communication hook of DistributedDataParallel. No mathematics here.

This module does not postpone annotations: DDP compares a hook's annotations with the types themselves.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import IncompatibleError
from gradwire.methods import Method
from gradwire.runtime.detached import DetachedLink
from gradwire.runtime.link import Link

__all__ = ["attach"]


def attach(
    module: DistributedDataParallel,
    method: str | Method,
    *,
    optimizer: Any = None,
    grad_scaler: Any = None,
    collective: str = "auto",
    exclude: Any = (),
    min_numel: int | None = None,
    lanes: int | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    check: bool = False,
    fallback: str | None = None,
    fallback_limit: float | None = None,
    backend: str = "auto",
    **more: Any,
) -> Link:
    """Exchange the gradients of a DDP module by a method from now on (collective).

    Args:
        module: Wrapped, and without a communication hook.
        method: A method object or a spec such as ``"terngrad"`` or ``"TernGrad(clip=2.5)"``.
        optimizer: For methods that act on its steps, such as DIANA with a proximal operator, and for those that are
            told its learning rates, which are read when a round begins. With a method that brings its own
            momentum (Signum, DIANA or error feedback with one) an optimizer that has another is refused. Beside a
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
        process_group: The module's own, which is also the default.
        check: Verify after every bucket that all ranks hold the same bits.
        fallback: ``"bf16"`` or ``"fp32"``: once what any rank sends strays too far from its gradient, all ranks return
            to it in the same round, with a warning, and stay; ``link.record()["fallback"]`` says when and why.
        fallback_limit: The relative error above which that is so: |sent - gradient| over all parameters of any rank,
            over the root mean square of |gradient| over ranks, looked at every 100 rounds. Biased methods that go
            astray send a growing residual, and unbiased ones what their variance makes of the gradient:
            ``link.diagnostics()`` tells usual values.
        backend: Of the kernels.

    Returns:
        The link: ``traffic()``, ``diagnostics()``, ``state_dict()``, ``record()``, ``error``.

    Raises:
        HyperparameterError: a spec, a field, an option or a pattern is wrong.
        IncompatibleError: the module is in a mode that cannot work with a hook; the message says what to change.
        RankMismatchError: ranks differ in version, method, options or parameters.
        BackendError: a kernel backend is missing.
    """
    group = _check(module, process_group)
    link = Link(
        module.module.named_parameters(),
        method,
        group=group,
        lanes=lanes,
        grad_scaler=grad_scaler,
        optimizer=optimizer,
        collective=collective,
        exclude=exclude,
        min_numel=min_numel,
        warmup_steps=warmup_steps,
        seed=seed,
        check=check,
        fallback=fallback,
        fallback_limit=fallback_limit,
        backend=backend,
        **more,
    )
    module._comm_hooks.clear()
    module.register_comm_hook(_Hooked(module, link), _exchange)
    if link.method.local_steps:
        # Of rank 0 before every forward they would be traffic, and overwrite what ranks have seen themselves.
        module.broadcast_buffers = False
        link.local.count_any_optimizer()
        link.local.buffers = [b for b in module.module.buffers() if b.is_floating_point()]
    _count_buffers(module, link)
    return link


class _Hooked:
    """What DDP hands to the hook: the link, and the names of the parameters that buckets speak of."""

    def __init__(self, module: DistributedDataParallel, link: Link) -> None:
        self.link = link
        self.names = {id(p): name for name, p in module.module.named_parameters()}

    def __reduce__(self) -> Any:
        return self.link.__reduce__()


def _exchange(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    handed: object = bucket
    if isinstance(handed, tuple):
        raise IncompatibleError(
            'torch.compile with optimize_ddp="python_reducer" calls hooks by parameter and ignores what they return; '
            'set torch._dynamo.config.optimize_ddp = "ddp_optimizer"'
        )
    if not isinstance(state, _Hooked):
        raise IncompatibleError("this module was reloaded without its link; call gradwire.attach on it again")
    flat = bucket.buffer()
    if flat.is_sparse:
        raise IncompatibleError("a sparse gradient cannot be exchanged; build the embedding with sparse=False")
    names = [state.names[id(p)] for p in bucket.parameters()]
    return state.link.exchange(bucket.index(), names, flat, bucket.is_last())


def _check(module: DistributedDataParallel, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not isinstance(module, DistributedDataParallel):
        raise IncompatibleError(
            f"attach needs a DistributedDataParallel module, not {type(module).__name__}; wrap it first, or use "
            "gradwire.Link in a loop without DDP"
        )
    hooks = [state for _, state in module._comm_hooks if not isinstance(state, DetachedLink)]
    if hooks:
        first = hooks[0]
        what = repr(first.link.method) if isinstance(first, _Hooked) else "another communication hook"
        raise IncompatibleError(
            f"this module already exchanges by {what}, and DDP takes one hook in its life; wrap the module anew"
        )
    if module.mixed_precision is not None:
        raise IncompatibleError("DDP's mixed_precision takes the only hook; use torch.autocast instead")
    if getattr(module, "_use_python_reducer", False):
        raise IncompatibleError(
            'optimize_ddp="python_reducer" ignores what a hook returns; set torch._dynamo.config.optimize_ddp = '
            '"ddp_optimizer" before wrapping'
        )
    for name, part in module.module.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise IncompatibleError(
                f"module {name!r} makes sparse gradients, which no method here can exchange; build it with sparse=False"
            )
    if group is not None and group is not module.process_group:
        raise IncompatibleError("process_group differs from the module's own; wrap the module with that group instead")
    own: dist.ProcessGroup = module.process_group
    return own


class _BufferCounter:
    """Counts DDP's broadcasts of buffers: one from rank 0 to all before each synchronised forward.

    A forward pre-hook of the module, and pickled with it.
    """

    def __init__(self, bytes_of_one: int) -> None:
        self.bytes_of_one, self.calls = bytes_of_one, 0

    def __call__(self, module: DistributedDataParallel, _inputs: object) -> None:
        self.calls += bool(module.broadcast_buffers and module.require_forward_param_sync)

    def total(self) -> int:
        return self.calls * self.bytes_of_one


def _count_buffers(module: DistributedDataParallel, link: Link) -> None:
    size = sum(b.numel() * b.element_size() for b in module.module.buffers())
    if size and module.broadcast_buffers:
        counter = _BufferCounter(size * _broadcast_copies(link.rank, link.world_size))
        module.register_forward_pre_hook(counter)
        link.buffer_bytes = counter.total


def _broadcast_copies(rank: int, world_size: int) -> int:
    """Count the copies that a rank passes on in a binomial tree from rank 0: N - 1 in all."""
    reach = 1
    while reach <= rank:
        reach *= 2
    copies = 0
    while rank + reach < world_size:
        copies, reach = copies + 1, reach * 2
    return copies
