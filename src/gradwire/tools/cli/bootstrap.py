"""Run an unchanged DDP script with a method on every DDP module that it builds.

``gradwire run`` has torchrun start ``python -m gradwire.tools.cli.bootstrap SCRIPT [ARGS]`` in every process. Each
``DistributedDataParallel`` that the script builds, also through a subclass, gets a link when its ``__init__`` returns.
At the end rank 0 prints how many bytes were saved. An exception of the script keeps its traceback; if a link raised it,
the link's own error is printed after it, since DDP shows only a mangled part. The launcher says why a rank ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gradwire.tools.cli.launcher import Report
from gradwire.tools.experiments.config import LinkSettings
from gradwire.tools.processes import look_beside

ENVIRONMENT = "GRADWIRE_RUN"


def to_text(settings: LinkSettings) -> str:
    """Return the settings as text for the environment variable ``GRADWIRE_RUN``."""
    return json.dumps(dataclasses.asdict(settings))


def from_text(text: str) -> LinkSettings:
    """Read the settings back from :func:`to_text`'s text."""
    fields = json.loads(text)
    return LinkSettings(**{**fields, "exclude": tuple(fields["exclude"])})


def attach_everywhere(settings: LinkSettings) -> list[Any]:
    """Attach a link to every DDP module that is built from now on; the returned list grows with each."""
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw

    links: list[Any] = []
    original: Callable[..., None] = DistributedDataParallel.__init__

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        links.append(gw.attach(self, settings.method, **settings.link_options()))

    DistributedDataParallel.__init__ = initialize  # type: ignore[method-assign]
    return links


def summary(links: Sequence[Any]) -> str:
    """Describe in one line what the links sent."""
    if not links:
        return "gradwire: the script built no DistributedDataParallel module; nothing was compressed"
    sent = sum(link.traffic().sent_bytes for link in links)
    dense = sum(link.traffic().dense_bytes for link in links)
    texts = [_came_to(link) for link in links]
    alike = len(set(texts)) == 1
    spec = texts[0] if alike else "; ".join(f"module {i}: {text}" for i, text in enumerate(texts))
    if not sent:
        return f"gradwire: {spec}: no gradient was exchanged"
    word = "less" if dense > sent else "more"
    ratio = f"{max(dense, sent) / min(dense, sent):.1f}"
    times = "about as much" if ratio == "1.0" else f"{ratio} times {word}"
    return (
        f"gradwire: {spec}: each worker sent {sent / 1e6:.2f} MB instead of {dense / 1e6:.2f} MB, "
        f"{times} ({32 * sent / dense:.2f} bits per element)"
    )


def left_apart(links: Sequence[Any]) -> list[str]:
    """Return a line for each link whose workers ended with different parameters.

    An exchange here would come too late: a script has usually saved its model, and destroyed its process group, before
    it ends.
    """
    lines = [link.left_apart("call gw.attach in the script, and link.synchronise() before it saves") for link in links]
    return [f"gradwire: {line}" for line in lines if line is not None]


def _came_to(link: Any) -> str:
    """Describe the method that a link used in the end: its own, the chosen one, or the fallback."""
    from gradwire.tools.report.summary import choice_text, fallback_reason, fallback_text

    spec, record = repr(link.method), link.record()
    choice, returned = record["choice"], record["fallback"]
    if choice is not None:
        spec = choice_text(choice["chosen"], choice["reason"], choice["note"]) or spec
    if returned is not None:
        spec = f"{spec}, {fallback_text(returned['method'], fallback_reason(returned))}"
    return spec


def run_script(script: str, arguments: Sequence[str], links: Sequence[Any]) -> None:
    """Run the script as ``__main__``, as ``python SCRIPT ARGS`` would."""
    sys.argv = [script, *arguments]
    look_beside(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        # The launcher reports it once.
        _leave(130)
    except Exception as error:
        # This rank ends by itself: torchrun's signal, sent if another one failed before, would interrupt the printing.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        for link in links:
            if link.error is not None:
                print(f"gradwire: {type(link.error).__name__}: {link.error}", file=sys.stderr)
        report(links, error)
        _leave(1)


def report(links: Sequence[Any], error: Exception | None = None) -> None:
    """Save a report for the launcher on how this rank ended."""
    broken = next((link.error for link in links if link.error is not None), None)
    message = None if error is None else next(iter(str(error).strip().splitlines()), "")
    Report(
        rank=int(os.environ.get("RANK", "0")),
        round=links[-1].round if links else None,
        kind=None if error is None else type(error).__name__,
        message=message,
        link=None if broken is None else str(broken),
        remote=type(broken).__name__ == "ExchangeError" and "could not go on" in str(broken),
    ).save()


def _leave(code: int) -> NoReturn:
    # A signal that interrupts a print finds the stream in use.
    with contextlib.suppress(RuntimeError, OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def report_when_ended(links: Sequence[Any]) -> None:
    """Save a report also if torchrun ends this rank because another one failed.

    If this rank was waiting in an exchange, its link names the missing rank and the round when the exchange breaks.
    """

    def ended(number: int, frame: object) -> None:
        report(links)
        _leave(128 + number)

    signal.signal(signal.SIGTERM, ended)


def main() -> None:
    """Attach the method, run the script, and print on rank 0 how many bytes were saved."""
    settings = from_text(os.environ[ENVIRONMENT])
    script, *arguments = sys.argv[1:]
    links = attach_everywhere(settings)
    report_when_ended(links)
    try:
        run_script(script, arguments, links)
    finally:
        if os.environ.get("RANK", "0") == "0":
            print("\n".join([summary(links), *left_apart(links)]), file=sys.stderr, flush=True)
        for link in links:
            with contextlib.suppress(Exception):
                link.close()


if __name__ == "__main__":
    main()
