"""TFDS builders of the built-in corpora. They store ArrayRecord files and never import TensorFlow.

An example is {"text": bytes, "document": int}. A long document takes several examples with the same document number.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from xfresearch.runtime.progress import stage

_PIECE = 1 << 20


class _TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # it has no types
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, source, **kwargs):
        self.source = source
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "document": np.int64})
        return tfds.core.DatasetInfo(
            builder=self, description=type(self.source).__doc__, features=features, disable_shuffling=True
        )

    def _download_and_prepare(self, dl_manager, download_config=None) -> None:
        """Writes each split as one file, example by example. TFDS's own writer, which can also shuffle, holds up to a GB in
        memory, and needs TensorFlow for more."""
        self.info.set_splits(tfds.core.SplitDict([self._written(split) for split in self.source.splits]))

    def _written(self, split: str) -> tfds.core.SplitInfo:
        from array_record.python.array_record_module import ArrayRecordWriter

        names = tfds.core.ShardedFileTemplate(
            data_dir=self.data_path, dataset_name=self.name, split=split, filetype_suffix="array_record"
        )
        writer = ArrayRecordWriter(str(names.sharded_filepath(shard_index=0, num_shards=1)), "group_size:1")
        count = size = 0
        for example in self._examples(split):
            record = self.info.features.serialize_example(example)
            writer.write(record)
            count += 1
            size += len(record)
        writer.close()
        return tfds.core.SplitInfo(split, [count], size, names)

    def _examples(self, split: str) -> Iterator[dict]:
        empty = True
        with stage(f"reading {self.name} {split}") as progress:
            for number, text in enumerate(self.source.documents(split)):
                for start in range(0, len(text), _PIECE):
                    empty = False
                    yield {"text": text[start : start + _PIECE], "document": number}
                progress.update(len(text))
        if empty:  # TFDS does not support a split without examples
            yield {"text": b"", "document": 0}

    def _split_generators(self, dl_manager):  # abstract in the base class, whose writer is not used
        raise NotImplementedError

    def _generate_examples(self, split: str):
        raise NotImplementedError


class PythonStdlib(_TextBuilder):
    """`python_stdlib`"""


class TextFiles(_TextBuilder):
    """`text_files`"""


class Facts(_TextBuilder):
    """`facts`"""


class Wikitext2(_TextBuilder):
    """`wikitext2`"""


class Enwik8(_TextBuilder):
    """`enwik8`"""


class Text8(_TextBuilder):
    """`text8`"""


BUILDERS = {
    "python_stdlib": PythonStdlib,
    "text_files": TextFiles,
    "facts": Facts,
    "wikitext2": Wikitext2,
    "enwik8": Enwik8,
    "text8": Text8,
}


def prepare(name: str, source, directory: Path) -> None:
    """Writes `source` (text_sources.py) as TFDS data set `name` under `directory`."""
    tfds.disable_progress_bar()  # the progress bar above counts bytes
    builder = BUILDERS[name](source=source, data_dir=str(directory))
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints messages, which would mix with a command's output
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
