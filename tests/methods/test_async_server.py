"""AsyncServer: bounded staleness, nothing lost, and the synchronous method at staleness 0."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire.exchange.planning import Options
from gradwire.model.forecast import Scenario, forecast, recommend
from gradwire.model.gradients import values_of
from gradwire.model.machine import DEFAULT, LinkModel, connection_rate
from gradwire.model.profile import Profile, ReadyBucket, Timeline
from gradwire.model.schedule import Load
from gradwire.model.server import ServerProfile, server_time
from gradwire.seeds import worker_seed

D, WORKERS = 96, 4
SPEEDS = (1.0, 1.0, 2.0, 4.0)
SPARSE = "ErrorFeedback(TopK(density=0.25))"


class Quadratic:
    """Workers whose losses are |x - a_i|^2 / 2, trained by a server."""

    def __init__(
        self, spec: str, seconds: object = SPEEDS, lr: float = 0.2, spread: float = 1.0, seed: int = 0
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.optima = 1.0 + spread * torch.randn(WORKERS, D, generator=draw)
        self.x = torch.nn.Parameter(torch.zeros(D))
        self.optimizer = torch.optim.SGD([self.x], lr=lr)
        self.server = gw.SimulatedServer(
            [("x", self.x)], spec, seconds, optimizer=self.optimizer, min_numel=0, seed=seed,  # type: ignore[arg-type]
            world_size=WORKERS,
        )  # fmt: skip

    def train(self, pushes: int) -> list[gw.ServerTurn]:
        turns = []
        for turn in self.server.turns(pushes):
            self.x.grad = self.x.detach() - self.optima[turn.worker]
            turns.append(turn)
        return turns

    def distance(self, point: torch.Tensor) -> float:
        return float((self.x.detach() - point).norm() / point.norm())


@pytest.mark.parametrize("inner", ["FP32()", SPARSE, "EFSignSGD(block_size=32)"])
@pytest.mark.parametrize("seconds", [(1.0,) * WORKERS, SPEEDS, (3.0, 1.0, 2.0, 1.5)], ids=str)
def test_without_staleness_it_has_the_values_of_the_synchronous_method(inner: str, seconds: tuple[float, ...]) -> None:
    rounds, lr = 20, 0.2
    found = Quadratic(f"AsyncServer({inner}, staleness=0)", seconds, lr)
    turns = found.train(WORKERS * rounds)
    assert {turn.lead for turn in turns} == {0}
    link = gw.SimulatedLink([("x", torch.empty(D))], inner, WORKERS, min_numel=0)
    x, largest = torch.zeros(D), 0.0
    for _ in range(rounds):
        step = lr * link.reduce_(x - found.optima)
        x -= step
        largest = max(largest, float(x.abs().max()), float(step.abs().max()))
    # Each of N + 2 additions of a round rounds by at most half a unit, and the steps of a quadratic add none to that.
    bound = rounds * 4 * (WORKERS + 2) * 2.0**-24 * largest
    torch.testing.assert_close(found.x.detach(), x, rtol=0, atol=bound)


@pytest.mark.parametrize("inner", ["TernGrad(share_scaler=False)", SPARSE, "DIANA()", "EDEN(bits=2)"])
def test_workers_of_one_speed_have_the_bits_of_pushes_in_their_order(inner: str) -> None:
    found = Quadratic(f"AsyncServer({inner}, staleness=3)", (2.0,) * WORKERS)
    found.train(WORKERS * 6)
    links = [
        gw.SimulatedLink([("x", torch.empty(D))], inner, 1, min_numel=0, seed=worker_seed(0, worker))
        for worker in range(WORKERS)
    ]
    x = torch.nn.Parameter(torch.zeros(D))
    optimizer = torch.optim.SGD([x], lr=0.2)
    for _ in range(6):
        begin = x.detach().clone()
        for worker, link in enumerate(links):
            x.grad = link.reduce_((begin - found.optima[worker])[None]).clone() / WORKERS
            optimizer.step()
    assert torch.equal(found.x, x)


times = st.lists(st.floats(0.01, 10.0), min_size=WORKERS, max_size=WORKERS)


@settings(deadline=None, max_examples=60)
@given(times, st.integers(0, 5), st.lists(st.floats(0.1, 3.0), min_size=5, max_size=5))
def test_no_worker_begins_further_ahead_than_the_bound(
    seconds: list[float], staleness: int, wobble: list[float]
) -> None:
    def takes(worker: int, clock: int) -> float:
        return seconds[worker] * wobble[(3 * worker + clock) % len(wobble)]

    found = Quadratic(f"AsyncServer(FP32(), staleness={staleness})", takes)
    clocks = [0] * WORKERS
    turns = found.train(60)
    assert len(turns) == 60
    for turn in turns:
        assert turn.clock == clocks[turn.worker]
        assert 0 <= turn.lead <= staleness
        # What slower workers have pushed meanwhile makes the lead smaller, never larger.
        assert turn.clock - min(clocks) <= staleness
        clocks[turn.worker] += 1
        assert max(clocks) - min(clocks) <= staleness + 1
    assert found.server.clocks == tuple(clocks)
    assert all(a.time_s <= b.time_s for a, b in pairwise(turns))
    assert all(a.worker < b.worker for a, b in pairwise(turns) if a.time_s == b.time_s)
    assert sum(found.server.leads.values()) >= 60


def test_a_bound_makes_fast_workers_wait_and_none_lets_them_go_on() -> None:
    bounded, free = (Quadratic(f"AsyncServer(FP32(), staleness={bound})") for bound in (2, None))
    turns = bounded.train(200)
    assert max(turn.lead for turn in turns) == 2
    assert max(bounded.server.clocks) - min(bounded.server.clocks) <= 3
    assert bounded.server.waited_s[0] > 0 == bounded.server.waited_s[3]
    free.train(220)
    assert free.server.waited_s == (0.0,) * WORKERS
    # Speeds 1 : 1 : 1/2 : 1/4 for 80 seconds.
    assert free.server.clocks == (80, 80, 40, 20)
    assert free.server.time_s == 80.0


@settings(deadline=None, max_examples=30)
@given(times, st.sampled_from([0, 1, 4, None]), st.sampled_from([SPARSE, "EFSignSGD()", "OneBit()"]))
def test_what_was_pushed_and_the_residuals_are_the_sum_of_the_gradients(
    seconds: list[float], staleness: int | None, inner: str
) -> None:
    found = Quadratic(f"AsyncServer({inner}, staleness={staleness})", seconds, lr=1.0)
    draw, total, largest = torch.Generator().manual_seed(1), torch.zeros(D, dtype=torch.float64), 0.0
    for _ in found.server.turns(40):
        found.x.grad = torch.randn(D, generator=draw)
        total += found.x.grad.double()
        largest = max(largest, float(found.x.detach().abs().max()))
    states = [link.state_dict()["rank 0"] for link in found.server.links]
    residuals = sum(state["residual/x"].double() for state in states if state)
    pushed = -found.x.detach().double() * WORKERS
    # 40 pushes, each with a few roundings of values up to the largest sum.
    bound = 40 * 8 * 2.0**-24 * (WORKERS * largest + float(abs(residuals).max()) + 10)  # type: ignore[arg-type]
    torch.testing.assert_close(pushed + residuals, total, rtol=0, atol=bound)


@pytest.mark.parametrize("staleness", [0, 3, None])
@pytest.mark.parametrize("inner", ["FP32()", SPARSE, "EDEN(bits=4)"])
def test_workers_with_one_optimum_come_to_it(inner: str, staleness: int | None) -> None:
    found = Quadratic(f"AsyncServer({inner}, staleness={staleness})", spread=0.0, lr=0.3)
    found.train(400)
    assert found.distance(found.optima[0]) < 1e-5


def test_with_a_bound_unlike_workers_count_alike_and_without_one_by_their_speed() -> None:
    ends = {}
    for staleness in (3, None):
        found = Quadratic(f"AsyncServer({SPARSE}, staleness={staleness})", lr=0.04)
        found.train(1000)
        ends[staleness] = found
    even = ends[3].optima.mean(0)
    speeds = torch.tensor([1 / s for s in SPEEDS])
    uneven = (ends[None].optima * speeds[:, None]).sum(0) / speeds.sum()
    assert ends[3].distance(even) < 0.1 < ends[3].distance(uneven)
    assert ends[None].distance(uneven) < 0.1 < ends[None].distance(even)


@pytest.mark.parametrize("fetch", ["QSGDinf(block_size=32)", "TopK(density=0.25)", "BF16()"])
def test_fetches_by_compressed_changes_come_to_the_optimum_and_send_less(fetch: str) -> None:
    found = Quadratic(f"AsyncServer({SPARSE}, staleness=3, fetch={fetch})", spread=0.0, lr=0.1)
    found.train(600)
    assert found.distance(found.optima[0]) < 1e-4
    exact = Quadratic(f"AsyncServer({SPARSE}, staleness=3)").server
    assert found.server.fetch_bytes < exact.fetch_bytes
    assert found.server.push_bytes == exact.push_bytes
    assert found.server.received_bytes == 600 * exact.push_bytes


def test_a_push_that_is_not_finite_changes_nothing_but_the_clock() -> None:
    found = Quadratic(f"AsyncServer({SPARSE})")
    kept: list[torch.Tensor] = []
    for turn in found.server.turns(30):
        found.x.grad = torch.full((D,), 0.5)
        if found.server.pushes == 11:
            found.x.grad[3] = torch.inf
            residual = found.server.links[turn.worker].state_dict()["rank 0"]["residual/x"]
            kept = [residual, torch.tensor(turn.worker)]
        elif found.server.pushes == 12:
            assert torch.equal(found.server.links[int(kept[1])].state_dict()["rank 0"]["residual/x"], kept[0])
    assert found.server.skipped == 1
    assert bool(torch.isfinite(found.x).all())
    assert sum(found.server.clocks) == 30


def test_a_loop_that_is_left_leaves_the_servers_parameters_and_its_turn_comes_again() -> None:
    whole, parts = (Quadratic(f"AsyncServer({SPARSE}, staleness=3)") for _ in range(2))
    turns = whole.train(40)
    seen = []
    for pushes in (7, 40):
        for number, turn in enumerate(parts.server.turns(pushes)):
            if pushes == 40 and number == 33:
                break
            parts.x.grad = parts.x.detach() - parts.optima[turn.worker]
            seen.append(turn)
    assert seen == turns
    assert torch.equal(whole.x, parts.x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gw.AsyncServer(staleness=-1), "from 0 on, or None"),
        (lambda: gw.AsyncServer(staleness=True), "from 0 on, or None"),
        (lambda: gw.AsyncServer(gw.LocalSGD()), "whose outcome is a mean"),
        (lambda: gw.AsyncServer(gw.SignSGD()), "whose outcome is a mean"),
        (lambda: gw.AsyncServer(gw.AsyncServer()), "whose outcome is a mean"),
        (lambda: gw.AsyncServer(gw.DIANA(prox=gw.L1(strength=0.1))), "acts on an optimizer"),
        (lambda: gw.AsyncServer(fetch=gw.TernGrad()), "is no contraction"),
        (lambda: Quadratic("terngrad"), "put AsyncServer around it"),
        (lambda: Quadratic("AsyncServer()", (1.0, 0.0, 1.0, 1.0)).train(9), "a time above 0"),
        (lambda: Quadratic("AsyncServer()", (1.0,)), "there are 1 times"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(gw.GradwireError, match=reason):
        make()


def simulated_step(workers: int, compute_s: float, push_s: float, fetch_s: float, delay_s: float, wait: bool) -> float:
    """Return the time of a step of workers whose pushes and fetches queue at the server's link, in the long run."""
    up_s = down_s = 0.0
    ready = [(compute_s + delay_s, worker) for worker in range(workers)]
    heapq.heapify(ready)
    ends, held, steps = [0.0], [], 400
    for _ in range(steps * workers):
        time_s, worker = heapq.heappop(ready)
        up_s = max(up_s, time_s) + push_s
        held.append((up_s, worker))
        if wait and len(held) < workers:
            continue
        begin_s = max(pushed for pushed, _ in held)
        for pushed_s, who in held:
            down_s = max(down_s, begin_s if wait else pushed_s) + fetch_s
            heapq.heappush(ready, (down_s + 2 * delay_s + compute_s, who))
        held = []
        ends.append(begin_s)
    turns = len(ends) // 2
    return (ends[-1] - ends[turns]) / (len(ends) - 1 - turns) * (1 if wait else workers)


@pytest.mark.parametrize("staleness", [0, 1, None])
@pytest.mark.parametrize(
    ("push_bytes", "fetch_bytes", "rate", "delay_s"),
    [(10_000, 400_000, 1e7, 0.001), (10_000, 400_000, 1e9, 0.02), (300_000, 100_000, 1e7, 0.0), (1, 1, 1e9, 0.0)],
)
def test_the_predicted_step_is_that_of_a_queue_at_the_servers_link(
    staleness: int | None, push_bytes: int, fetch_bytes: int, rate: float, delay_s: float
) -> None:
    timeline = Timeline(forward_s=0.02, buckets=(), backward_s=0.03, after_s=0.0)
    profile = ServerProfile("", 8, staleness, push_bytes, fetch_bytes, codec_s=0.0)
    link = LinkModel(bandwidth_bytes_per_s=rate, latency_s=delay_s)
    found = server_time(timeline, profile, link=link, load=Load(ranks=1, cores=2))
    wanted = simulated_step(8, 0.05, push_bytes / rate, fetch_bytes / rate, delay_s, wait=staleness == 0)
    assert found.step_s == pytest.approx(wanted, rel=0.01)
    assert found.floor_s == max(0.05, 8 * max(push_bytes, fetch_bytes) / rate)


@pytest.mark.parametrize(
    ("codec_s", "step_s", "bottleneck"), [(0.02, 0.16, "codec and collectives"), (0.0, 0.05, "compute")]
)
def test_a_server_that_decodes_all_the_time_is_said_to_bound_the_step(
    codec_s: float, step_s: float, bottleneck: str
) -> None:
    timeline = Timeline(forward_s=0.02, buckets=(), backward_s=0.03, after_s=0.0)
    profile = ServerProfile("", 8, 1, 1, 1, codec_s=codec_s)
    link = LinkModel(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    found = server_time(timeline, profile, link=link, load=Load(ranks=1, cores=2))
    assert found.step_s == pytest.approx(step_s, rel=1e-4)
    assert found.bottleneck == bottleneck


@pytest.mark.parametrize("staleness", [0, 1, None])
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_the_predicted_step_grows_with_the_packets_that_are_lost(staleness: int | None, delay_s: float) -> None:
    timeline = Timeline(forward_s=0.02, buckets=(), backward_s=0.03, after_s=0.0)

    def step_s(loss: float, rate: float | None = 1e7, push_bytes: int = 100_000) -> float:
        profile = ServerProfile("", 8, staleness, push_bytes, 400_000, codec_s=0.0)
        link = LinkModel(bandwidth_bytes_per_s=rate, latency_s=delay_s, loss=loss)
        return server_time(timeline, profile, link=link, load=Load(ranks=1, cores=2)).step_s

    for rate in (1e7, 1e9, None):
        taken = [step_s(loss, rate) for loss in (0.0, 0.001, 0.01, 0.1)]
        if rate == 1e7 and staleness != 0 and not delay_s:
            # The link is busy with other workers' bytes while one waits for its packets.
            assert taken[:3] == [8 * 400_000 / 1e7] * 3
        else:
            assert taken == sorted(set(taken))
    if delay_s:
        # A connection alone, far below the link's rate, and a probe for each message that loses its last packet.
        slow_s = 500_000 / connection_rate(delay_s, 0.01)
        timeout_s = (4 * delay_s + 0.008) * (2 * (1 - 0.99**8) if staleness == 0 else 2 * 0.01)
        assert step_s(0.01, None) == pytest.approx(0.05 + 2 * delay_s + slow_s + timeout_s)


def test_a_plan_counts_all_workers_bytes_at_the_server_and_does_not_recommend_it() -> None:
    spec = f"AsyncServer({SPARSE}, staleness=3)"
    buckets = (ReadyBucket(names=("w",), numel=5000, ready_s=0.01),)
    timeline = Timeline(forward_s=0.01, buckets=buckets, backward_s=0.02, after_s=0.0)
    profile = Profile(source="one matrix", parameters={"w": ((100, 50), (50, 1))}, timeline=timeline)
    found = {}
    for method in (spec, spec.replace("3)", "3, fetch=TopK(density=0.25))"), f"AsyncServer({SPARSE}, staleness=None)"):
        setting = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e6))
        rows, refused = forecast(profile, [method], setting, DEFAULT, repeats=1)
        assert not refused
        assert recommend(rows)[0] != method
        found[method] = rows[1]
        assert rows[1].apart is not None
        assert (rows[1].delays, rows[1].exchange_every, rows[1].world_size) == (2.0, 1, 4)
    whole, sparse, free = found.values()
    # Each of four workers fetches 5000 float32 in a step; at 1 MB/s that is the floor.
    assert (whole.sent_bytes, whole.bottleneck) == (80_000, "link")
    assert whole.step_s >= whole.floor_s == pytest.approx(0.08)
    assert sparse.sent_bytes < whole.sent_bytes == free.sent_bytes
    assert "3 steps apart" in str(whole.apart)
    assert "any number of steps apart" in str(free.apart)


def profile_of(gradients: dict[str, torch.Tensor]) -> Profile:
    bucket = ReadyBucket(names=tuple(gradients), numel=sum(g.numel() for g in gradients.values()), ready_s=0.01)
    return Profile(
        source="some gradients",
        parameters={name: (tuple(g.shape), g.stride()) for name, g in gradients.items()},
        timeline=Timeline(forward_s=0.01, buckets=(bucket,), backward_s=0.02, after_s=0.0),
        gradients={name: values_of(g) for name, g in gradients.items()},
    )


def planned_bytes(spec: str, gradients: dict[str, torch.Tensor], **options: object) -> int:
    """Return the bytes at a server of one worker, in the direction that carries more."""
    setting = Scenario(hosts=2, link=LinkModel(bandwidth_bytes_per_s=1e6))
    rows, refused = forecast(profile_of(gradients), [spec], setting, DEFAULT, Options(**options), repeats=1)  # type: ignore[arg-type]
    assert not refused
    return rows[1].sent_bytes // 2


@pytest.mark.parametrize("options", [{}, {"min_numel": 0}, {"min_numel": 5000}, {"exclude": "w"}])
@pytest.mark.parametrize("inner", [SPARSE, "EDEN(bits=4)"])
def test_a_plan_counts_the_bytes_of_a_server_with_its_options(inner: str, options: dict[str, object]) -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = {"w": torch.randn(64, 64, generator=draw), "b": torch.randn(64, generator=draw)}
    # Fetches have fewer bytes than pushes.
    spec = f"AsyncServer({inner}, fetch=TopK(density=0.01))"
    parameters = {name: torch.nn.Parameter(torch.zeros_like(g)) for name, g in gradients.items()}
    server = gw.SimulatedServer(
        parameters.items(), spec, (1.0, 1.0), optimizer=torch.optim.SGD(parameters.values(), lr=0.1), **options
    )
    # Payloads of sparse methods are a little shorter than the server's bound.
    assert 0.98 * server.push_bytes <= planned_bytes(spec, gradients, **options) <= server.push_bytes


def test_a_plan_of_a_server_counts_what_a_coder_makes_of_the_profiled_gradients() -> None:
    spec = "AsyncServer(Coded(TernGrad(share_scaler=False)), fetch=TopK(density=0.001))"
    draw = torch.Generator().manual_seed(0)
    gradients = {"w": torch.randn(128, 128, generator=draw) ** 9}
    link = gw.SimulatedLink([("w", torch.empty(128, 128))], "Coded(TernGrad(share_scaler=False))", 2)
    for _ in range(4):
        link.reduce_(gradients["w"].reshape(1, -1).repeat(2, 1))
    sent = link.traffic(0).sent_bytes / 4
    assert planned_bytes(spec, gradients) == pytest.approx(sent, rel=0.1)
    normal = {"w": torch.randn(128, 128, generator=draw)}
    assert planned_bytes(spec, normal) > 1.5 * sent
