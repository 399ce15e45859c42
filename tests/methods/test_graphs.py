"""Graphs of workers: their weights, the order of messages, and files that describe them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.methods.gossip.graphs import GRAPHS, MixingMatrix, graph_of, metropolis_hastings, rounds


def edges_of(graph: MixingMatrix) -> set[tuple[int, int]]:
    return {(i, j) for i in range(graph.workers) for j in graph.neighbours(i) if i < j}


@pytest.mark.parametrize("name", ["ring", "torus", "exponential"])
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 8, 9, 12, 16])
def test_weights_are_symmetric_and_doubly_stochastic(name: str, workers: int) -> None:
    if name == "torus" and workers in (2, 3, 5):
        with pytest.raises(gw.IncompatibleError, match=f"{workers} workers make no rectangle"):
            graph_of(name, workers)
        return
    graph = graph_of(name, workers)
    assert torch.equal(graph.weights, graph.weights.T)
    # Sums of at most nine numbers below 1.
    assert torch.allclose(graph.weights.sum(1), torch.ones(workers).double(), rtol=0, atol=9 * 2**-53)
    assert float(graph.weights.min()) >= 0
    assert float(graph.weights.diagonal().min()) > 0
    assert graph.second_eigenvalue < 1


def test_named_graphs_are_what_their_names_say() -> None:
    assert edges_of(graph_of("ring", 5)) == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert graph_of("ring", 8).weight(0, 1) == pytest.approx(graph_of("ring", 8).weight(0, 0)) == pytest.approx(1 / 3)
    assert graph_of("ring", 2).weight(0, 1) == 0.5
    # Two rows of three: left and right, and the other row.
    assert graph_of("torus", 6).neighbours(1) == (0, 2, 4)
    assert graph_of("torus", 9).neighbours(4) == (1, 3, 5, 7)
    assert graph_of("exponential", 8).neighbours(0) == (1, 2, 4, 6, 7)
    assert graph_of("exponential", 5).neighbours(0) == (1, 2, 3, 4)
    # The eigenvalues of a ring with equal weights are (1 + 2 cos(2 pi k / N)) / 3.
    assert graph_of("ring", 8).second_eigenvalue == pytest.approx((1 + 2**0.5) / 3, abs=1e-12)


@given(st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda pair: pair[0] != pair[1])))
def test_messages_meet_in_the_fewest_rounds(messages: set[tuple[int, int]]) -> None:
    to, source = rounds(messages, 9)
    most = max((sum(pair[side] == rank for pair in messages) for side in (0, 1) for rank in range(9)), default=0)
    assert {len(row) for row in (*to, *source)} == {most}
    found = [(sender, receiver) for sender, row in enumerate(to) for receiver in row if receiver is not None]
    assert sorted(found) == sorted(messages)
    for sender, row in enumerate(to):
        for number, receiver in enumerate(row):
            assert receiver is None or source[receiver][number] == sender


def test_both_ends_of_a_message_have_it_in_the_same_round() -> None:
    graph = graph_of("exponential", 7)
    moves = [graph.moves(rank) for rank in range(7)]
    heard: list[tuple[int | None, int]] = []
    for number in range(len(moves[0])):
        for rank in range(7):
            to = moves[rank][number].to
            assert to is None or moves[to][number].source == rank
            heard.append((moves[rank][number].source, rank))
    assert sorted(pair for pair in heard if pair[0] is not None) == sorted(  # type: ignore[type-var]
        (j, i) for i in range(7) for j in graph.neighbours(i)
    )


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    return str(path)


def test_a_file_without_weights_has_those_of_metropolis_and_hastings(tmp_path: Path) -> None:
    """A star with a tail: the weight of an edge is 1 / (1 + the larger number of neighbours)."""
    graph = graph_of(written(tmp_path, "# a star\n2 0\n1 2   # and back\n\n2 1\n2 3\n3 4\n"), 5)
    assert edges_of(graph) == {(0, 2), (1, 2), (2, 3), (3, 4)}
    expected = {(0, 2): 1 / 4, (1, 2): 1 / 4, (2, 3): 1 / 4, (3, 4): 1 / 3}
    assert {edge: graph.weight(*edge) for edge in expected} == expected
    assert metropolis_hastings(set(expected), 5) == expected
    assert graph.weight(0, 0) == 0.75
    assert graph.second_eigenvalue < 1


def test_a_file_may_state_weights(tmp_path: Path) -> None:
    graph = graph_of(written(tmp_path, "0 1 0.5\n1 2 0.25\n2 1 0.25\n"), 3)
    assert graph.weights.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]


@pytest.mark.parametrize(
    ("text", "workers", "told"),
    [
        ("0 1\n1 two\n", 3, r"graph.txt, line 2: '1 two' is not 'i j' or 'i j weight'"),
        ("0 1 0.5 1\n", 3, r"line 1: .* is not"),
        ("0 3\n", 3, r"line 1: there is no worker 3: 3 workers are 0 to 2"),
        ("0 -1\n", 3, r"there is no worker -1"),
        ("0 0\n", 3, r"a worker's own weight is what its edges leave of 1"),
        ("0 1 0\n", 2, r"a weight is above 0 and at most 1, not 0"),
        ("0 1 nan\n", 2, r"a weight is above 0 and at most 1, not nan"),
        ("0 1\n0 1\n", 2, r"line 2: the edge from worker 0 to worker 1 is there already"),
        (
            "0 1 0.3\n1 0 0.4\n",
            2,
            r"line 2: the weights are not symmetric: 0.4 from worker 1 to worker 0, and 0.3 back",
        ),
        ("0 1 0.3\n1 2\n", 3, r"the edge between workers 1 and 2 has no weight, and others have one"),
        ("0 1 0.7\n1 2 0.7\n", 3, r"the weights of worker 1 add up to 1.4: rows of a doubly stochastic matrix"),
        ("0 1\n2 3\n", 4, r"no path leads from worker 0 to worker 2"),
        ("", 2, r"no path leads from worker 0 to worker 1"),
        ("0 1 1\n", 2, r"swap their parameters for ever"),
        ("0 1 2e-10\n", 2, r"hardly become smaller .*: use larger weights"),
        ("0 1 0.5\n1 2 0.5\n2 3 0.5\n3 0 0.5\n", 4, r"swap their parameters for ever"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_line(tmp_path: Path, text: str, workers: int, told: str) -> None:
    with pytest.raises(gw.IncompatibleError, match=told):
        graph_of(written(tmp_path, text), workers)


def test_a_single_worker_has_no_neighbour_in_any_graph(tmp_path: Path) -> None:
    """After an elastic restart the graph is still the one that was asked for."""
    for name in (*GRAPHS, written(tmp_path, "0 1\n1 2\n")):
        assert graph_of(name, 1).neighbours(0) == ()
        assert graph_of(name, 1).weights.tolist() == [[1.0]]
    with pytest.raises(gw.IncompatibleError, match="no file that can be read"):
        graph_of("rign", 1)


def test_a_byte_order_mark_is_no_edge(tmp_path: Path) -> None:
    assert edges_of(graph_of(written(tmp_path, "\ufeff0 1\n"), 2)) == {(0, 1)}


def test_a_link_reads_its_graph_once(tmp_path: Path) -> None:
    """What the ranks have compared is what they exchange by, whatever becomes of the file."""
    workers = [torch.nn.Parameter(torch.full((3,), 4.0 * rank)) for rank in range(2)]
    name = written(tmp_path, "0 1 0.25\n")
    link = gw.SimulatedLocalSteps([[("x", x)] for x in workers], gw.DPSGD(graph=name))
    written(tmp_path, "0 1 0.5\n")
    link.after_step()
    assert [x[0].item() for x in workers] == [1.0, 3.0]
    Path(name).unlink()
    state = link.state_dict()
    # Random numbers of another link: all plans are made anew.
    link.load_state_dict(state | {"global": state["global"] | {"link": torch.tensor(3)}})
    link.after_step()
    assert [x[0].item() for x in workers] == [1.5, 2.5]


def test_neither_a_name_nor_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gw.IncompatibleError, match="'rign' is none of ring, torus, exponential, and no file"):
        graph_of("rign", 4)
    with pytest.raises(gw.IncompatibleError, match="no file that can be read"):
        graph_of(str(tmp_path), 4)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev", "pipe"])
def test_a_device_a_folder_or_a_pipe_is_no_graph(tmp_path: Path, name: str) -> None:
    if name == "pipe":
        name = str(tmp_path / name)
        os.mkfifo(name)
    with pytest.raises(gw.HyperparameterError, match="or the path to a file, not"):
        gw.DPSGD(graph=name)
    with pytest.raises(gw.IncompatibleError, match="it is a folder, a device or a pipe"):
        graph_of(name, 4)


def test_a_file_too_large_and_a_name_of_no_file_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((1 << 24) + 1)
    with pytest.raises(gw.IncompatibleError, match="it has more than 16777216 bytes"):
        graph_of(str(large), 4)
    for name in ("\0", "x" * 5000):
        with pytest.raises(gw.IncompatibleError, match="no file that can be read"):
            graph_of(gw.DPSGD(graph=name).graph, 4)


def test_a_digest_tells_graphs_apart(tmp_path: Path) -> None:
    ring = graph_of(written(tmp_path, "0 1\n1 2\n2 3\n3 0\n"), 4)
    assert ring.digest() == graph_of("ring", 4).digest()
    others = [graph_of("ring", 5), graph_of("torus", 4), graph_of(written(tmp_path, "0 1\n1 2\n2 3\n"), 4)]
    assert len({ring.digest(), *(other.digest() for other in others)}) == 4
