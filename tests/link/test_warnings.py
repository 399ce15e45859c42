"""A link warns once: on its lowest rank of what all know, and on the rank itself, by name, of what it alone knows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from gradwire.kernels.compiling import compile_time, compiling
from gradwire.link.failures import LONG_S, WarnOnce
from log_texts import LogTexts
from module_files import load_module
from ranks import Ranks


def test_one_rank_speaks_of_what_all_know_and_each_names_itself_in_what_it_alone_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for rank in (4, 2, 7):
        warnings = WarnOnce(rank, speaker=2)
        for _ in range(2):
            warnings.once("common", "all know")
            warnings.here("own", "my shard")
    assert caplog.messages == ["rank 4: my shard", "all know", "rank 2: my shard", "rank 7: my shard"]


def test_a_long_compilation_is_told_by_one_rank_and_a_short_one_by_none(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        WarnOnce(rank).compiled(LONG_S)
        WarnOnce(rank).compiled(12 * LONG_S)
    assert caplog.messages == [f"compiled kernels in {12 * LONG_S:.1f} s; they are kept on disk"]


def test_what_is_loaded_from_the_cache_takes_no_compile_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.py"
    path.write_text("import numba\n\n@numba.njit(cache=True)\ndef twice(x):\n    return 2 * x\n")
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    first, again = load_module(path), load_module(path)
    with compile_time() as compiled:
        assert first.twice(3) == 6
    with compile_time() as kept, compile_time() as outer:
        assert again.twice(3) == 6
    assert again.twice.stats.cache_hits
    assert compiled.seconds > 0
    assert kept.seconds == outer.seconds == 0
    with compile_time() as spent, compiling():
        pass
    assert spent.seconds > 0


def hybrid() -> list[str]:
    """Attach to a module with two replicas of two shards, so that two groups of ranks have a link each."""
    said = LogTexts()
    logging.getLogger("gradwire").addHandler(said)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = nn.Linear(100, 100)
    with torch.no_grad():
        module.weight.fill_(0.5)
        module.bias.fill_(0.5)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    gw.attach(module, "ef_signsgd", optimizer=optimizer).close()
    logging.getLogger("gradwire").removeHandler(said)
    return [text for text in said.texts if "compiled kernels" not in text]


@pytest.mark.ranks
def test_of_several_replica_groups_of_one_module_one_rank_warns(four_ranks: Ranks) -> None:
    first, *others = four_ranks(hybrid)
    assert len(first) == 1
    assert "SGD with momentum=0.9 carries too far" in first[0]
    assert others == [[], [], []]
