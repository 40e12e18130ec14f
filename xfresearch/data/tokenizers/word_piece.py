"""BERT's vocab.txt, which is converted to a tokenizer.json: words in pieces, of which those inside a word begin with ##."""

import io
import json

from etils import epath

from xfresearch.data.tokenizers.special_tokens import SETTINGS, SpecialTokens, name_of
from xfresearch.runtime.files import read_bytes

NAMES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


def bert_tokenizer(vocabulary: epath.Path, special: SpecialTokens) -> str:
    """The tokenizer.json for a vocab.txt and the settings beside it. Texts are in lower case unless these say otherwise, as
    in `transformers`. Raises ValueError if a special token is not in the vocabulary."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    settings = json.loads(special.files.get(SETTINGS, b"{}"))
    names = {name: name_of(settings.get(f"{name}_token")) or default for name, default in NAMES.items()}
    lines = io.StringIO(read_bytes(vocabulary).decode(), newline=None)  # str.splitlines would cut a token at U+2028
    ids = {line.rstrip("\n"): number for number, line in enumerate(lines)}
    if missing := [name for name in names.values() if name not in ids]:
        raise ValueError(f"it has no {missing[0]}, which BERT's vocabularies have")
    hf = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=names["unk"]))
    hf.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    hf.add_special_tokens(list(names.values()))
    first, last = names["cls"], names["sep"]
    hf.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(name, ids[name]) for name in (first, last)],
    )
    return hf.to_str()
