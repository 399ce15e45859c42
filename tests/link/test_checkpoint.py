"""``save`` and ``load`` on real ranks: a folder holds one whole state or says that it does not."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.digests import pack, unpack
from ranks import fresh_ranks, wait_until_watched

pytestmark = pytest.mark.ranks

SIZE = 300


def make(method: str = "diana") -> tuple[torch.nn.Parameter, gw.Link]:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    return parameter, gw.Link([("w", parameter)], method, min_numel=0)


def go(parameter: torch.nn.Parameter, link: gw.Link, rounds: int, bad: bool = False) -> torch.Tensor:
    """Exchange rounds of gradients that depend on rank and round; give the last mean."""
    for _ in range(rounds):
        draw = torch.Generator().manual_seed(1000 * link.round + link.rank)
        parameter.grad = torch.randn(SIZE, generator=draw)
        if bad:
            parameter.grad[3] = torch.nan
        link.reduce_()
    return parameter.grad.clone()


def refusal(build: Any) -> str:
    try:
        build()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def load_a_torn_folder(first: str, second: str) -> tuple[str, int]:
    import torch.distributed as dist

    parameter, link = make()
    go(parameter, link, 2)
    gw.save(link, first)
    go(parameter, link, 2)
    gw.save(link, second)
    dist.barrier()
    if link.rank == 0:
        shutil.copy(Path(first) / "common.pt", Path(second) / "common.pt")
    dist.barrier()
    found = refusal(lambda: gw.load(link, second))
    link.close()
    return found, link.round


def test_files_of_two_saves_are_refused(three_ranks: Any, tmp_path: Path) -> None:
    found = three_ranks(load_a_torn_folder, str(tmp_path / "a"), str(tmp_path / "b"))
    assert found[0] == found[1] == found[2]
    sentence, round = found[0]
    assert sentence.startswith("IncompatibleError: rank 0: ")
    assert "copy such a folder whole" in sentence
    assert round == 4


def save_apart(folder: str) -> tuple[str, list[str]]:
    """Save to a folder of all ranks, and to one of each rank's own; return the error of that, and what it left."""
    from gradwire.link import checkpoint

    checkpoint.SEEN_S, before = 0.0, checkpoint.SEEN_S
    parameter, link = make()
    go(parameter, link, 1)
    own = Path(folder, f"machine-{link.rank}")
    found = [refusal(lambda to=to: gw.save(link, to)) for to in (Path(folder, "shared"), own)]
    found.append(refusal(lambda: gw.load(link, Path(folder, "shared"))))
    link.close()
    checkpoint.SEEN_S = before
    assert found[0] == found[2] == "nothing was refused"
    return found[1], sorted(path.name for path in own.iterdir())


def test_folders_that_ranks_do_not_share_are_refused_by_save(three_ranks: Any, tmp_path: Path) -> None:
    for told, files in three_ranks(save_apart, str(tmp_path)):
        assert told.startswith("IncompatibleError: rank 0: ")
        assert "machine-0/rank-1-" in told
        assert "which rank 1 has written, is not seen here: give a folder that all ranks share" in told
        assert files == []


def cut_a_save_short(folder: str) -> tuple[bool, bool, list[str], str]:
    """Save, then fail where ``common.pt`` is written; give whether what loads is the earlier state, bit for bit."""
    import torch.distributed as dist

    from gradwire.link import checkpoint

    parameter, link = make()
    go(parameter, link, 2)
    gw.save(link, folder)
    before = link.state_dict()
    expected = go(parameter, link, 3)
    real = checkpoint.write_atomically

    def full(value: object, path: Path) -> None:
        if path.name == "common.pt":
            raise gw.GradwireError("the disk is full")
        real(value, path)

    checkpoint.write_atomically = full
    try:
        sentence = refusal(lambda: gw.save(link, folder))
    finally:
        checkpoint.write_atomically = real
    gw.load(link, folder)
    after = link.state_dict()
    same = all(torch.equal(after[scope][key], before[scope][key]) for scope in before for key in before[scope])
    continued = torch.equal(go(parameter, link, 3), expected)
    for _ in range(2):
        gw.save(link, folder)
    dist.barrier()
    names = sorted(path.name.split("-")[0] for path in Path(folder).iterdir())
    dist.barrier()
    link.close()
    return same, continued, names, sentence


def test_a_save_that_ends_halfway_leaves_the_one_before(three_ranks: Any, tmp_path: Path) -> None:
    for same, continued, names, sentence in three_ranks(cut_a_save_short, str(tmp_path)):
        assert same
        assert continued
        assert names == ["common.pt", "rank", "rank", "rank"]
        assert sentence == "IncompatibleError: rank 0: the disk is full"


def end_in_a_save(folder: str, is_written: bool) -> str:
    """Kill rank 2 in its second save, after rank 0 has written ``common.pt`` or before; return what that raises."""
    from gradwire.link import checkpoint

    parameter, link = make()
    go(parameter, link, 2)
    gw.save(link, folder)
    go(parameter, link, 2)
    wait_until_watched()
    if link.rank == 2:
        real, common, gathers = checkpoint._tell, Path(folder) / "common.pt", []
        before = common.read_bytes()

        def end_in_a_gather(*given: Any) -> list[tuple[int, bytes]]:
            gathers.append(given)
            # The second gather follows the ranks' files, and the third common.pt.
            if len(gathers) < 2 + is_written:
                return real(*given)
            while is_written and common.read_bytes() == before:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        checkpoint._tell = end_in_a_gather  # type: ignore[assignment]
    return refusal(lambda: gw.save(link, folder))


def go_on_and_save(folder: str) -> tuple[int, bool, list[str]]:
    """Load; return the round, whether the next means are those of a training that never ended, and a save's files."""
    import torch.distributed as dist

    parameter, link = make()
    gw.load(link, folder)
    round = link.round
    mean = go(parameter, link, 2)
    gw.save(link, folder)
    dist.barrier()
    names = sorted(path.name.split("-")[0] for path in Path(folder).iterdir())
    link.close()
    parameter, link = make()
    same = torch.equal(mean, go(parameter, link, round + 2))
    link.close()
    return round, same, names


@pytest.mark.parametrize(("is_written", "round"), [(False, 2), (True, 4)])
def test_a_rank_lost_in_a_save_leaves_a_whole_one(
    three_ranks: Any, tmp_path: Path, is_written: bool, round: int
) -> None:
    """The former save, or the new one once ``common.pt`` names it; the next save removes all other files."""
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        ranks.start(end_in_a_save, str(tmp_path), is_written)
        *survivors, (gone, _) = ranks.collect(60)
    assert gone == "gone"
    for kind, sentence in survivors:
        assert kind == "ok", sentence
        assert sentence.startswith("ExchangeError: ")
    assert three_ranks(go_on_and_save, str(tmp_path)) == [(round, True, ["common.pt", "rank", "rank", "rank"])] * 3


def load_files_without_digests(folder: str) -> str:
    import torch.distributed as dist

    parameter, link = make()
    go(parameter, link, 2)
    state = link.state_dict()
    torch.save({"rank": state.pop("rank")}, Path(folder) / f"rank-{link.rank}.pt")
    if link.rank == 0:
        torch.save({"world_size": {"value": torch.tensor(3)}, **state}, Path(folder) / "common.pt")
    dist.barrier()
    found = refusal(lambda: gw.load(link, folder))
    link.close()
    return found


def test_files_without_digests_are_refused(three_ranks: Any, tmp_path: Path) -> None:
    for found in three_ranks(load_files_without_digests, str(tmp_path)):
        assert "common.pt carries no digest" in found


def load_changed_files(folder: str) -> dict[str, str]:
    """Save once; then change one file at a time, in several ways, and return what loading says on this rank."""
    import torch.distributed as dist

    parameter, link = make()
    go(parameter, link, 2)
    gw.save(link, folder)
    dist.barrier()
    files = {path.name.split("-0")[0]: path for path in sorted(Path(folder).iterdir())}
    ranks = sorted(path for path in files.values() if path.name.startswith("rank-"))
    whole = {path: path.read_bytes() for path in files.values()}
    found = {}

    def attempt(name: str, changed: dict[Path, bytes]) -> None:
        dist.barrier()
        if link.rank == 0:
            for path, data in changed.items():
                path.write_bytes(data)
        dist.barrier()
        found[name] = refusal(lambda: gw.load(link, folder))
        dist.barrier()
        if link.rank == 0:
            for path in changed:
                path.write_bytes(whole[path])

    for path in (Path(folder) / "common.pt", ranks[1]):
        data = whole[path]
        # Within the tensors, where a reader of zip files looks at nothing.
        for share in (0.3, 0.5, 0.7):
            at = int(share * len(data))
            attempt(f"{path.name[:6]} flipped {share}", {path: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]})
        middle = len(data) // 2
        attempt(f"{path.name[:6]} zeroed", {path: data[:middle] + bytes(64) + data[middle + 64 :]})
        swapped = data[: middle - 64] + data[middle : middle + 64] + data[middle - 64 : middle] + data[middle + 64 :]
        attempt(f"{path.name[:6]} swapped", {path: swapped})
        attempt(f"{path.name[:6]} cut", {path: data[: len(data) - 100]})
    attempt("exchanged", {ranks[0]: whole[ranks[1]], ranks[1]: whole[ranks[0]]})
    dist.barrier()
    gw.load(link, folder)  # what was put back loads
    rounds = link.round
    link.close()
    return {**found, "round": str(rounds)}


def test_a_file_that_changed_on_disk_is_refused_by_all_ranks(three_ranks: Any, tmp_path: Path) -> None:
    answers = three_ranks(load_changed_files, str(tmp_path))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].pop("round") == "2"
    assert len(answers[0]) == 13
    for name, sentence in answers[0].items():
        assert sentence.startswith("IncompatibleError: rank "), (name, sentence)
        assert "common.pt" in sentence or "rank-" in sentence, (name, sentence)


def load_a_part_that_one_rank_cannot_take(folder: str) -> tuple[str, int]:
    import torch.distributed as dist

    parameter, link = make()
    state_dict = link.state_dict

    def forged() -> dict[str, dict[str, torch.Tensor]]:
        state = state_dict()
        if link.rank == 1:
            state["rank"]["shift/w"] = torch.zeros(SIZE + 1)
        return state

    link.state_dict = forged  # type: ignore[method-assign]
    gw.save(link, folder)
    go(parameter, link, 2)
    dist.barrier()
    found = refusal(lambda: gw.load(link, folder))
    link.close()
    return found, link.round


def test_what_one_rank_refuses_no_rank_takes(three_ranks: Any, tmp_path: Path) -> None:
    for found, round in three_ranks(load_a_part_that_one_rank_cannot_take, str(tmp_path)):
        assert found.startswith("IncompatibleError: rank 1: the state's 'shift/w' in 'rank'")
        assert round == 2, "a rank went back to the round of a state that another refused"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("world_size", "value", torch.tensor(0)),
        ("world_size", "value", torch.tensor(-3)),
        ("world_size", "value", torch.tensor(2.5)),
        ("save", "number", torch.tensor(-1)),
    ],
)
def test_a_manifest_with_numbers_that_cannot_be_is_refused(
    three_ranks: Any, tmp_path: Path, section: str, key: str, value: torch.Tensor
) -> None:
    for sentence in three_ranks(load_a_forged_manifest, str(tmp_path), section, key, value):
        assert "a whole number from" in sentence


def load_a_forged_manifest(folder: str, section: str, key: str, value: torch.Tensor) -> str:
    import torch.distributed as dist

    parameter, link = make()
    go(parameter, link, 1)
    gw.save(link, folder)
    dist.barrier()
    path = Path(folder) / "common.pt"
    if link.rank == 0:
        common = unpack(torch.load(path, weights_only=True), "common.pt")
        common[section][key] = value
        torch.save(pack(common)[0], path)
    dist.barrier()
    found = refusal(lambda: gw.load(link, folder))
    link.close()
    return found


def test_a_state_is_read_where_its_device_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        # As torch.save marks tensors of the eighth GPU.
        there.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        packed, _ = pack({"rank": {"residual/w": torch.arange(5.0)}})
    found = unpack(packed, "rank-7.pt")["rank"]["residual/w"]
    assert found.device.type == "cpu"
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
