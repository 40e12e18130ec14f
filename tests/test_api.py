"""The Python API: loading, logits, taps, text generation, saving, and one-line errors."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import make_run, rough_params, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data.tokenizers import ByteTokenizer, Tokenizer
from xfresearch.models import decoding, transformer
from xfresearch.models.context import Context
from xfresearch.models.sampling import Sampling

TOKENS_BL = np.random.default_rng(0).integers(0, 257, (2, 8))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a")


def logits_of(lm, tokens_BL):
    model = transformer.bind(lm.config, lm.params)
    positions_BL = np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape)
    return model.logits(model(tokens_BL, Context(positions_BL)).hidden_BLD)


def test_load_returns_the_newest_step_or_the_requested_one(run):
    newest, older = xf.load(run), xf.load(run, step=10)
    assert (newest.step, older.step) == (20, 10)
    assert xf.load(f"{run}/checkpoints/10").step == 10
    for lm, seed in ((newest, 1), (older, 0)):
        jax.tree.map(np.testing.assert_array_equal, lm.params, rough_params(lm.config, seed))
    assert newest.config == newest.run.model and newest.run.sequence_length == 64
    assert newest.tokenizer.vocab_size == 257


def test_logits_equal_those_of_the_model(lm):
    logits_BLV = lm(TOKENS_BL)
    assert logits_BLV.shape == (2, 8, 257) and logits_BLV.dtype == np.float32
    assert relative_error(logits_BLV, logits_of(lm, TOKENS_BL)) < TOLERANCE["float32"]
    np.testing.assert_array_equal(lm(TOKENS_BL.tolist()), logits_BLV)


def test_every_listed_tap_is_captured(lm):
    names = lm.tap_names()
    assert names[0] == "embed" and names[-1] == "final" and len(set(names)) == len(names)
    values = lm.capture(TOKENS_BL, names)
    assert values.keys() == set(names)
    logits_BLV = values["final"] @ lm.params["embed"]["table"].T
    assert relative_error(logits_BLV, lm(TOKENS_BL)) < TOLERANCE["float32"]


def test_replacing_every_value_by_itself_changes_nothing(lm):
    replaced = lm(TOKENS_BL, replace={name: lambda value: value for name in lm.tap_names()})
    assert relative_error(replaced, lm(TOKENS_BL)) < TOLERANCE["float32"]


def test_replacing_patches_one_run_with_another(lm):
    other_BL = TOKENS_BL[::-1].copy()
    name = "blocks.0.attention.residual"
    value = lm.capture(other_BL, [name])[name]
    deeper = "blocks.1.attention.out"
    patched = lm(TOKENS_BL, replace={name: lambda _: value})
    if lm.run.model.blocks["main"].layout == "all_attention":  # nothing bypasses the first block
        assert relative_error(patched, lm(other_BL)) < TOLERANCE["float32"]
    assert relative_error(patched, lm(TOKENS_BL)) > 1e-2
    assert relative_error(lm(TOKENS_BL, replace={deeper: jnp.zeros_like}), lm(TOKENS_BL)) > 1e-2


def test_a_replacement_function_may_change_between_calls(gpt2):
    scale = [1.0]
    replace = {"embed": lambda value: value * scale[0]}
    first = gpt2(TOKENS_BL, replace=replace)
    scale[0] = 3.0
    assert relative_error(gpt2(TOKENS_BL, replace=replace), first) > 1e-2


def test_temperature_zero_is_greedy_and_a_seed_repeats_its_text(gpt2):
    ids = list(b"def main(")
    for _ in range(8):
        padded = np.array([ids + [0] * (32 - len(ids))])
        ids.append(int(np.asarray(gpt2(padded))[0, len(ids) - 1, :].argmax()))
    written = gpt2.generate("def main(", max_new_tokens=8, temperature=0.0, seed=5)
    assert written == gpt2.tokenizer.decode(ids[9:])
    texts = [gpt2.generate("def main(", max_new_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_several_prompts_give_the_same_texts_as_each_alone(gpt2):
    prompts = ["def main(", "", "é"]
    texts = gpt2.generate(prompts, max_new_tokens=8, temperature=1.5, top_k=20, seed=3)
    assert texts == [gpt2.generate(p, max_new_tokens=8, temperature=1.5, top_k=20, seed=3) for p in prompts]
    assert gpt2.generate([]) == []


def test_each_prompt_may_have_a_seed(gpt2):
    """A prompt with another seed is no copy of itself."""
    seeds = [3, 4, 3]
    texts = gpt2.generate(["def main("] * 3, max_new_tokens=8, temperature=1.5, seed=seeds)
    assert texts[:2] == [gpt2.generate("def main(", max_new_tokens=8, temperature=1.5, seed=seed) for seed in (3, 4)]
    assert len(set(texts)) == 3


def test_streamed_text_is_the_returned_text_in_whole_characters(gpt2):
    pieces = {0: [], 1: []}
    texts = gpt2.generate(
        ["a", "b"], max_new_tokens=40, temperature=3.0, stream=lambda i, text, ids: pieces[i].append((text, ids))
    )
    assert ["".join(text for text, _ in pieces[i]) for i in (0, 1)] == texts
    assert [sum(len(ids) for _, ids in pieces[i]) for i in (0, 1)] == [40, 40]
    assert len(pieces[0]) >= 40 // decoding.CHUNK


def test_a_character_split_between_chunks_is_streamed_whole(gpt2, monkeypatch):
    text = "naïve 日本"
    chunks = [[[byte]] for byte in text.encode()]
    monkeypatch.setattr(decoding, "generate", lambda *args, **options: iter(chunks))
    pieces = []
    assert gpt2.generate("x", stream=lambda i, piece, ids: pieces.append(piece)) == text
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


class Letters(Tokenizer):
    """A tokenizer whose ids are the first `count` bytes. `options` are further options of Tokenizer."""

    def __init__(self, count: int = 256, **options):
        super().__init__([bytes([i]) for i in range(count)], {}, end_of_text=10, **options)

    def _encode(self, text: bytes) -> list[int]:
        return list(text)


def with_tokenizer(lm, tokenizer, vocab_size: int = 257):
    """`lm` with another tokenizer and the first `vocab_size` rows of its embedding table."""
    params = lm.params | {"embed": {"table": lm.params["embed"]["table"][:vocab_size]}}
    return xf.LanguageModel(replace(lm.config, vocab_size=vocab_size), params, tokenizer, lm.run)


def written(lm, prompt, count: int, **settings) -> dict[int, list[int]]:
    """The ids generated after each prompt."""
    ids = {}
    lm.generate(prompt, count, stream=lambda i, _, new: ids.setdefault(i, []).extend(new), **settings)
    return ids


def test_every_prompt_follows_the_begin_of_text_token(gpt2):
    lm = with_tokenizer(gpt2, Letters(begin_of_text=3))
    result = written(lm, ["ab", ""], 6, temperature=0.0)
    for index, prompt in enumerate(([3, 97, 98], [3])):
        expected = decoding.generate(lm.config, lm.params, [prompt], 6, Sampling(0.0), vocab_size=256)
        assert result[index] == sum((row for (row,) in expected), [])


def test_a_text_ends_at_any_stop_token(gpt2):
    whole = written(with_tokenizer(gpt2, Letters()), "a", 30, temperature=2.0)[0]
    lm = with_tokenizer(gpt2, Letters(stops=(500, whole[11])))
    assert lm.tokenizer.stops == (10, whole[11])
    assert written(lm, "a", 30, temperature=2.0)[0] == whole[: whole.index(whole[11])] and 10 not in whole


def test_a_tokenizer_may_have_ids_beyond_the_models_vocabulary(gpt2):
    """Such as a separator that was added to a tokenizer without one."""
    lm = with_tokenizer(gpt2, ByteTokenizer(), vocab_size=256)
    assert len(written(lm, "abc", 5, temperature=0.0)[0]) == 5
    with pytest.raises(xf.UserError, match="prompt='' has token 256, but the model's vocabulary ends at 255"):
        lm.generate(["abc", ""])


def test_the_padding_of_a_vocabulary_is_never_sampled(gpt2):
    ids = written(with_tokenizer(gpt2, Letters(200)), "abc", 60, temperature=50.0)[0]
    assert max(ids) in range(150, 200)


def test_text_after_a_prompt_keeps_its_first_space(gpt2, monkeypatch):
    monkeypatch.setattr(decoding, "generate", lambda *args, **options: iter([[[32, 98]] * 2]))
    assert with_tokenizer(gpt2, Letters(dummy_prefix=True)).generate(["a", ""]) == [" b", "b"]


def test_by_default_text_fills_the_position_table(gpt2):
    pieces = []
    gpt2.generate("abcd", stream=lambda i, text, ids: pieces.extend(ids), temperature=0.0)
    assert len(pieces) == 64 - 4


def test_a_saved_model_is_loaded_bit_for_bit(lm, tmp_path):
    lm.step = 7
    lm.save(tmp_path / "deep" / "b")
    loaded = xf.load(tmp_path / "deep" / "b")
    assert (loaded.step, loaded.config, loaded.run) == (7, lm.config, lm.run)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, lm.params)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["b"]
    (tmp_path / "empty").mkdir()
    lm.save(tmp_path / "empty")
    assert xf.load(tmp_path / "empty").config == lm.config
    with pytest.raises(xf.UserError, match="already exists"):
        lm.save(tmp_path / "deep" / "b")


def test_a_failed_save_leaves_nothing(gpt2, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("xfresearch.checkpoints.store.save_params", fail)
    with pytest.raises(OSError, match="disk full"):
        gpt2.save(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def damage(run, step: int) -> None:
    """Truncates every data file of a checkpoint to half its size."""
    for path in (run / "checkpoints" / str(step)).rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_load_warns_about_a_damaged_newest_checkpoint_and_uses_the_one_before(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    damage(copy, 20)
    assert xf.load(copy).step == 10
    warning = capsys.readouterr().err
    assert "checkpoint 20 is damaged" in warning and warning.count("\n") == 1
    with pytest.raises(xf.UserError, match="checkpoint 20 is damaged"):
        xf.load(copy, step=20)
    damage(copy, 10)
    with pytest.raises(xf.UserError, match="none of its checkpoints can be read"):
        xf.load(copy)


def test_paths_that_are_not_runs_give_one_line_errors(run, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(run, tmp_path / "untrained", ignore=lambda *_: ["checkpoints"])
    cases = [
        ({"path": tmp_path / "none"}, "does not exist: it must be a run's directory"),
        ({"path": tmp_path / "empty"}, "is not a run's directory"),
        ({"path": tmp_path / "untrained"}, "has no checkpoint yet"),
        ({"path": run, "step": 15}, "has no checkpoint of step 15: it has steps 10, 20"),
        ({"path": f"{run}/checkpoints/15"}, "has no checkpoint of step 15"),
        ({"path": f"{run}/checkpoints/10", "step": 20}, "step=20 is not allowed with the path"),
        ({"path": f"{tmp_path}/none/checkpoints/10"}, "config.json"),
    ]
    for arguments, text in cases:
        with pytest.raises(xf.UserError, match=text) as caught:
            xf.load(**arguments)
        assert "\n" not in str(caught.value)


def test_mistakes_in_calls_give_one_line_errors(gpt2):
    long = np.zeros((1, 65), int)
    cases = [
        (lambda: gpt2([1, 2, 3]), r"tokens of shape \(3,\).*for a single sequence pass \[tokens\]"),
        (lambda: gpt2([[1, 2], [3]]), "not rows of equal length"),
        (lambda: gpt2([[0.5]]), "must be integers"),
        (lambda: gpt2([[]]), "must be integers"),
        (lambda: gpt2([[257]]), "token 257 is not allowed: the model's token ids are 0 to 256"),
        (lambda: gpt2([[-1]]), "token -1 is not allowed: the model's token ids are 0 to 256"),
        (lambda: gpt2(long), "tokens of length 65 are not allowed: the length must be at most 64"),
        (lambda: gpt2.capture(long, ["embed"]), "tokens of length 65 are not allowed: the length must be at most 64"),
        (lambda: gpt2.capture([[1]], ["embde"]), "tap 'embde'.*did you mean 'embed'"),
        (lambda: gpt2([[1]], replace={"blocks.0.attention.otu": abs}), "did you mean 'blocks.0.attention.out'"),
        (lambda: gpt2([[1]], replace={"embed": lambda x: x[:, :, 0]}), "returned shape"),
        (lambda: gpt2([[1]], replace={"embed": "x"}), "replace.'embed'. must be a function, the new value or an xf.Patch"),
        (lambda: gpt2([[1]], replace={"embed": np.zeros_like}), "replace.'embed'. cannot be traced: it must use jax.numpy"),
        (lambda: gpt2([[1]], replace={"embed": np.zeros((2, 1, 1))}), r"'embed'. returned shape \(2, 1, 1\): it must be"),
        (lambda: gpt2.capture([[1]], "embed", segments_BL=[[1, 1]]), r"segments_BL of shape \(1, 2\).* \(1, 1\)"),
        (lambda: gpt2.generate([1, "a"]), "prompt=1.* a string"),
        (lambda: gpt2.generate("a" * 60, max_new_tokens=5), "at least 1 and at most 4 after a prompt of 60"),
        (lambda: gpt2.generate("a" * 64), "a prompt of 64 tokens.* shorter"),
        (lambda: gpt2.generate("a", max_new_tokens=0), "max_new_tokens=0"),
        (lambda: gpt2.generate("a", temperature=-0.1), "temperature=-0.1"),
        (lambda: gpt2.generate("a", top_p=0.0), "top_p=0.0"),
        (lambda: gpt2.generate("a", top_k=-3), "top_k=-3"),
        (lambda: gpt2.generate("a", seed=-1), "seed=-1"),
        (lambda: gpt2.generate("\udc80"), "it must be text that UTF-8 can encode"),
        (lambda: gpt2.generate(5), "prompt=5 is not allowed: it must be a text, a list of texts, the ids of a text"),
        (lambda: gpt2.generate(None), "prompt=None is not allowed: it must be a text"),
        (lambda: gpt2.generate("a", max_new_tokens=2.5), "max_new_tokens=2.5 .* an integer"),
        (lambda: gpt2.generate("a", seed="x"), "seed='x' .* an integer"),
        (lambda: gpt2.generate("a", seed=1.5), "seed=1.5 .* an integer"),
        (lambda: gpt2([[1]], positions_BL=[[64]]), "positions_BL has 64, .* at least 0 and below 64"),
        (lambda: gpt2([[1]], positions_BL=[[-1]]), "positions_BL has -1, .* at least 0 and below 64"),
        (lambda: gpt2.memory("x"), "'x' has no memory: it must be the path of a sublayer with one, such as 'blocks.0"),
        (lambda: gpt2.unembed(np.zeros((1, 3))), r"x of shape \(1, 3\) is not allowed: it must be \[..., 32\]"),
    ]
    for call, text in cases:
        with pytest.raises(xf.UserError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_models_without_a_position_table_have_no_longest_text():
    lm = tiny_model("moe")
    assert lm(np.zeros((1, 65), int)).shape == (1, 65, 257)
    assert lm.generate("a" * 64, max_new_tokens=3, temperature=0)


def test_a_float32_model_is_loaded_in_float64(tmp_path):
    """Whatever its format, with the same parameters, also after it was saved."""
    lm = tiny_model("llama")
    expected = lm([[1, 2]])
    lm.export_hf(tmp_path / "hf")
    lm.save(tmp_path / "run")
    for name in ("hf", "run"):
        wide = xf.load(tmp_path / name, dtype="float64")
        wide.save(tmp_path / f"{name}64")
        for loaded in (wide, xf.load(tmp_path / f"{name}64")):
            assert (loaded.config.param_dtype, loaded([[1, 2]]).dtype) == ("float64", np.float64)
            assert relative_error(loaded([[1, 2]]), expected) < TOLERANCE["float32"]
        jax.tree.map(np.testing.assert_array_equal, wide.params, lm.params)


def test_a_float64_run_is_loaded_in_float64(tmp_path):
    jax.config.update("jax_enable_x64", True)
    run = make_run(tmp_path / "wide", steps=(1,), model__dtype="float64", model__param_dtype="float64")
    jax.config.update("jax_enable_x64", False)
    lm = xf.load(run)
    assert lm([[1, 2]]).dtype == np.float64
    assert isinstance(lm.generate("a", max_new_tokens=3, temperature=0), str)
