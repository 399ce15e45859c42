"""The commands ``gradwire publish``, ``subscribe`` and ``patch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.tools.cli import options as o
from gradwire.tools.cli.show import handled

patch = typer.Typer(no_args_is_help=True, help="Files of published weights.")


def publish(
    source: Annotated[
        Path,
        typer.Option(
            "--from", metavar="CHECKPOINTS", help="Safetensors or torch.distributed.checkpoint: a folder, or its parent"
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="URL", help="A folder, or a URL such as s3://bucket/run")],
    anchor_every: Annotated[
        int, typer.Option(help="Steps published from one anchor, the whole weights, to the next")
    ] = 50,
    keep_anchors: Annotated[int, typer.Option(help="Anchors to keep; older files are removed")] = 2,
    strips: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES=DIMENSION/NUMBER",
            help="Cut tensors for readers that hold shards, such as '*down_proj.weight=1/8'; may be repeated",
        ),
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            metavar="FILE|sums",
            help="Where the weights of the step before are kept: in memory, in a mapped file of their size, or as sums "
            "of their blocks, of which changed ones are sent whole",
        ),
    ] = "memory",
    lossy: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Round differences, such as 'EDEN(bits=4)'; anchors stay exact"),
    ] = None,
    watch: o.Watch = False,
    every: o.Every = 2.0,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Publish checkpoints: what changed since the one before, bit by bit, in about 9 bits a changed element.

    A folder whose folders' names end with a step, such as checkpoint-500, is published step by step.

    Example: [cyan]gradwire publish --from checkpoints --to s3://bucket/run --watch[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import publish_commands

        publish_commands.publish(
            source,
            to,
            anchor_every=anchor_every,
            keep_anchors=keep_anchors,
            strips=strips or [],
            base=base,
            lossy=lossy,
            watch=watch,
            every_s=every,
            as_json=as_json,
        )


def subscribe(
    source: Annotated[
        str, typer.Option("--from", metavar="URL", help="What gradwire publish, or a trainer, writes to")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder of model.safetensors, or such a file")],
    relay: Annotated[
        str | None, typer.Option(metavar="URL", help="Serve others, from this folder or URL, with what was checked")
    ] = None,
    lossy: Annotated[bool, typer.Option(help="Follow a publisher that rounds differences, too")] = False,
    watch: o.Watch = False,
    every: o.Every = 2.0,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Follow published weights: fetch patches, or an anchor, check them, and replace the file at once.

    Example: [cyan]gradwire subscribe --from s3://bucket/run --to weights --watch[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import publish_commands

        publish_commands.subscribe(source, to, relay=relay, lossy=lossy, watch=watch, every_s=every, as_json=as_json)


@patch.command("show")
def patch_show(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Anchors and patches")],
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Show what anchors and patches are: run, step, the step that a patch starts from, bytes, changes, rounding.

    Example: [cyan]gradwire patch show published/patch-*.gww[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import publish_commands

        publish_commands.show_patch(files, as_json=as_json)
