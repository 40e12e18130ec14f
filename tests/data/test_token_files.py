"""Files of token ids of other programs, written here by the definitions of their formats."""

import struct

import numpy as np
import pytest

from xfresearch.data import token_corpus
from xfresearch.data.corpora import documents, splits
from xfresearch.data.pipeline import Batches, prepare, stream_tokens
from xfresearch.data.prepared import Prepared
from xfresearch.data.token_formats import open_tokens
from xfresearch.data.tokenizers import tokenizer_for
from xfresearch.runtime.errors import UserError

END = 256  # of a text, for the tokenizer of bytes
LENGTH, BATCH = 16, 4


def texts(count: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(97, 123, size) for size in random.integers(5, 60, count)]


def ended(count: int = 40, seed: int = 0) -> list[np.ndarray]:
    return [np.append(text, END) for text in texts(count, seed)]


def llm_c(path, ids, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())


def megatron(path, sequences, documents=None, code=8, dtype="<u2"):
    """`documents`: the number of the first sequence of each, and that of all sequences."""
    sizes = np.array([len(each) for each in sequences], "<i4")
    starts = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
    firsts = np.asarray(range(len(sequences) + 1) if documents is None else documents, "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(firsts))
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + starts.tobytes() + firsts.tobytes())
    path.write_bytes(np.concatenate(sequences).astype(dtype).tobytes())


def datatrove(path, docs, dtype="<u2", metadata=True):
    path.write_bytes(np.concatenate(docs).astype(dtype).tobytes())
    ends = np.cumsum([len(each) for each in docs])
    path.with_name(f"{path.name}.index").write_bytes(ends.astype("<u8").tobytes())
    if metadata:
        width = np.dtype(dtype).itemsize
        path.with_name(f"{path.name}.metadata").write_text(f"gpt2|{width}\n{ends[-1]}\n{ends[-1]} T")


FORMATS = {  # {name: (ending, what writes ids there, whether the format tells where documents end)}
    "nanoGPT": (".bin", lambda path, docs: path.write_bytes(np.concatenate(docs).astype("<u2").tobytes()), False),
    "raw uint32": (".bin", lambda path, docs: path.write_bytes(np.concatenate(docs).astype("<u4").tobytes()), False),
    "llm.c": (".bin", lambda path, docs: llm_c(path, np.concatenate(docs)), False),
    "llm.c uint32": (".bin", lambda path, docs: llm_c(path, np.concatenate(docs), 20240801, 7, "<u4"), False),
    "OLMo": (".npy", lambda path, docs: path.write_bytes(np.concatenate(docs).astype("<u4").tobytes()), False),
    "OLMo uint16": (".npy", lambda path, docs: path.write_bytes(np.concatenate(docs).astype("<u2").tobytes()), False),
    "NumPy": (".npy", lambda path, docs: np.save(path, np.concatenate(docs).astype("<u2")), False),
    "Megatron": (".bin", megatron, True),
    "Megatron int32": (".bin", lambda path, docs: megatron(path, docs, None, 4, "<i4"), True),
    "datatrove": (".ds", datatrove, True),
    "datatrove uint32": (".ds", lambda path, docs: datatrove(path, docs, "<u4"), True),
    "datatrove without metadata": (".ds", lambda path, docs: datatrove(path, docs, "<u4", False), True),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ids").mkdir()
    return tmp_path / "ids"


def config_of(make_config, path, **data):
    return make_config(corpus=f"tokens:{path}", sequence_length=LENGTH, batch_size=BATCH, **data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_its_ids_and_the_ends_of_documents(make_config, folder, name):
    suffix, write, tells = FORMATS[name]
    docs = ended()
    write(folder / f"train{suffix}", docs)
    write(folder / f"val{suffix}", ended(10, 1))
    assert splits(f"tokens:{folder}", config_of(make_config, folder).data) == ("train", "validation")
    tokens, numbers = stream_tokens(config_of(make_config, folder), "train")
    assert (tokens == np.concatenate(docs)).all()
    sizes = [len(each) for each in docs]
    if name.startswith("llm.c"):  # the separator stands before a text
        sizes = [sizes[0] - 1, *sizes[1:-1], sizes[-1], 1]
    assert np.bincount(numbers).tolist() == sizes
    kept = open_tokens(folder / f"train{suffix}").ends
    assert (kept is not None) == tells and (not tells or kept.tolist() == np.cumsum(sizes).tolist())
    meta = prepare(config_of(make_config, folder), "train").meta
    assert meta["n_bytes"] == meta["n_characters"] == sum(map(len, docs)) - len(docs)
    assert meta["n_documents"] == len(sizes) and meta["n_tokens"] == len(tokens)


def test_nothing_of_the_ids_is_copied(make_config, folder, tmp_path):
    FORMATS["nanoGPT"][1](folder / "train.bin", ended(50_000))
    prepare(config_of(make_config, folder), "train")
    made = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.array_record"))
    assert made < (folder / "train.bin").stat().st_size / 10


def test_rows_are_those_that_nanogpt_reads(make_config, folder):
    """get_batch: x = data[i : i + block_size], y = data[i + 1 : i + 1 + block_size], data a memory map of uint16."""
    FORMATS["nanoGPT"][1](folder / "train.bin", ended())
    FORMATS["nanoGPT"][1](folder / "val.bin", ended(10, 1))
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        data = np.memmap(folder / name, dtype=np.uint16, mode="r")
        rows = prepare(config_of(make_config, folder), split)
        offsets = np.arange(0, len(data) - LENGTH, LENGTH)
        read = rows.read(range(len(offsets)))
        assert (read["tokens"] == [data[i : i + LENGTH] for i in offsets]).all()
        assert (read["targets"] == [data[i + 1 : i + 1 + LENGTH] for i in offsets]).all()
        assert (read["weights"] == 1).all() and len(rows) - len(offsets) in (0, split != "train")


@pytest.mark.parametrize("magic, version, dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_batches_in_order_are_those_that_llm_c_reads(make_config, folder, magic, version, dtype):
    """dataloader.h, not shuffled: B*T + 1 ids from the header on, then B*T further; the last ones that fill no batch are
    left out."""
    llm_c(folder / "text_train_000001.bin", np.concatenate(ended()), magic, version, dtype)
    llm_c(folder / "text_val_000000.bin", np.concatenate(ended(10, 1)), magic, version, dtype)
    ids = np.fromfile(folder / "text_train_000001.bin", dtype, offset=1024)
    rows = prepare(config_of(make_config, folder), "train")
    for batch in range((len(ids) - 1) // (BATCH * LENGTH)):
        buffer = ids[batch * BATCH * LENGTH :][: BATCH * LENGTH + 1]
        read = rows.read(range(batch * BATCH, (batch + 1) * BATCH))
        assert (read["tokens"].ravel() == buffer[:-1]).all() and (read["targets"].ravel() == buffer[1:]).all()
    assert len(rows) == (len(ids) - 1) // LENGTH


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_whole_documents_do_not_mix_them(make_config, folder, name):
    suffix, write, _ = FORMATS[name]
    docs = ended()
    write(folder / f"train{suffix}", docs)
    read = prepare(config := config_of(make_config, folder, packing="documents"), "train")
    rows = read.read(range(len(read)))
    inside = rows["weights"] > 0
    counts = sum(len(each) for each in docs) - len(docs)
    held_out = prepare(config, "validation").meta
    assert abs(inside.sum() + held_out["n_predictions"] - counts) <= 2  # the cut to the held-out text, llm.c's first end
    assert (rows["tokens"][inside] == END).sum() == 0 or name.startswith("llm.c")


def test_a_sequence_of_megatron_is_part_of_a_document(folder):
    docs = ended(12)
    megatron(folder / "a.bin", docs, [0, 2, 5, 12])
    sizes = np.cumsum([len(each) for each in docs])
    assert open_tokens(folder / "a.bin").ends.tolist() == [sizes[1], sizes[4], sizes[11]]


def test_the_end_is_held_out_where_no_file_is(make_config, folder):
    data = np.concatenate(ended(200))
    llm_c(folder / "a.bin", data)
    train, held_out = (stream_tokens(config_of(make_config, folder), split)[0] for split in ("train", "validation"))
    assert (np.concatenate([train, held_out]) == data).all() and len(held_out) == round(len(data) * 0.05)


def test_a_large_file_is_read_in_parts_and_several_are_mixed(make_config, folder, monkeypatch):
    monkeypatch.setattr(token_corpus, "PART", 8000)
    docs = ended(400)
    datatrove(folder / "train.ds", docs)
    datatrove(folder / "val.ds", ended(10, 1))
    config = config_of(make_config, folder)
    made = Prepared(config.data, config.data.corpus[0], tokenizer_for(config.data), LENGTH)
    for shard in made.shards:  # in this process, which has the smaller PART
        made.require([shard.number])
    split = prepare(config, "train")
    tokens, numbers = stream_tokens(config, "train")
    assert split.parts == 3 and (tokens == np.concatenate(docs)).all()
    assert len(docs) <= len(np.unique(numbers)) < len(docs) + split.parts
    batches = Batches(config)
    read = np.concatenate([batches.batch(step)["tokens"] for step in range(len(split) // BATCH)])
    rows = split.read(range(len(split)))["tokens"]
    assert {row.tobytes() for row in read} <= {row.tobytes() for row in rows}
    assert len({row.tobytes() for row in read}) > 0.95 * len(rows)


def broken_index(folder):
    datatrove(folder / "a.ds", ended())
    (folder / "a.ds.index").write_bytes(np.array([5, 9], "<u8").tobytes())


def broken_sequences(folder):
    megatron(folder / "a.bin", ended())
    content = (folder / "a.idx").read_bytes()
    (folder / "a.idx").write_bytes(content[:-5])


BAD = {
    "highest id": (lambda f: llm_c(f / "a.bin", [1, 2, 257, 3] * 40), "a.bin: token 2 is id 257, and the tokenizer has 257"),
    "negative": (lambda f: megatron(f / "a.bin", [np.full(99, -3)], None, 4, "<i4"), "a.bin: token 0 is id -3, and the"),
    "cut": (lambda f: llm_c(f / "a.bin", [1] * 50, count=60), "its header states 60 tokens, 1,144 bytes; it has 1,124"),
    "version": (lambda f: llm_c(f / "a.bin", [1] * 50, version=2), "a.bin: a file of llm.c of version 2: it must be 1"),
    "half an id": (lambda f: (f / "a.bin").write_bytes(b"a\0" * 40 + b"b"), "81 bytes are no whole number of ids of 2"),
    "index": (broken_index, "a.ds: its documents end at token 9, and it has "),
    "sequences": (broken_sequences, "a.idx: it has 837 bytes, not those of 40 sequences: it was cut"),
    "floats": (lambda f: np.save(f / "a.npy", np.zeros(9)), r"a NumPy array float64\[9\]: token ids must be int"),
    "pickle": (lambda f: (f / "a.bin").write_bytes(b"\x80\x02}q"), "a.bin: a pickle, such as a PyTorch checkpoint"),
    "empty": (lambda f: (f / "a.bin").write_bytes(b""), "a.bin: the file is empty"),
    "none": (lambda f: None, "no file matches .*; it must be files named \\*.bin, \\*.npy, \\*.ds"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line(make_config, folder, name):
    write, words = BAD[name]
    write(folder)
    with pytest.raises(UserError, match=words) as raised:
        prepare(config_of(make_config, folder), "train")
    assert "\n" not in str(raised.value)


def test_documents_that_nothing_tells_apart_are_one_line(make_config, folder):
    FORMATS["nanoGPT"][1](folder / "a.bin", texts(30))
    assert prepare(config_of(make_config, folder), "train").meta["n_documents"] == 1
    with pytest.raises(UserError, match="no token is the end of text of config.data.tokenizer, 256, so its documents are"):
        prepare(config_of(make_config, folder, packing="documents"), "train")


@pytest.mark.parametrize("format", ["nanoGPT", "Megatron"])
def test_the_text_of_ids_is_that_of_their_tokenizer(make_config, folder, format, monkeypatch):
    suffix, write = FORMATS[format][:2]
    write(folder / f"a{suffix}", given := ended(30))
    data = config_of(make_config, folder).data
    tokenizer = tokenizer_for(data)
    expected = b"".join(tokenizer.decode_bytes(each) for each in given)
    for cut in (token_corpus._CUT, 7):
        monkeypatch.setattr(token_corpus, "_CUT", cut)
        found = [text for split in ("train", "validation") for text in documents(data.corpus[0], split, data, tokenizer)]
        assert b"".join(found) == expected and (cut == 7 or len(found) >= len(given))


def test_ids_have_no_text_without_their_tokenizer(make_config, folder):
    FORMATS["nanoGPT"][1](folder / "a.bin", texts(30))
    data = config_of(make_config, folder, tokenizer="bpe").data
    with pytest.raises(UserError, match="has the ids of tokens, and no text: config.data.tokenizer must be the one"):
        list(documents(data.corpus[0], "train", data))
    with pytest.raises(UserError, match="corpus 'tokens' needs a path: tokens:PATH"):
        splits("tokens", data)
