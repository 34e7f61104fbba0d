"""What rows say when put together: best peers, goals, straight lines."""

import pytest

from splitkv.bench.summary import bandwidth_share, best_peer, fit_line, goal_met, goal_us, groups, peers, speedup

ROW = {
    "floor_us": 20.0,
    "us": {"splitkv": 22.0, "fast-and-rough": 21.0, "slow": 44.0},
    "err": {"splitkv": 1e-3, "fast-and-rough": 4.1e-3, "slow": 3.9e-3},
}


def test_peers_come_fastest_first_and_the_rough_are_marked() -> None:
    assert [(peer.name, peer.rough) for peer in peers(ROW)] == [("fast-and-rough", True), ("slow", False)]


def test_the_best_peer_may_be_asked_to_be_accurate() -> None:
    best, accurate = best_peer(ROW), best_peer(ROW, accurate=True)
    assert best is not None and best.name == "fast-and-rough"
    assert accurate is not None and accurate.name == "slow"
    assert speedup(ROW) == pytest.approx(21 / 22) and speedup(ROW, accurate=True) == pytest.approx(2)


def test_a_row_alone_has_no_peer_and_no_speed_up() -> None:
    row = {"floor_us": 20.0, "us": {"splitkv": 22.0}, "err": {"splitkv": 1e-3}}
    assert best_peer(row) is None and speedup(row) is None and goal_met(row)
    assert speedup({"floor_us": 1.0, "us": {"slow": 2.0}, "err": {}}) is None


def test_the_goal_is_near_the_floor_and_ahead_of_everybody() -> None:
    assert goal_us(ROW) == pytest.approx(23.2) and goal_us({**ROW, "goal_us": 30.0}) == 30
    assert not goal_met(ROW)  # a peer is faster
    assert goal_met({**ROW, "us": {"splitkv": 22.0, "slow": 44.0}})
    assert not goal_met({**ROW, "us": {"splitkv": 24.0}}) and not goal_met({**ROW, "us": {}})


def test_share_is_floor_over_time() -> None:
    assert bandwidth_share(ROW, "slow") == pytest.approx(20 / 44) and bandwidth_share(ROW, "absent") is None


def test_a_straight_line_is_found_exactly() -> None:
    line = fit_line((x, 3 + 0.5 * x) for x in (1, 2, 10, 40))
    assert line is not None
    assert (line.slope, line.intercept, line.r2) == (pytest.approx(0.5), pytest.approx(3), pytest.approx(1))


def test_a_bent_line_has_a_lower_r2() -> None:
    """y = x**2 on 0, 1, 2: slope 2, intercept -1/3, and r2 = 12/13 by hand."""
    line = fit_line([(0, 0), (1, 1), (2, 4)])
    assert line is not None
    assert (line.slope, line.intercept, line.r2) == (pytest.approx(2), pytest.approx(-1 / 3), pytest.approx(12 / 13))


@pytest.mark.parametrize("points", [[], [(1, 2), (2, 3)], [(1, 1), (1, 2), (1, 3)]])
def test_no_line_through_too_little(points: list[tuple[float, float]]) -> None:
    assert fit_line(points) is None


def test_rows_without_a_group_are_rungs() -> None:
    rows = [{"group": "b"}, {}, {"group": "b", "n": 1}]
    assert list(groups(rows)) == ["b", "rungs"] and len(groups(rows)["b"]) == 2
