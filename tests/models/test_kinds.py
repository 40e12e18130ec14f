"""A kind is refused if its module does not read an option that its config inherits."""

from dataclasses import dataclass

import pytest

from xfresearch.models.kinds import Kind
from xfresearch.models.mixers.softmax.attention import Attention
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.options import AttendOptions, MemoryOptions, PositionOptions, WeightOptions
from xfresearch.models.sublayer import SublayerConfig, SublayerModule, reads
from xfresearch.options.fields import option


@dataclass(frozen=True)
class WholeConfig(SoftmaxConfig):
    kind: str = option("whole", "kind of mixer")


class Whole(Attention):
    """Softmax attention under another name."""


class WithoutMemory(Attention):
    """Replaces the step that attends, and forgets the slots."""

    @reads(PositionOptions, WeightOptions, AttendOptions)
    def attend(self, p, ctx, cache):
        raise NotImplementedError


class Unmarked(Attention):
    def position(self, p, ctx):
        return p


class WithSlots(WithoutMemory):
    @reads(PositionOptions, WeightOptions, AttendOptions, MemoryOptions)
    def attend(self, p, ctx, cache):
        raise NotImplementedError


def test_a_kind_that_replaces_no_step_reads_what_its_base_reads():
    assert Kind(WholeConfig, Whole, "y").module is Whole


def test_a_mixer_that_inherits_memory_slots_and_does_not_read_them_is_refused():
    with pytest.raises(TypeError) as error:
        Kind(WholeConfig, WithoutMemory, "y")
    words = "WholeConfig inherits options that no step of WithoutMemory reads: MemoryOptions.memory_slots, "
    words += "MemoryOptions.memory_heads, MemoryOptions.memory_activation ("
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_a_step_that_replaces_another_reads_only_what_its_own_mark_has():
    with pytest.raises(TypeError, match=r"no step of Unmarked reads: PositionOptions.position, PositionOptions.rope, "):
        Kind(WholeConfig, Unmarked, "y")


def test_a_step_that_marks_what_it_reads_is_accepted_also_two_classes_down():
    assert Kind(WholeConfig, WithSlots, "y").options is WholeConfig


def test_options_of_a_class_that_no_step_knows_are_refused():
    """Also if the module is not derived from one that has marks."""

    @dataclass(frozen=True)
    class Config(MemoryOptions, SublayerConfig):
        kind: str = option("alone", "kind of mixer")
        size: int = option(4, "an option of this kind needs no mark", low=1)

    class Alone(SublayerModule):
        pass

    with pytest.raises(TypeError, match="no step of Alone reads: MemoryOptions.memory_slots"):
        Kind(Config, Alone, "y")
    Alone.__call__ = reads(MemoryOptions)(lambda self, x_BLD, ctx, cache=None: None)
    assert Kind(Config, Alone, "y")


def test_an_option_that_a_kind_declares_again_is_its_own():
    @dataclass(frozen=True)
    class Config(MemoryOptions, SublayerConfig):
        kind: str = option("own", "kind of mixer")
        memory_slots: int = option(0, "read by this kind in its own way", low=0)

    with pytest.raises(TypeError, match="reads: MemoryOptions.memory_heads, MemoryOptions.memory_activation "):
        Kind(Config, SublayerModule, "y")
