"""Configs: how they are read and resolved, and the one-line error for every mistake."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs.option_table import describe
from tests.changing import change
from xfresearch.configs import variants
from xfresearch.configs.variants import VARIANTS
from xfresearch.models.catalogue import TABLES
from xfresearch.models.kinds import MIXERS
from xfresearch.options import shipped
from xfresearch.options.comparing import RESULT, differences, fingerprint, flat
from xfresearch.options.fields import leaves
from xfresearch.options.reading import from_dict, to_json
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import default_config, parse, read_json
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError

IMPORT = "from xfresearch.run_config.config_files import default_config"
MINE = (IMPORT, "def get_config():", " config = default_config()")

ROOT = Path(__file__).parent.parent
GPT2 = "--config=configs/gpt2.py:tiny"

# (arguments after the config, words that the error must contain)
MISTAKES = [
    ("--config.model.widht=64", ["config.model.widht=64", "'width'"]),
    ("--config.model.blocks.main.atention.heads=4", ["there is no key 'atention'", "did you mean 'attention'"]),
    ("--config.learning_rate=1", ["learning_rate=1", "did you mean 'optimizer.learning_rate'?"]),
    ("--config.training.warmup=1", ["training.warmup=1", "did you mean 'optimizer.warmup'?"]),
    ("--config.heads=4", ["config.heads=4", "did you mean 'model.blocks.main.attention.heads'?"]),
    ("--config.model.attention.heads=4", ["there is no key 'attention'", "'model.blocks.main.attention.heads'?"]),
    ("--config.every=4", ["did you mean 'checkpoint.every', 'evaluation.every' or 'log.every'?"]),
    ("--config.stepz 5", ["config.stepz=5", "'steps'"]),
    ("--config.steps=1e3", ["config.steps=1e3", "an integer"]),
    ("--config.seed=2147483648", ["config.seed=2147483648", "at most 2147483647"]),
    ("--config.steps=0", ["config.steps=0", "at least 1"]),
    ("--config.steps", ["--config.steps", "a value is missing"]),
    ("--config.optimizer.learning_rate=fast", ["learning_rate=fast", "a number"]),
    ("--config.optimizer.learning_rate=-1", ["learning_rate=-1.0", "at least 0.0"]),
    ("--config.optimizer.kind=adam", ["kind='adam'", "'adamw'", "did you mean 'adamw'"]),
    ("--config.optimizer.schedule=cos", ["schedule='cos'", "'cosine'"]),
    ("--config.model.tie_embeddings=maybe", ["tie_embeddings=maybe", "True or False"]),
    ("--config.model.blocks.main.norms.attention_in.gain=maybe", ["attention_in.gain=maybe", "it must be True or False"]),
    ("--config.model.blocks.main.norms.attention_in.epsilon=x", ["attention_in.epsilon=x", "it must be a number"]),
    ("--config.model=3", ["config.model=3", "not a group of keys"]),
    ("--config.model.width.x=3", ["config.model.width.x=3", "holds a single value"]),
    ("--config.model.blocks.main.attention.heads=5", ["attention.heads=5", "divisor of model.width=32"]),
    ("--config.model.blocks.main.attention.kv_heads=3", ["kv_heads=3", "divisor of attention.heads=4"]),
    ("--config.model.max_length=32", ["sequence_length=64", "model.max_length=32", "position table"]),
    ("--config.model.pattern=('main','other')", ["model.pattern=('main', 'other')", "names of blocks: main"]),
    ("--config.model.pattern=()", ["model.pattern=()", "at least one"]),
    ("--config.model.pattern=('main','main','main')", ["model.depth=2", "a multiple of the 3 blocks"]),
    (
        "--config.model.blocks.main.attention.rank=3",
        ["attention.rank=3", "0, its default: it is read only with query='merged'"],
    ),
    ("--config.model.blocks.main.layout=prenorm", ["layout='prenorm'", "did you mean 'pre_norm'"]),
    (
        "--config.model.blocks.main.norms.attention_out.kind=rms",
        ["norms.attention_out.kind=rms", "attention_in, feed_forward_in"],
    ),
    (
        "--config.model.blocks.main.feed_forward.kind=moe --config.model.blocks.main.feed_forward.moe.top_k=9",
        ["moe.top_k=9", "at most moe.experts=8"],
    ),
    ("--config.model.blocks.main.feed_forward.moe.top_k=1", ["feed_forward.moe.top_k=1", "no key 'moe'", "has", "bias"]),
    (
        "--config.model.blocks.main.attention.window=3 --config.model.blocks.main.attention.kind=lambda",
        ["attention.window=3", "no key 'window'", "lambdas"],
    ),
    ("--config.model.blocks.main.attention.kind=lamda", ["attention.kind='lamda'", "did you mean 'lambda'"]),
    ("--config.model.dtype=float64", ["model.param_dtype='float32'", "float64"]),
    (f"--config.model.width={2**63}", ["model.width=9223372036854775808", "below 2^31"]),
    ("--config.model.depth=1000000", ["model.depth=1000000", "at most 10000"]),
    ("--config.model.dropout=1.0", ["model.dropout=1.0", "at most 0.99"]),
    ("--config.training.accumulate=3", ["training.accumulate=3", "divisor of batch_size=8"]),
    ("--config.training.ema=1.5", ["training.ema=1.5", "at most"]),
    ("--config.data.corpus=()", ["data.corpus=()", "at least one corpus"]),
    ("--config.data.corpus=('a',", ["config.data.corpus=('a',", "a tuple, such as ('a', 'b')"]),
    ("--config.data.weights=(0.5,0.5)", ["data.weights=(0.5, 0.5)", "one weight above 0 for each of the 1 corpora"]),
    ("--config.data.packing=bins", ["packing='bins'", "'stream', 'documents'"]),
    ("--cfg=3", ["--cfg", "there is no such option"]),
    ("--steps 5", ["--steps", "there is no such option", "--config.KEY=VALUE"]),
    ("--wrkdir=runs/a", ["--wrkdir", "did you mean '--workdir'"]),
]


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("arguments, words", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_an_error_is_one_line_with_the_key_the_value_and_the_allowed_values(arguments, words):
    with pytest.raises(UserError) as error:
        parse([GPT2, *arguments.split()])
    line = str(error.value)
    assert "\n" not in line
    for word in words:
        assert word in line


FILES = [("configs/own.py", "no such file .the named configs are all_attention, .* variants.$")]
FILES += [
    (file, f"--config={file}: there is no such file; did you mean '{nearest}'[?] ")
    for file, nearest in (
        ("configs/gtp2.py", "gpt2"),
        ("gtp2:tiny", "gpt2:tiny"),
        ("gpt2.py:tiny", "gpt2:tiny"),
        ("mixtral", "mixtral_8x7b"),
        ("w_oo", "studies/w_o"),
    )
]
FILES += [("gpt2:tinny", "--config=gpt2:tinny: there is no size 'tinny'; did you mean 'tiny'[?] ")]
FILES += [("configs/common.py", "no function get_config .the named configs are .*gpt2")]


@pytest.mark.parametrize("file, words", FILES)
def test_an_error_for_a_wrong_file_or_size_lists_the_valid_ones(file, words):
    with pytest.raises(UserError, match=words):
        parse([f"--config={file}"])


@pytest.mark.parametrize(
    "key, full",
    [("learning_rate", "optimizer.learning_rate"), ("model.heads", "model.blocks.main.attention.heads")],
)
def test_a_missing_prefix_in_a_config_file_is_found(tmp_path, key, full):
    (tmp_path / "mine.py").write_text("\n".join([*MINE, f" config.{key} = 4", " return config", ""]))
    with pytest.raises(UserError, match=f"config.{key}=4: there is no such key; did you mean '{full}'[?]"):
        parse([f"--config={tmp_path / 'mine.py'}"])


def test_the_error_for_a_broken_config_file_is_one_line(tmp_path):
    (tmp_path / "broken.py").write_text("def get_config():\n    raise ValueError('wrong')\n")
    with pytest.raises(UserError, match="wrong, at line 2 of broken.py$"):
        parse([f"--config={tmp_path / 'broken.py'}"])


def test_a_config_file_is_a_module_that_returns_a_config(tmp_path):
    """Its classes find their module, also with annotations that are texts, and it knows its place."""
    made = ["from __future__ import annotations", "import dataclasses", "@dataclasses.dataclass", "class A:", " x: int = 5"]
    made += [*MINE, " config.steps, config.log.sample = A().x, __file__", " return config"]
    (tmp_path / "mine").write_text("\n".join(made))
    config = parse([f"--config={tmp_path / 'mine'}"])
    assert (config.steps, config.log.sample) == (5, str(tmp_path / "mine"))
    (tmp_path / "none.py").write_text("def get_config(size='x'):\n    pass\n")
    with pytest.raises(UserError, match="none.py:x: get_config has returned None: it must return a ConfigDict$"):
        parse([f"--config={tmp_path / 'none.py'}:x"])


def test_a_value_of_another_type_in_a_config_file_is_one_line_and_the_number_of_a_column_is_its_text(tmp_path):
    def read(*lines):
        (tmp_path / "mine.py").write_text("\n".join([*MINE, *(f" config.{line}" for line in lines), " return config"]))
        return parse(["--config", str(tmp_path / "mine.py")])

    with pytest.raises(UserError, match="mine.py: width='x' has the wrong type str: it must be int, at line 4 of mine.py$"):
        read("model.width = 'x'")
    with pytest.raises(UserError, match="mine.py: log=3 has the wrong type int: it must be a group of keys, at line 4"):
        read("log = 3")
    assert read("data.text_field = 2").data.text_field == "2"
    config = default_config()
    config.data.objective.kind = "seq2seq"
    config.data.objective.source_field = 1
    assert config.data.objective.source_field == "1"


def test_a_name_is_a_shipped_config_in_any_directory_and_a_path_is_a_file(tmp_path, monkeypatch):
    """A file of the user has the name of a shipped config, and imports another one by the name that works everywhere."""
    monkeypatch.chdir(tmp_path)
    lines = ["from xfresearch.configs import gpt2", "def get_config(size='tiny'):", "    config = gpt2.get_config(size)"]
    Path("llama.py").write_text("\n".join([*lines, "    config.seed = 7", "    return config", ""]))
    Path("llama").write_text(Path("llama.py").read_text())
    assert parse(["--config=llama:tiny"]).seed == 0
    assert parse(["--config=llama:tiny"]) == parse([f"--config={ROOT}/configs/llama.py:tiny"])
    for file in ("llama.py", "./llama.py:tiny", "./llama", f"{tmp_path}/llama.py"):
        assert parse([f"--config={file}"]).seed == 7, file


def named_configs() -> list[str]:
    """NAME and NAME:arg that the docstrings of configs list; variants:NAME stands for many, which other tests read."""
    listed = {name: list(shipped.about(file)[1]) for name, file in shipped.shipped().items() if "/" not in name}
    assert all(result[0] == name and f"{name}:tiny" in result for name, result in listed.items())
    return [name for result in listed.values() for name in result if name != "variants:NAME"]


@pytest.mark.parametrize("file", named_configs())
def test_named_configs_resolve_and_can_be_read_back_from_json(file):
    config = parse([f"--config={file}"])
    read_back = from_dict(Config, json.loads(to_json(config)))
    assert resolve(read_back) == config
    assert differences(config, read_back) == []


def test_overrides_accept_both_spellings_and_tuples():
    config = parse([GPT2, "--config.steps", "40", "--config.data.corpus=('wikitext2', 'python_stdlib')"])
    assert (config.steps, config.data.corpus) == (40, ("wikitext2", "python_stdlib"))
    one = [parse([GPT2, f"--config.data.corpus={text}"]).data.corpus for text in ("text_files:my texts", "'a b'", "['a b']")]
    assert one == [("text_files:my texts",), ("a b",), ("a b",)]


@pytest.mark.parametrize("name, norm", [("simplified", ("main.norms.attention_in.gain=False",)), ("normless", ())])
def test_an_override_of_main_also_changes_first_and_an_override_of_first_changes_only_first(name, norm):
    def blocks(*overrides):
        overrides = [f"--config.model.blocks.{override}" for override in overrides]
        return parse([f"--config=configs/{name}.py:tiny", *overrides]).model.blocks

    plain = blocks()
    different = {line.split(": ")[0] for line in differences(plain["main"], plain["first"], "block")}
    both = blocks("main.attention.heads=2", "main.attention.softcap=5.0", *norm)
    for block in both.values():
        assert (block.attention.heads, block.attention.head_size) == (2, 16)
        assert block.attention.softcap == 5
        assert block.norms.attention_in.gain is (False if norm else None)
    lines = differences(both["main"], both["first"], "block")
    assert {line.split(": ")[0] for line in lines} == different, "first differs from main only in what the file changes"
    alone = blocks("first.attention.heads=2", "first.dropout=0.1")
    assert (alone["first"].attention.heads, alone["first"].dropout) == (2, 0.1)
    assert alone["main"] == plain["main"]
    order = blocks("first.dropout=0.1", "main.dropout=0.2"), blocks("main.dropout=0.2", "first.dropout=0.1")
    assert [(b["first"].dropout, b["main"].dropout) for b in order] == [(0.1, 0.2)] * 2
    assert blocks("main.attention.value=learned")["first"].attention.value == plain["first"].attention.value


def test_differences_lists_each_changed_key():
    a, b = parse([GPT2]), parse([GPT2, "--config.seed=3", "--config.model.width=64"])
    assert differences(a, b)[:1] == ["config.model.blocks.main.attention.head_size: 8 -> 16"]
    assert "config.seed: 0 -> 3" in differences(a, b)


def test_a_config_that_python_code_makes_has_no_value_that_a_file_could_not_have():
    """The run could be saved, but not loaded."""
    attention = replace(MIXERS["differential"].options(kind="differential"), position="t5")
    config = change(change(Config(), "model.vocab_size", 257), "model.blocks.main.attention", attention)
    with pytest.raises(UserError, match=r"model.blocks.main.attention.position='t5' .* one of 'none', 'rope'"):
        resolve(config)
    with pytest.raises(UserError, match="^config.steps=0 is not allowed: it must be at least 1$"):
        resolve(replace(change(Config(), "model.vocab_size", 257), steps=0))


def test_the_error_for_an_unknown_variant_suggests_the_nearest_name():
    with pytest.raises(UserError, match="variants:alibbi: there is no variant 'alibbi'; did you mean 'alibi'"):
        parse(["--config", "variants:alibbi"])


def test_the_last_override_counts_and_none_unsets():
    gain = "--config.model.blocks.main.norms.attention_in.gain"
    values = [parse([GPT2, *more]).model.blocks["main"].norms.attention_in.gain for more in ([], [f"{gain}=False"])]
    assert values == [None, False]
    assert parse([GPT2, "--config.data.corpus=('a',)", "--config.data.corpus=('b',)"]).data.corpus == ("b",)
    assert parse([GPT2, f"{gain}=False", f"{gain}=None"]).model.blocks["main"].norms.attention_in.gain is None
    with pytest.raises(UserError, match="config.steps=None has the wrong type NoneType: it must be an integer"):
        parse([GPT2, "--config.steps=None"])


def test_the_table_has_every_key_of_every_variant():
    rows = re.findall(r"^\| `([\w.]+)`(?: \((?:kind|layout)=(.*?)\))? \|", describe(), re.MULTILINE)
    known = {path for path, _ in rows}
    for name in VARIANTS:
        keys = flat(parse([f"--config=configs/variants.py:{name}"]))
        assert {re.sub(r"\.blocks\.\w+", ".blocks.main", key) for key in keys} <= known, name
    kinds = dict(rows)
    assert {"glu", "swiglu"} <= set(kinds["model.blocks.main.feed_forward.gated_hidden"].split(", "))
    assert "post_norm" in kinds["model.blocks.main.norms.attention_post.kind"].split(", ")


def test_every_value_of_a_table_is_a_variant_that_says_what_the_table_says():
    """Of the options of a block with one stack, except those of the base."""
    base = flat(parse(["--config=variants:base"]))
    for key, usual in variants.BASE.items():
        path = f"model{key}" if key.startswith(".") else f"model.blocks.main.{key}"
        assert base[path] == usual
        for name, entry in TABLES[key.removeprefix(".")].items():
            if name in (usual, "none") or getattr(entry, "reads_source", False):
                continue
            variant = VARIANTS[name]
            assert variant.changes[key] == name and flat(parse([f"--config=variants:{name}"]))[path] == name
            assert variant.what.startswith(entry.formula) and variant.source == (entry.paper or "-")
            also = [(k, v) for k, v in variant.changes.items() if k != key]
            assert all(f"; {k.removeprefix('.')}={v!r}" in variant.what for k, v in also)


def test_fingerprints_stay_when_an_option_is_added():
    """Results of studies are known by them. They change with the default of an option that decides results."""
    changed = ("optimizer.learning_rate=0.01", "model.blocks.main.feed_forward.kind=swiglu", "training.remat=full")
    config = parse(["--config=variants:tiny", *(f"--config.{each}" for each in changed)])
    assert fingerprint(config) == "7eac78282c225125" and fingerprint(parse(["--config=t5:tiny"])) == "97333cdb70e620d4"


def test_fingerprints_differ_where_options_do():
    """Groups that the default config has not are at their defaults in some of these, with another layout or kind."""
    block = "--config.model.stacks.encoder.blocks.main"
    more = ([], [f"{block}.layout=parallel"], [f"{block}.layout=attention_only"])
    configs = [parse([f"--config=variants:{name}"]) for name in VARIANTS] + [parse(["--config=t5:tiny", *x]) for x in more]
    deciding = [[(leaf.path, leaf.value) for leaf in leaves(config) if leaf.decides in RESULT] for config in configs]
    assert len(set(map(fingerprint, configs))) == len(set(map(str, deciding))) > 50


def test_options_of_precision_make_another_run_and_those_of_execution_do_not():
    tiny = "--config=configs/variants.py:tiny"
    config, remat = parse([tiny]), parse([tiny, "--config.training.remat=full"])
    keys = ("model.dtype=bfloat16", "model.param_dtype=float64", "model.blocks.main.norm_cast=before_gain")
    assert len({fingerprint(config), *(fingerprint(parse([tiny, f"--config.{key}"])) for key in keys)}) == 4
    assert fingerprint(config) == fingerprint(remat) != fingerprint(remat, also=("training.",))
    assert fingerprint(config) == fingerprint(config, also=("training.", "model.", "mesh."))


def test_a_key_of_an_earlier_version_is_named_with_the_file(tmp_path):
    """`data.text_field` was `data.field`: the user renames it in the run's config.json."""
    file = tmp_path / "config.json"
    file.write_text(to_json(Config()).replace('"text_field"', '"field"'))
    with pytest.raises(UserError, match=f"^{file}: config.data.field='text': there is no such key; .* 'text_field'"):
        read_json(file)
    file.write_text(file.read_text().replace('"field"', '"text_field"'))
    assert read_json(file) == resolve(Config())
