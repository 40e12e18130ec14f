"""Compares count_flops with counts made by hand."""

import jax
import jax.numpy as jnp
import pytest

from xfresearch.models.counting import count_flops


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def matmul(x, w):
    return x @ w


def test_matrix_product():
    assert count_flops(matmul, f32(3, 4), f32(4, 5)) == 2 * 3 * 4 * 5


def test_batched_product_with_two_contracted_dimensions():
    product = lambda x, w: jnp.einsum("bhld,bhds->bls", x, w)  # noqa: E731
    assert count_flops(product, f32(2, 3, 4, 5), f32(2, 3, 5, 6)) == 2 * (2 * 4 * 6) * (3 * 5)


def test_elementwise_work_counts_nothing():
    assert count_flops(lambda x: jax.nn.softmax(jnp.sort(x * x + 1)), f32(7, 7)) == 0


def test_scan_counts_its_body_times_its_length():
    def scanned(x, w_N):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w_N)[0]

    assert count_flops(scanned, f32(3, 4), f32(6, 4, 4)) == 6 * 2 * 3 * 4 * 4


def test_scans_inside_scans_multiply():
    def inner(x, w):
        return jax.lax.fori_loop(0, 5, lambda i, x: x @ w, x)

    def outer(x, w_N):
        return jax.lax.scan(lambda x, w: (inner(x, w), None), x, w_N)[0]

    assert count_flops(outer, f32(3, 4), f32(6, 4, 4)) == 6 * 5 * 2 * 3 * 4 * 4


def custom_jvp(f):
    f = jax.custom_jvp(f)
    f.defjvps(None, None)
    return f


def custom_vjp(f):
    f = jax.custom_vjp(f)
    f.defvjp(lambda *inputs: (f(*inputs), inputs), lambda inputs, _: inputs)
    return f


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, custom_jvp, custom_vjp])
def test_wrapped_functions_count_once(wrap):
    assert count_flops(lambda x, w: wrap(matmul)(x, w), f32(3, 4), f32(4, 5)) == 2 * 3 * 4 * 5


def test_gradient_counts_forward_and_two_products():
    loss = lambda x, w: (x @ w).sum()  # noqa: E731
    assert count_flops(jax.grad(loss, (0, 1)), f32(3, 4), f32(4, 5)) == 3 * 2 * 3 * 4 * 5


def test_rematerialised_gradient_counts_the_forward_pass_again():
    layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))
    loss = lambda x, w: layer(x, w).sum()  # noqa: E731
    once = 2 * 4 * 4 * 4
    assert count_flops(jax.grad(loss, (0, 1)), f32(4, 4), f32(4, 4)) == (2 + 2 + 4) * once


def test_conditional_counts_its_most_expensive_branch():
    def either(flag, x):
        return jax.lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert count_flops(either, jax.ShapeDtypeStruct((), jnp.bool_), f32(4, 4)) == 2 * (2 * 4**3)


def test_convolution():
    """[N, C, width]: 2 FLOPs per output, kernel position and input channel of its group."""

    def convolve(groups):
        return lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=groups)

    assert count_flops(convolve(1), f32(2, 6, 10), f32(8, 6, 3)) == 2 * (2 * 8 * 8) * 3 * 6
    assert count_flops(convolve(6), f32(2, 6, 10), f32(12, 1, 3)) == 2 * (2 * 12 * 8) * 3 * 1


def test_ragged_product_counts_each_row_once_and_so_do_its_gradients():
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    once = 2 * 10 * 4 * 5
    assert count_flops(jax.lax.ragged_dot, f32(10, 4), f32(3, 4, 5), sizes) == once
    loss = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).sum()  # noqa: E731
    assert count_flops(jax.grad(loss, (0, 1)), f32(10, 4), f32(3, 4, 5), sizes) == 3 * once


def test_products_in_a_while_loop_are_an_error():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)

    with pytest.raises(ValueError, match="'while'"):
        count_flops(loop, f32(4, 4))


def test_a_while_loop_without_products_counts_nothing():
    def loop(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, x) @ w

    assert count_flops(loop, f32(3, 4), f32(4, 5)) == 2 * 3 * 4 * 5


def test_a_custom_kernel_is_an_error():
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    doubled = lambda x: pl.pallas_call(kernel, out_shape=f32(8, 8), interpret=True)(x)  # noqa: E731
    with pytest.raises(ValueError, match="'pallas_call'"):
        count_flops(doubled, f32(8, 8))
