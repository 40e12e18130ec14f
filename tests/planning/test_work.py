"""FLOPs and bytes of compiled programs, compared with the closed form, the traced program and the compiler's counts."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from tests.contracts.variants import ROOT
from xfresearch.models.counting import count_flops
from xfresearch.planning import compiling, hlo, traced_memory
from xfresearch.planning.formula import abstract_mesh
from xfresearch.planning.hlo import Array
from xfresearch.planning.work import SPLASH, kernel_flops, work
from xfresearch.run_config.config_files import parse


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def flops(text: str) -> float:
    return sum(w.runs * w.flops for w in work(hlo.parse(text)))


def moved(text: str) -> float:
    return sum(w.runs * w.bytes for w in work(hlo.parse(text)))


def compiled(fn, *arguments) -> str:
    return jax.jit(fn).lower(*arguments).compile().as_text()


def convolve(x, w, **options):
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def test_a_product_in_a_scan_counts_once_per_iteration():
    def fn(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=6)[0]

    assert flops(compiled(fn, shape(32, 64), shape(64, 64))) == 6 * 2 * 32 * 64 * 64


# A loop as the TPU compiler writes it: it states no trip count, and there are copies between the instructions.
COUNTED = """
%condition (c: (f32[64,64], u32[])) -> pred[] {
  %c = (f32[64,64]{1,0}, u32[]{:T(128)}) parameter(0)
  %limit = u32[]{:T(128)} constant(LIMIT)
  %i = u32[]{:T(128)} get-tuple-element(%c), index=1
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (b: (f32[64,64], u32[])) -> (f32[64,64], u32[]) {
  %b = (f32[64,64]{1,0}, u32[]{:T(128)}) parameter(0)
  %x = f32[64,64]{1,0} get-tuple-element(%b), index=0
  %y = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %j = u32[]{:T(128)} get-tuple-element(%b), index=1
  %j.2 = u32[]{:T(128)S(6)} copy(%j)
  %step = u32[]{:T(128)} constant(STEP)
  %next = u32[]{:T(128)} add(%j.2, %step)
  ROOT %after = (f32[64,64]{1,0}, u32[]{:T(128)}) tuple(%y, %next)
}

ENTRY %main (a: f32[64,64], n: u32[]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %n = u32[]{:T(128)} parameter(1)
  %zero = u32[]{:T(128)} constant(START)
  %zero.2 = u32[]{:T(128)} copy(%zero)
  %start = (f32[64,64]{1,0}, u32[]{:T(128)}) tuple(%a, %zero.2)
  %while = (f32[64,64]{1,0}, u32[]{:T(128)}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[64,64]{1,0} get-tuple-element(%while), index=0
}
"""


def counted(start: int, limit: int, step: int) -> str:
    return COUNTED.replace("START", str(start)).replace("LIMIT", str(limit)).replace("STEP", str(step))


@pytest.mark.parametrize(
    ("start", "limit", "step", "trips"), [(0, 4, 1, 4), (0, 4, 2, 2), (1, 4, 2, 2), (2, 7, 1, 5), (4, 4, 1, 0)]
)
def test_the_trip_count_follows_from_start_limit_and_step(start, limit, step, trips):
    assert flops(counted(start, limit, step)) == trips * 2 * 64**3
    assert hlo.parse(counted(start, limit, step)).loops_of_unknown_trip_count() == []


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("tuple(%a, %zero.2)", "tuple(%a, %n)"),  # the start depends on the data
        ("add(%j.2, %step)", "multiply(%j.2, %step)"),
        ("tuple(%y, %next)", "tuple(%y, %step)"),
        ("constant(4)", "parameter(1)"),
        ("direction=LT", "direction=NE"),
    ],
)
def test_a_loop_of_unknown_trip_count_is_listed_and_counts_once(was, becomes):
    text = counted(0, 4, 2)
    assert was in text
    assert hlo.parse(text.replace(was, becomes)).loops_of_unknown_trip_count() == ["while"]
    assert flops(text.replace(was, becomes)) == 2 * 64**3


def test_bytes_count_operands_and_outputs():
    text = compiled(lambda x, w: x @ w, shape(32, 64), shape(64, 16))
    assert moved(text) == 4 * (32 * 64 + 64 * 16 + 32 * 16)


def test_a_loop_reads_each_layer_of_stacked_weights_once():
    layers, x_bytes, w_bytes = 6, 4 * 8 * 256, 4 * 256 * 256
    text = compiled(
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0], shape(8, 256), shape(layers, 256, 256)
    )
    assert (
        layers * w_bytes <= moved(text) <= 3.5 * layers * w_bytes + 10 * layers * x_bytes
    )  # sliced, perhaps copied, read


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 3), "padding": "VALID"},
        {"window_strides": (1, 1), "padding": ((3, 3), (2, 4)), "lhs_dilation": (2, 3)},
        {"window_strides": (1, 2), "padding": "VALID", "rhs_dilation": (2, 1)},
    ],
)
def test_convolutions_have_the_flops_that_the_compiler_counts(options):
    fn = jax.jit(lambda x, w: convolve(x, w, **options))
    done = fn.lower(shape(2, 13, 11, 8), shape(3, 4, 8, 6)).compile()
    counted = [w for w in work(hlo.parse(done.as_text())) if w.flops]
    assert sum(w.flops for w in counted) == pytest.approx(done.cost_analysis()["flops"], rel=1e-3)


def test_a_batch_dimension_written_as_a_dilated_window_counts_as_a_batch():
    """[32, 512, 128] times [32, 2048, 128]: of 32 x 32 positions of the window, 32 contain a product."""
    text = """
ENTRY %main (a: f32[32,512,128], b: f32[32,2048,128]) -> f32[32,512,2048] {
  %a = f32[32,512,128]{2,1,0:T(8,128)} parameter(0)
  %b = f32[32,2048,128]{2,1,0:T(8,128)} parameter(1)
  ROOT %c = f32[32,512,2048]{2,1,0:T(8,128)} convolution(%a, %b), window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0oi->0bf
}
"""  # noqa: E501
    assert flops(text) == 2 * 32 * 512 * 2048 * 128


def test_on_chip_memory_does_not_count_as_hbm():
    text = """
ENTRY %main (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %start = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %b = f32[64,128]{1,0:T(8,128)S(1)} cosine(%done)
  ROOT %c = f32[64,128]{1,0:T(8,128)} sine(%b)
}
"""
    assert moved(text) == 2 * 64 * 128 * 4


def test_a_kernel_states_its_own_cost():
    text = """
ENTRY %main (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %k = f32[64,128]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"1000","transcendentals":"5","bytes_accessed":"300"}}}
}
"""  # noqa: E501
    assert (flops(text), moved(text)) == (1000, 300)


def test_splash_attention_counts_blocks_up_to_the_diagonal():
    kernel = """
ENTRY %main (q: bf16[2,4,1024,128], k: bf16[2,4,1536,128]) -> bf16[2,4,1024,128] {
  %q = bf16[2,4,1024,128]{3,2,1,0:T(8,128)} parameter(0)
  %k = bf16[2,4,1536,128]{3,2,1,0:T(8,128)} parameter(1)
  ROOT %splash_mha_fwd_residuals.1 = bf16[2,4,1024,128]{3,2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 512}"
}}
}
"""  # noqa: E501
    seen = 512 + (1024 + 512) / 2  # all slots, and 3 of the 2 x 2 blocks of tokens
    assert flops(kernel) == 2 * (2 * 2 * 4 * 1024 * 128 * seen)
    dkv = kernel.replace("mha_fwd", "mha_dkv")
    assert flops(dkv) == flops(dkv.replace("block_q", "block_q_dkv")) == 2 * flops(kernel)


@pytest.mark.parametrize(
    ("kind", "grid", "tokens", "keys", "causal", "blocks"),
    [
        ("fwd", (8, 8), 4096, 4096, True, 36),  # up to the diagonal
        ("fwd", (8, 3), 4096, 4096, True, 1 + 2 + 6 * 3),  # a window of 1,024
        ("dkv", (3, 8), 4096, 4096, True, 1 + 2 + 6 * 3),
        ("fwd", (8, 1), 4096, 4096, True, 8),  # a window of 1
        ("fwd", (8, 9), 4096, 4608, True, 36 + 8),  # a block of slots
        ("fwd", (8, 4), 4096, 4608, True, 1 + 2 + 6 * 3 + 8),  # and a window
        ("dkv", (8, 9), 4096, 4608, True, 36 + 8),
        ("fwd", (2, 3), 1024, 4096, True, 2 * 3),  # the last of four devices, and a window
        ("dq", (8, 1), 4096, 512, True, 8),  # slots alone
        ("dq", (8, 8), 4096, 4096, False, 64),
    ],
)
def test_splash_attention_counts_the_blocks_of_its_grid(kind, grid, tokens, keys, causal, blocks):
    """The numbers of blocks are those of the kernel's own mask (block_mask > 0)."""
    q, k = (Array("bf16", (4, size, 128), False) for size in (tokens, keys))
    operands = [Array("s8", (1, *grid), False)] * 2 + [q, k, k]
    text = f'"block_q_{kind}": 512, "block_kv_{kind}": 512'.replace("_fwd", "")
    result = kernel_flops(SimpleNamespace(name=f"splash_mha_{kind}.1", text=text), operands, 0, causal)
    assert result == SPLASH[kind] * 2 * 4 * 128 * blocks * 512**2


@pytest.mark.parametrize("name", ["ragged-dot-none.1", "jvp_jit_gmm__.2", "transpose_jvp_jit_tgmm___.2"])
def test_ragged_products_count_only_routed_tokens(name):
    kernel = """
ENTRY %main (x: f32[1024,32], w: f32[4,32,16]) -> f32[1024,16] {
  %x = f32[1024,32]{1,0:T(8,128)} parameter(0)
  %w = f32[4,32,16]{2,1,0:T(8,128)} parameter(1)
  ROOT %NAME = f32[1024,16]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"1048576","bytes_accessed":"204800"}}}
}
"""  # noqa: E501
    program = hlo.parse(kernel.replace("NAME", name))
    rows, weights = 4 * 1024 * (32 + 16), 4 * 4 * 32 * 16
    assert rows + weights == 204800  # what the kernel states for its whole buffer
    assert [(w.flops, w.bytes) for w in work(program, routed=256)] == [(1048576 / 4, rows / 4 + weights)]
    assert [(w.flops, w.bytes) for w in work(program, routed=4096)] == [(1048576, 204800)]


def test_an_activation_saved_under_two_names_counts_once():
    def layer(x, _):
        y = jnp.sin(x)
        return y, (y.reshape(-1), y, jnp.cos(x))

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(layer, x, None, length=3))(shape(4, 8)).jaxpr
    sizes = dict.fromkeys(("data", "fsdp", "expert", "tensor", "context"), 1)
    kept = traced_memory.kept_in_trace(jaxpr, [3], sizes)
    assert sorted(size for _, _, size in kept) == [3 * 4 * 8 * 4] * 2


def traced_step(*overrides: str):
    """(config, traced step) of a small model on one device, with recomputation: the real training step."""
    arguments = ["--config", f"{ROOT / 'configs/llama.py'}:tiny", "--config.training.remat=full", *overrides]
    config = compiling.with_plain_kernels(compiling.prepare(parse(arguments)))
    axes = ("data", "fsdp", "expert", "tensor", "context")
    mesh = jax.make_mesh((1,) * 5, axes, axis_types=(AxisType.Auto,) * 5, devices=jax.devices()[:1])
    return config, compiling.trace(config, mesh)[1]


@pytest.fixture(scope="module")
def step():
    """(config, traced, compiled)"""
    config, traced = traced_step("--config.training.layers=scan")
    return config, traced, compiling.compile_step(traced)


def test_the_traced_flops_match_the_compilers_count_of_unrolled_layers():
    """The compiler also counts elementwise work, so its count is larger: 7 % at width 32, 1.1 % here; the excess falls with
    the width. It counts a loop's body once, so the layers are unrolled."""
    config, traced = traced_step("--config.training.layers=unroll", "--config.model.width=256")
    assert 1 <= traced.lower().cost_analysis()["flops"] / compiling.traced_flops(config) < 1.02


def test_the_compiled_training_step_has_the_flops_of_the_traced_step(step):
    config, _, done = step
    counted = sum(w.runs * w.flops for w in work(done.program))
    assert counted == pytest.approx(compiling.traced_flops(config), rel=0.02)


def test_the_traced_training_step_has_three_times_the_forward_flops():
    from xfresearch.run_config.closed_form import costs

    config = compiling.prepare(parse(["--config", f"{ROOT / 'configs/llama.py'}:tiny"]))
    ideal = 3 * costs(config.model, config.sequence_length).flops_per_token * config.batch_size * config.sequence_length
    assert compiling.traced_flops(config) == ideal
    again = replace(config, training=replace(config.training, remat="full"))
    assert 1.2 * ideal < compiling.traced_flops(again) < 4 / 3 * ideal


def test_with_full_remat_the_forward_pass_saves_only_the_residual_stream(step):
    config, traced, done = step
    stream = config.model.depth * config.batch_size * config.sequence_length * config.model.width * 4
    sizes = dict.fromkeys(("data", "fsdp", "expert", "tensor", "context"), 1)
    kept = traced_memory.kept_in_trace(traced.jaxpr.jaxpr, [config.model.depth], sizes)
    assert sum(size for _, _, size in kept) == stream
    assert max(size for _, _, size in compiling.kept_activations(done.program)) == stream


def test_a_scan_over_as_many_microbatches_as_layers_is_not_taken_for_the_layers():
    arguments = ["--config", f"{ROOT / 'configs/llama.py'}:tiny", "--config.training.layers=scan"]
    arguments += ["--config.training.remat=full", "--config.model.depth=2", "--config.training.accumulate=2"]
    config = compiling.prepare(parse(arguments))
    sizes = dict.fromkeys(("data", "fsdp", "expert", "tensor", "context"), 1)
    _, traced = compiling.trace(config, abstract_mesh(sizes))
    kept = traced_memory.kept_in_trace(traced.jaxpr.jaxpr, [config.model.depth], sizes)
    rows = config.batch_size // 2
    assert [shape for _, shape, _ in kept] == [f"float32[2, {rows}, {config.sequence_length}, {config.model.width}]"]


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (463.23G) exceeds available HBM (15.75G). HLO module: jit_train_step.",
            463.23,
            15.75,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.81G of 15.75G hbm. Exceeded hbm capacity by "
            '9.06G.\n  Largest program allocations in hbm:\n\n  1. Size: 4.00G\n     Operator: op_name="jit(step)/dot"\n'
            "     Shape: bf16[32,64]{1,0}\n  2. Size: 512.00M\n     Shape: f32[8]{0}\n",
            24.81,
            15.75,
        ),
    ],
)
def test_out_of_memory_errors_are_parsed(text, needed, available):
    result = compiling.parse_out_of_memory(text)
    assert result[:2] == (pytest.approx(needed * 2**30), pytest.approx(available * 2**30))
    if "1. Size" in text:
        assert result[2] == [("jit(step)/dot", "bf16[32,64]", 4 * 2**30), ("", "f32[8]", 2**29)]


def test_other_errors_are_not_out_of_memory():
    assert compiling.parse_out_of_memory("INTERNAL: something else") is None


def test_the_traced_count_includes_the_optimizer():
    """Muon's matrix products count too."""
    arguments = ["--config", f"{ROOT / 'configs/llama.py'}:tiny"]
    adamw = compiling.traced_flops(compiling.prepare(parse(arguments)))
    muon = compiling.traced_flops(compiling.prepare(parse([*arguments, "--config.optimizer.kind=muon"])))
    assert muon > adamw > count_flops(lambda x: x @ x, shape(8, 8))
