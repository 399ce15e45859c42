"""Which files lead from weights at hand to the latest published ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gradwire.errors import PayloadError
from gradwire.publish.following import Following
from gradwire.publish.lossy import keeps_state
from gradwire.publish.manifest import Manifest, StepFiles


def rests_on_rounds(manifest: Manifest) -> bool:
    """Return whether a rounded patch can be decoded only by readers that have followed since an exact step."""
    return bool(manifest.lossy) and keeps_state(manifest.lossy)


def shortest_way(held: Following, manifest: Manifest, refused: Collection[str], full: bool) -> Sequence[StepFiles]:
    """Return the files that lead to the latest step with the fewest bytes.

    Args:
        held: The weights at hand; if they are the latest ones, they learn of which step they are.
        manifest: The files that there are.
        refused: Digests of files to avoid if there is another way.
        full: Whether to begin with an anchor, whatever is held.

    Raises:
        PayloadError: no files lead there.
    """
    stages = [stage.of_parts(held.parts) for stage in manifest.stages]
    latest, states, run = stages[-1].states, held.states, held.run.hex() if held.run is not None else None
    # A method counts its rounds: those whose patch changed nothing, too, and none of them twice.
    counted = run == manifest.run and rests_on_rounds(manifest) and not held.recognised
    later = [stage for stage in stages if not counted or stage.step > (held.step or 0)]
    if states == latest and not full and not (counted and later):
        held.claim(bytes.fromhex(manifest.run), manifest.step)
        return ()
    ways = [
        _chain(stages[place + 1 :], stage.states, [stage])
        for place, stage in enumerate(stages)
        if stage.kind == "anchor"
    ]
    # Without the patches before, what a method remembers of them is missing.
    lacking = held.recognised and rests_on_rounds(manifest)
    # Weights of another run may have the bytes of a step of this one; its patches are refused all the same.
    foreign = run not in (None, manifest.run)
    if states is not None and not full and not lacking and not foreign:
        ways.append(_chain(later, states, []))
    complete = [way for way in ways if way and way[-1].states == latest]
    if not complete:
        raise PayloadError(
            f"no files lead from step {held.step} to step {manifest.step}: the manifest lists {len(manifest.files)}, "
            "none an anchor from which patches follow on one another; the next anchor will mend it"
        )

    def cost(way: Sequence[StepFiles]) -> tuple[bool, int]:
        files = [file for stage in way for file in stage.files]
        return any(file.digest in refused for file in files), sum(file.nbytes for file in files)

    return min(complete, key=cost)


def _chain(stages: Sequence[StepFiles], states: tuple[str, ...], way: list[StepFiles]) -> list[StepFiles]:
    """Append to a way the patches that lead from states of the parts onwards."""
    for stage in stages:
        if stage.kind == "patch" and stage.base_states == states:
            way.append(stage)
            states = stage.states
    return way
