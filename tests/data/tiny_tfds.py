import tensorflow_datasets as tfds


class TinyTfds(tfds.core.GeneratorBasedBuilder):
    """A third-party data set: 400 texts, one split."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {"content": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=2)}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(400):
            yield i, {"content": f"text {i}", "label": i % 2}
