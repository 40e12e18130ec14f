"""Times of collectives and steps, compared with values calculated by hand."""

import pytest

from xfresearch.planning.chips import CHIPS
from xfresearch.planning.collectives import Collective
from xfresearch.planning.links import HOP, Location, seconds
from xfresearch.planning.step_time import Roofline, roofline
from xfresearch.planning.topologies import parse
from xfresearch.planning.work import Work

GB = 1e9


def one(kind: str, members: int, payload: float = GB) -> Collective:
    return Collective(kind, ("fsdp",), True, tuple(range(members)), 1, payload, False, "c", "")


def line(n: int, step: int = 1) -> list[Location]:
    return [Location(0, (i * step, 0)) for i in range(n)]


def test_a_closed_ring_of_16_has_two_links():
    time, _ = seconds(one("all-gather", 16), parse("v5e:16x16"), line(16))
    assert time == pytest.approx(GB * 15 / 16 / (2 * 4.5e10))


def test_an_open_line_has_one_link():
    time, _ = seconds(one("reduce-scatter", 4), parse("v5e:4x4"), line(4))
    assert time == pytest.approx(GB * 3 / 4 / 4.5e10)


def test_an_all_reduce_takes_twice_as_long_as_an_all_gather():
    machine = parse("v5e:4x4")
    locations = line(4)
    gather = seconds(one("all-gather", 4), machine, locations)[0]
    assert seconds(one("all-reduce", 4), machine, locations)[0] == 2 * gather


def test_a_group_over_the_whole_torus_uses_all_its_links():
    locations = [Location(0, (x, y, z)) for x in range(4) for y in range(4) for z in range(4)]
    time, _ = seconds(one("all-gather", 64), parse("v5p:4x4x4"), locations)
    assert time == pytest.approx(GB * 63 / 64 / (6 * 9e10))


def test_groups_of_distant_devices_share_links():
    machine = parse("v5e:16x16")
    near, far = (
        seconds(one("all-gather", 4), machine, line(4))[0],
        seconds(one("all-gather", 4), machine, line(4, 4))[0],
    )
    assert far == pytest.approx(4 * near)


def test_an_all_to_all_is_limited_by_the_links_in_the_middle():
    open_line = seconds(one("all-to-all", 4), parse("v5e:4x4"), line(4))[0]
    assert open_line == pytest.approx(GB * 4 / 4 / 4.5e10, rel=1e-3)
    ring = seconds(one("all-to-all", 16), parse("v5e:16x16"), line(16))[0]
    assert ring == pytest.approx(GB * 16 / (8 * 4.5e10), rel=1e-3)


def test_a_permutation_uses_one_link():
    assert seconds(one("collective-permute", 4), parse("v5e:4x4"), line(4))[0] == pytest.approx(GB / 4.5e10, rel=1e-3)


def test_small_collectives_take_a_minimum_time_per_hop():
    assert seconds(one("all-gather", 4, 8.0), parse("v5e:4x4"), line(4))[0] == pytest.approx(3 * HOP)


def test_the_two_devices_of_a_chip_share_its_links():
    locations = [Location(0, (x, 0, 0)) for x in range(4) for _ in range(2)]
    both = seconds(one("all-gather", 8), parse("tpu7x:4x4x4"), locations)[0]
    assert both == pytest.approx(GB * 3 / 4 / (2 * 9e10))
    each = seconds(one("all-gather", 4), parse("tpu7x:4x4x4"), locations[::2])[0]
    assert each == pytest.approx(2 * both)


def test_between_slices_each_device_sends_its_shard():
    locations = [Location(s, (x, 0, 0)) for s in range(2) for x in range(4)]
    inside, between = seconds(one("all-reduce", 8), parse("2x v5p:4x4x4"), locations)
    assert between == pytest.approx(2 * GB / 4 / 2 / 6.25e9)
    assert inside == pytest.approx(2 * GB * 3 / 4 / (2 * 9e10))


def test_gpus_of_a_host_share_a_switch():
    locations = [Location(0, (i,)) for i in range(8)]
    assert seconds(one("all-gather", 8), parse("h100:8"), locations)[0] == pytest.approx(GB * 7 / 8 / 4.5e11, rel=1e-2)
    hosts = [Location(h, (0,)) for h in range(4)]
    assert seconds(one("all-reduce", 4), parse("h100:8x4"), hosts) == (0, pytest.approx(2 * GB * 3 / 4 / 5e10))


@pytest.mark.parametrize(
    ("kind", "inside", "between"),
    [
        ("all-gather", 7 / 8, 3 / 4 / 8),
        ("reduce-scatter", 7 / 8, 3 / 4 / 8),
        ("all-reduce", 2 * 7 / 8, 2 * 3 / 4 / 8),  # both of them
        ("all-to-all", 7 / 32, 3 / 4),
        ("collective-permute", 1, 1),
    ],
)
def test_a_group_over_several_hosts_uses_switches_and_the_network(kind, inside, between):
    locations = [Location(i // 8, (i,)) for i in range(32)]
    result = seconds(one(kind, 32), parse("h100:8x4"), locations)
    assert result == pytest.approx((GB * inside / 4.5e11, GB * between / 5e10), rel=1e-2)


def test_the_roofline_is_the_slowest_resource_or_the_sum():
    chip = CHIPS["v5e"]
    works = [
        Work("dot", "", 2, chip.peak("bfloat16"), 0.5 * chip.memory_bandwidth),
        Work("add", "", 1, 0, 3 * chip.memory_bandwidth),
    ]
    works.append(Work("c", "", 1, 0, chip.memory_bandwidth))  # the collective's own bytes
    result = roofline(chip, works, [(one("all-gather", 4), 0.5, 0.25)], "bfloat16")
    assert result == Roofline(arithmetic=2, memory=5, links=0.5, network=0.25, instructions=5)
    assert (result.overlapped, result.serial, result.limit) == (5, 5.75, "memory")
