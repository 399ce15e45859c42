"""``save`` and ``load`` on real ranks: a folder holds one whole state or says that it does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw

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


def cut_a_save_short(folder: str) -> tuple[bool, bool, list[str], str]:
    """Save, then fail where ``common.pt`` is written; give whether what loads is the earlier state, bit for bit."""
    import torch.distributed as dist

    from gradwire.runtime import checkpoint

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


def load_files_without_a_number(folder: str) -> bool:
    import torch.distributed as dist

    parameter, link = make()
    go(parameter, link, 2)
    state = link.state_dict()
    torch.save({"rank": state.pop("rank")}, Path(folder) / f"rank-{link.rank}.pt")
    if link.rank == 0:
        torch.save({"world_size": {"value": torch.tensor(3)}, **state}, Path(folder) / "common.pt")
    dist.barrier()
    expected = go(parameter, link, 2)
    gw.load(link, folder)
    found = go(parameter, link, 2)
    link.close()
    return torch.equal(found, expected)


def test_a_folder_of_before_saves_had_numbers_still_loads(three_ranks: Any, tmp_path: Path) -> None:
    assert all(three_ranks(load_files_without_a_number, str(tmp_path)))
