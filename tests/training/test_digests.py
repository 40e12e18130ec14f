"""The digests of a checkpoint's arrays: they equal their definition, and no change of an array goes unseen."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xfresearch.checkpoints import digests as module
from xfresearch.checkpoints import store
from xfresearch.checkpoints.digests import digests, weak_sums

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "uint32", "bool", "key<fry>")
ROUNDS = {"daily": 3, "long": 900}  # of a draw for each dtype and kind of change: about 300, and 1e5
SHAPE = (24, 24)
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def reference(path: str, x) -> str:
    """The digest of a NumPy array, by its definition."""
    kind, words = f"{x.dtype}{list(x.shape)}", np.atleast_1d(x)
    words = words[..., None].view(np.uint32) if x.dtype.itemsize == 8 else words.view(UNSIGNED[x.dtype.itemsize])
    text = ""
    for mask_by_axis in zip(*module._masks(f"{path} {kind}", words.shape), strict=True):
        mask = sum(np.ix_(*mask_by_axis))  # modulo 2^32
        mixed = words.astype(np.uint32) ^ mask
        for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
            mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
        mixed ^= mixed >> np.uint32(14)
        text += f"{int(mixed.sum(dtype=np.uint64)) % 2**32:08x}"
    return f"{kind} {text}"


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (5, 7), (3, 513, 301)])
def test_it_equals_its_definition(shape):
    """The largest shape is added in blocks, with rows left over."""
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = {name: random.integers(0, 200, shape).astype(jnp.dtype(name)) for name in DTYPES[:-1]}
        expected = {f"a/{name}": reference(f"a/{name}", np.asarray(x)) for name, x in arrays.items()}
        assert digests({"a": {name: jnp.asarray(x) for name, x in arrays.items()}}) == expected


def test_blocks_of_several_steps_with_and_without_rows_left_over(monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(module, "SMALL", 1)
    module._digest_all.clear_cache()
    for shape in ((16, 128), (67, 100), (3, 1000), (9, 5, 64)):
        x = random.normal(size=shape).astype(np.float32)
        assert digests({"x": jnp.asarray(x)}) == {"x": reference("x", x)}
    module._digest_all.clear_cache()


def test_path_dtype_and_shape_count():
    zeros = jnp.zeros((4, 6))
    result = digests({"a": zeros, "b": zeros, "c": zeros.astype(jnp.int32), "d": zeros.reshape(6, 4)})
    assert len({text.split()[-1] for text in result.values()}) == 4
    assert result["a"].startswith("float32[4, 6] ")


def drawn(random, dtype: str):
    """A NumPy array: half of the time of random bits, otherwise of few values, as counters and masks have."""
    if dtype == "key<fry>":
        return random.integers(0, 2**32, (*SHAPE, 2), dtype=np.uint32)
    few = random.integers(0, 2, SHAPE)
    if dtype == "bool":
        return few.astype(bool)
    if random.integers(2):
        return few.astype(jnp.dtype(dtype))
    raw = random.integers(0, 2 ** (8 * jnp.dtype(dtype).itemsize), SHAPE, np.uint64, endpoint=False)
    return raw.astype(UNSIGNED[jnp.dtype(dtype).itemsize]).view(jnp.dtype(dtype))


def flipped(random, bits, count: int, bit: int):
    """`count` elements with their `bit`, counted from the highest one, changed."""
    changed = bits.ravel().copy()
    width = 1 if bits.dtype == bool else 8 * bits.itemsize
    one = np.array(1, bits.dtype) << bits.dtype.type(width - 1 - bit) if width > 1 else True
    changed[random.choice(changed.size, count, replace=False)] ^= one
    return changed.reshape(bits.shape)


def swapped(random, rows):
    """With two rows swapped that differ."""
    one = random.integers(len(rows))
    others = [row for row in range(len(rows)) if (rows[row] != rows[one]).any()]
    other = random.choice(others)
    changed = rows.copy()
    changed[[one, other]] = rows[[other, one]]
    return changed


CHANGES = {
    "an even number of signs": lambda random, x: flipped(random, x, 2 * random.integers(1, 100), 0),
    "an odd number of signs": lambda random, x: flipped(random, x, 1 + 2 * random.integers(100), 0),
    "bit 30 of two elements": lambda random, x: flipped(random, x, 2, min(1, 8 * x.itemsize - 1)),
    "bit 30 of one and of its row": lambda random, x: np.concatenate([flipped(random, x[:1], x[:1].size, 1), x[1:]]),
    "one bit": lambda random, x: flipped(random, x, 1, random.integers(8 * x.itemsize if x.dtype != bool else 1)),
    "two rows swapped": swapped,
    "two elements swapped": lambda random, x: swapped(random, x.reshape(-1, 1)).reshape(x.shape),
    "transposed": lambda random, x: x.swapaxes(0, 1),
    "rolled": lambda random, x: np.roll(x, 1),
    "negated": lambda random, x: ~x,
    "tail truncated": lambda random, x: x[:-1],
    "tail zeroed": lambda random, x: np.concatenate([x[:-1], np.zeros_like(x[-1:])]),
}


def changed_draws(random) -> tuple[dict, dict]:
    """Two trees {dtype: {kind of change: array}}, before and after the change. Arrays of a dtype are also swapped."""
    before, after = {}, {}
    for dtype in DTYPES:
        arrays = {kind: drawn(random, dtype) for kind in (*CHANGES, "one", "other")}
        bits = {kind: x if x.dtype == bool else x.view(UNSIGNED[x.itemsize]) for kind, x in arrays.items()}
        new = {kind: change(random, bits[kind]) for kind, change in CHANGES.items()}
        new |= {"one": bits["other"], "other": bits["one"]}
        for kind in [kind for kind, x in new.items() if np.array_equal(x, bits[kind])]:
            new[kind] = ~bits[kind]  # the drawn tail was of zeros
        before[dtype] = {kind: as_array(x.view(arrays[kind].dtype), dtype) for kind, x in bits.items()}
        after[dtype] = {kind: as_array(x.view(arrays[kind].dtype), dtype) for kind, x in new.items()}
    return before, after


def as_array(x, dtype: str):
    return jax.random.wrap_key_data(jnp.asarray(x), impl="threefry2x32") if dtype == "key<fry>" else jnp.asarray(x)


@pytest.mark.parametrize("rounds", ["daily", pytest.param("long", marks=pytest.mark.long)])
def test_no_change_goes_unseen(rounds):
    random = np.random.default_rng(7 if rounds == "daily" else 8)
    draws = 0
    with jax.enable_x64(True):
        for _ in range(ROUNDS[rounds]):
            before, after = (digests(tree) for tree in changed_draws(random))
            unseen = [path for path in before if before[path] == after[path]]
            assert not unseen
            draws += len(before)
    assert draws >= {"daily": 300, "long": 100_000}[rounds]


def test_the_sums_of_earlier_versions_miss_signs():
    """Why they are called weak."""
    x = jnp.ones((8, 8))
    assert weak_sums({"x": x}) == weak_sums({"x": -x}) and digests({"x": x}) != digests({"x": -x})


def of_earlier_version(workdir, step: int, params: dict) -> None:
    """Writes a checkpoint as versions did that recorded sums."""
    with pytest.MonkeyPatch.context() as patch:
        with_digest = store.with_digest
        patch.setattr(store, "digests", weak_sums)
        renamed = {"digests": "fingerprints"}
        patch.setattr(store, "with_digest", lambda m: with_digest({renamed.get(k, k): v for k, v in m.items()}))
        store.save_params(workdir, step, params)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_a_checkpoint_of_an_earlier_version_is_read_and_said_to_be_weakly_checked(tmp_path, capsys):
    params = {"a": jax.random.normal(jax.random.key(0), (5, 3))}
    of_earlier_version(tmp_path, 3, params)
    assert "fingerprints" in json.loads((store.directory(tmp_path) / "3" / "meta" / "metadata").read_text())
    result = store.restore_params(tmp_path, 3, shapes(params))
    np.testing.assert_array_equal(result["a"], params["a"])
    assert len(lines := capsys.readouterr().err.splitlines()) == 1 and "checkpoint 3" in lines[0]
    assert "is weakly checked" in lines[0]
    store.save_params(tmp_path, 4, params)
    store.restore_params(tmp_path, 4, shapes(params))
    assert not capsys.readouterr().err
    of_earlier_version(tmp_path, 5, {"a": params["a"].at[0, 0].add(1)})
    shutil.rmtree(store.directory(tmp_path) / "5" / "params")
    shutil.copytree(store.directory(tmp_path) / "4" / "params", store.directory(tmp_path) / "5" / "params")
    with pytest.raises(store.Corrupt, match="params/a does not have"):
        store.restore_params(tmp_path, 5, shapes(params))


def test_other_parameters_beside_an_old_meta_are_damage(tmp_path):
    params = {"a": jax.random.normal(jax.random.key(0), (6, 4)), "b": jnp.ones(4)}
    store.save_params(tmp_path, 1, params)
    store.save_params(tmp_path, 2, jax.tree.map(jnp.negative, params))
    one, two = (store.directory(tmp_path) / step / "params" for step in "12")
    shutil.rmtree(one)
    shutil.copytree(two, one)
    with pytest.raises(store.Corrupt, match="params/a does not have the digest that was recorded with it"):
        store.restore_params(tmp_path, 1, shapes(params))
