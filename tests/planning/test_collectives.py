"""Collectives of small programs compiled for 8 devices: kind, mesh axis, count and bytes are known by construction."""

from pathlib import Path

import pytest

from tests.simulated import results_on_devices
from xfresearch.planning import hlo
from xfresearch.planning.collectives import Collective, collectives, mesh_axes, replica_group
from xfresearch.planning.work import unknown_kernels, work

ROOT = Path(__file__).parents[2]
MESH = {"fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    return results_on_devices(8, str(Path(__file__).parent / "collectives_worker.py"), timeout=120)


def listed(programs, name: str) -> list[tuple]:
    rows = collectives(hlo.parse(programs[name]), MESH)
    assert all(row.whole for row in rows)
    return sorted((row.kind, row.axes, row.runs, row.payload, row.sent) for row in rows)


def test_sharded_weights_are_gathered_over_their_axis(programs):
    whole = 128 * 32 * 4
    assert listed(programs, "weights") == [("all-gather", ("fsdp",), 1, whole, whole * 3 / 4)]


def test_collectives_in_a_scan_count_once_per_iteration(programs):
    local = 8 * 16 * 4
    assert listed(programs, "loop") == [("all-reduce", ("tensor",), 5, local, local)]


def test_trip_counts_of_nested_scans_multiply(programs):
    local = 16 * 8 * 4
    assert listed(programs, "nested") == [("all-to-all", ("fsdp",), 25, local, local * 3 / 4)]


def test_each_kind_is_found_with_its_axis_and_bytes(programs):
    gathered, scattered = 32 * 8 * 4, 8 * 8 * 4
    assert listed(programs, "once_each") == [
        ("all-gather", ("tensor",), 1, gathered, gathered / 2),
        ("all-reduce", ("fsdp", "tensor"), 1, 4, 7),
        ("collective-permute", ("fsdp",), 1, scattered, scattered),
        ("reduce-scatter", ("fsdp",), 1, gathered, gathered * 3 / 4),
    ]


def test_a_program_without_collectives_has_none(programs):
    assert listed(programs, "none") == []


@pytest.mark.parametrize(
    ("text", "group", "axes"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", (0, 2, 4, 6), ("fsdp",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6), ("fsdp",)),
        ("replica_groups=[4,2]<=[8]", (0, 1), ("tensor",)),
        ("replica_groups=[1,8]<=[8]", tuple(range(8)), ("fsdp", "tensor")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", (0, 2, 4, 6), ("fsdp",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", tuple(range(8)), ("fsdp", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 2, 4, 6), ("fsdp",)),
        ("replica_groups={}", tuple(range(8)), ("fsdp", "tensor")),
        ("source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", (0, 2, 4, 6), ("fsdp",)),
    ],
)
def test_replica_groups_are_parsed_in_every_notation(text, group, axes):
    assert replica_group(f"all-reduce(%x), channel_id=1, {text}, use_global_device_ids=true", 8) == group
    assert mesh_axes(group, MESH) == (axes, True)


def test_a_group_over_part_of_an_axis_is_not_whole():
    group = replica_group("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}", 8)
    assert group == (0, 4)
    assert mesh_axes(group, MESH) == (("fsdp",), False)


def test_replica_groups_in_an_unknown_notation_raise_an_error():
    with pytest.raises(ValueError, match="cannot be read"):
        replica_group("replica_groups=something_new", 8)


# Excerpt from a program compiled for v5p: forms that no CPU program has.
TPU = """HloModule jit_step

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[64,128]) -> bf16[16,128] {
  %input = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %partition-id = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %slice = bf16[16,128]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %partition-id, %zero), dynamic_slice_sizes={16,128}
}

%condition (state: (s32[], bf16[64,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state.1 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%body (state.2: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %state.3 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state.3), index=0
  %x.1 = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state.3), index=1
  %fusion = bf16[16,128]{1,0:T(8,128)(2,1)} fusion(%x.1), kind=kCustom, calls=%all-reduce-scatter.1
  %start = (bf16[16,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)}) all-gather-start(%fusion), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %done = bf16[64,128]{1,0:T(8,128)(2,1)} all-gather-done(%start)
  %one = s32[]{:T(128)} constant(1)
  %more = s32[]{:T(128)} add(%i, %one)
  ROOT %next = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) tuple(%more, %done)
}

ENTRY %main (x: bf16[64,128]) -> (s32[], bf16[64,128]) {
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %none = s32[]{:T(128)} constant(0)
  %p = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) tuple(%none, %x)
  ROOT %while.1 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) while(%p), condition=%condition, body=%body
}
"""  # noqa: E501


def test_tpu_loops_without_trip_count_fused_scatters_and_start_done_pairs():
    scatter, gather = collectives(hlo.parse(TPU), MESH)
    whole = 64 * 128 * 2
    assert (scatter.kind, scatter.axes, scatter.runs, scatter.payload) == ("reduce-scatter", ("fsdp",), 7, whole)
    assert (gather.kind, gather.axes, gather.runs, gather.payload) == ("all-gather", ("fsdp",), 7, whole)
    assert not scatter.asynchronous and gather.asynchronous


def test_a_loop_of_unknown_trip_count_counts_once_and_is_listed():
    program = hlo.parse(TPU.replace("direction=LT", "direction=NE"))
    assert [row.runs for row in collectives(program, MESH)] == [1, 1]
    assert program.loops_of_unknown_trip_count() == ["while.1"]
    assert hlo.parse(TPU).loops_of_unknown_trip_count() == []


# One asynchronous all-gather on a TPU: a start, a fusion that computes at the same time, and a wait. The attributes of
# the kernel span several lines, one of which begins with a brace.
SPREAD = """HloModule jit_step

%start (a: bf16[16,128]) -> (bf16[16,128], bf16[64,128], u32[]) {
  %a = bf16[16,128]{1,0} parameter(0)
  %gather.1 = bf16[64,128]{1,0} all-gather(%a), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  ROOT %call.1 = (bf16[16,128]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (b: bf16[16,128], c: bf16[64,128], x: f32[8,8]) -> (f32[8,8], bf16[16,128], bf16[64,128]) {
  %b = bf16[16,128]{1,0} parameter(0)
  %c = bf16[64,128]{1,0} parameter(1)
  %x = f32[8,8]{1,0} parameter(2)
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gather.2 = bf16[64,128]{1,0} all-gather(%b), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %tuple.1 = (f32[8,8]{1,0}, bf16[16,128]{1,0}, bf16[64,128]{1,0}) tuple(%dot.1, %b, %c)
}

%wait (d: bf16[16,128], e: bf16[64,128]) -> bf16[64,128] {
  %d = bf16[16,128]{1,0} parameter(0)
  %e = bf16[64,128]{1,0} parameter(1)
  %gather.3 = bf16[64,128]{1,0} all-gather(%d), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  ROOT %call.2 = bf16[64,128]{1,0} custom-call(%d, %e, %gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: bf16[16,128], y: f32[8,8]) -> bf16[64,128] {
  %p = bf16[16,128]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %kernel = f32[8,8]{1,0} custom-call(%y), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="a kernel"}
  %s = (bf16[16,128]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start
  %s0 = bf16[16,128]{1,0} get-tuple-element(%s), index=0
  %s1 = bf16[64,128]{1,0} get-tuple-element(%s), index=1
  %f = (f32[8,8]{1,0}, bf16[16,128]{1,0}, bf16[64,128]{1,0}) fusion(%s0, %s1, %y), kind=kOutput, calls=%beside
  %f1 = bf16[16,128]{1,0} get-tuple-element(%f), index=1
  %f2 = bf16[64,128]{1,0} get-tuple-element(%f), index=2
  ROOT %w = bf16[64,128]{1,0} fusion(%f1, %f2), kind=kCustom, calls=%wait
}
"""  # noqa: E501


def test_an_all_gather_split_over_fusions_counts_once():
    (gather,) = collectives(hlo.parse(SPREAD), MESH)
    assert (gather.kind, gather.axes, gather.payload, gather.asynchronous) == (
        "all-gather",
        ("fsdp",),
        64 * 128 * 2,
        True,
    )


def test_a_fusion_beside_an_asynchronous_all_gather_counts_only_its_own_work():
    done = {w.name: (w.flops, w.bytes) for w in work(hlo.parse(SPREAD))}
    assert done["f"] == (2 * 8 * 8 * 8, 2 * 8 * 8 * 4)  # read once, written once; passed-through arrays cost nothing
    assert unknown_kernels(hlo.parse(SPREAD)) == ["kernel"]


# An exchange between slices over the network, and a collective that another core of the chip runs.
OTHERS = """HloModule jit_step

%called (a: bf16[16,128]) -> bf16[64,128] {
  %a = bf16[16,128]{1,0} parameter(0)
  ROOT %gather = bf16[64,128]{1,0} all-gather(%a), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

ENTRY %main (p: bf16[16,128]) -> bf16[64,128] {
  %p = bf16[16,128]{1,0} parameter(0)
  %after = token[] after-all()
  %send = (bf16[16,128]{1,0}, u32[], token[]) send(%p, %after), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (bf16[16,128]{1,0}, u32[], token[]) recv(%after), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %start = ((bf16[16,128]{1,0}), bf16[64,128]{1,0}) call-start(%p), async_execution_thread="sparsecore", to_apply=%called
  ROOT %done = bf16[64,128]{1,0} call-done(%start)
}
"""  # noqa: E501


def test_exchanges_between_slices_and_collectives_on_other_cores_are_found():
    over, gather = collectives(hlo.parse(OTHERS), MESH, between="fsdp", slices=2)
    assert (over.kind, over.axes, over.group, over.payload) == ("all-reduce", ("fsdp",), (0, 4), 16 * 128 * 2)
    assert not over.whole  # two of the four devices along the axis: one in each slice
    assert (gather.kind, gather.axes, gather.payload, gather.asynchronous) == (
        "all-gather",
        ("fsdp",),
        64 * 128 * 2,
        True,
    )


def test_bytes_that_a_device_sends():
    def sent(kind):
        return Collective(kind, ("fsdp",), True, (0, 2, 4, 6), 1, 400.0, False, "", "").sent

    assert [sent(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")] == [
        300.0, 300.0, 600.0, 300.0, 400.0
    ]  # fmt: skip
