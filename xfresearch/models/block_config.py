"""The options of a block. Its layout decides which sublayers it has, and so which groups of options."""

from dataclasses import dataclass, make_dataclass, replace
from typing import Literal

from xfresearch.config.fields import choice, group, option
from xfresearch.errors import require
from xfresearch.models.feed_forwards.dense import HIDDEN
from xfresearch.models.kinds import HOLDS
from xfresearch.models.layouts import LAYOUTS, Layout
from xfresearch.models.norms import NORMS, WITH_EPSILON, NormSpec
from xfresearch.models.sublayer import SublayerConfig

NormKind = Literal[*NORMS]
SITES = {
    "in": "norm of what {} reads",
    "out": "norm of what {} writes",
    "post": "norm after the residual sum of {}",
}


@dataclass(frozen=True)
class NormSite:
    """A norm where it differs from the block's; an option that is None or '' is the block's."""

    kind: Literal["", *NORMS] = option("", "kind of this norm; '' is the block's")
    gain: bool | None = option(None, "this norm has a trained gain")
    bias: bool | None = option(None, "this norm has a trained bias")
    epsilon: float | None = option(None, "added to the mean square in this norm", low=0.0)
    alpha: float | None = option(None, "first value of dyt's alpha in this norm", above=0.0, decides="initialisation")


@dataclass(frozen=True)
class BlockConfig:
    """Options that all blocks have. `BLOCKS` has the class of each layout, with a group for each of its sublayers."""

    layout: str = option("pre_norm", "sublayers of the block, and where its norms and skips are (models/layouts.py)")
    norm: NormKind = option("layer", "norm of every site of the block")
    norm_gain: bool = option(True, "norms have a trained gain")
    norm_offset: float = option(0.0, "added to every trained gain, which starts at 1 less (Gemma: 1)", low=0.0)
    norm_bias: bool = option(False, "norms have a trained bias")
    norm_epsilon: float = option(1e-5, "added to the mean square", low=0.0)
    norm_cast: Literal["after_gain", "before_gain"] = option(
        "after_gain",
        "where float32 goes back to the dtype of the computation (before_gain as in Llama)",
        decides="execution",
    )
    norm_alpha: float = option(0.5, "first value of dyt's alpha", above=0.0, decides="initialisation")
    dropout: float = option(0.0, "dropout rate of what each sublayer writes", low=0.0, high=0.99, decides="training")

    @property
    def sublayers(self) -> dict[str, SublayerConfig]:
        """The options of each sublayer, in the layout's order."""
        return {sublayer.name: getattr(self, sublayer.name) for sublayer in LAYOUTS[self.layout].sublayers}

    def norm_spec(self, kind: str = "") -> NormSpec:
        """The block's norm, or one of another kind with its options."""
        return NormSpec(
            kind or self.norm,
            self.norm_gain,
            self.norm_bias,
            self.norm_epsilon,
            self.norm_cast,
            self.norm_offset,
            self.norm_alpha,
        )

    def norm_at(self, site: str) -> NormSpec:
        """The norm at a site of the layout, 'attention_in' for instance."""
        own = {name: value for name, value in vars(getattr(self.norms, site)).items() if value not in (None, "")}
        return replace(self.norm_spec(), **own)


def _class_of(name: str, layout: Layout) -> type[BlockConfig]:
    """The options of a block with this layout."""
    sites = [
        (f"{s.name}_{place}", NormSite, group(NormSite(), SITES[place].format(s.name)))
        for s in layout.sublayers
        for place in s.norms
    ]
    norms = make_dataclass("NormSites", sites, frozen=True)
    fields = [
        ("layout", str, option(name, BlockConfig.__dataclass_fields__["layout"].metadata["doc"])),
        ("norms", norms, group(norms(), "norms of single sites, where they differ")),
    ]
    if layout.small_gain:
        doc = "first value of the feed-forward's trained gain; 0 is 0.1 sqrt(18 / depth)"
        fields.append(("branch_gain", float, option(0.0, doc, low=0.0, decides="initialisation")))
    for sublayer in layout.sublayers:
        kinds, default, doc = HOLDS[sublayer.holds]
        classes = {kind: each.options for kind, each in kinds.items()}
        fields.append((sublayer.name, SublayerConfig, choice(classes, default, doc)))
    return make_dataclass("BlockConfig", fields, bases=(BlockConfig,), frozen=True)


BLOCKS = {name: _class_of(name, layout) for name, layout in LAYOUTS.items()}


def check_norms(block: BlockConfig, elsewhere: tuple[str, ...], key: str) -> None:
    """UserError for an option of norms that no norm of the block reads. `elsewhere` are the kinds of the norms outside the
    blocks that have this block's options."""
    layout = LAYOUTS[block.layout]
    specs = [block.norm_at(site) for site in layout.sites]
    inner = [kind for options in block.sublayers.values() for kind in options.norm_kinds]
    kinds = {spec.kind for spec in specs} | set(inner) | set(elsewhere)
    trained = kinds - {"none", HIDDEN}
    inherit = any(not getattr(block.norms, site).kind for site in layout.sites)
    read = {
        "norm": (inherit, "a site whose kind norms does not set"),
        "norm_gain": (trained, "a norm"),
        "norm_bias": (trained, "a norm"),
        "norm_cast": (kinds - {"none"}, "a norm"),
        "norm_offset": (trained and block.norm_gain, "norms with a gain"),
        "norm_epsilon": (kinds & {*WITH_EPSILON, HIDDEN}, "a norm of kind layer, rms or scale"),
        "norm_alpha": ("dyt" in kinds, "a norm of kind dyt"),
    }
    for name, (reader, words) in read.items():
        default = BlockConfig.__dataclass_fields__[name].default
        value = getattr(block, name)
        require(reader or value == default, f"{key}.{name}", value, f"{default!r}, its default: only {words} reads it")
    for site in layout.sites:
        _check_site(getattr(block.norms, site), block.norm_at(site), f"{key}.norms.{site}")


def _check_site(site: NormSite, spec: NormSpec, key: str) -> None:
    read = {
        "gain": spec.kind != "none",
        "bias": spec.kind != "none",
        "epsilon": spec.kind in WITH_EPSILON,
        "alpha": spec.kind == "dyt",
    }
    for name, reads in read.items():
        value = getattr(site, name)
        require(reads or value is None, f"{key}.{name}", value, f"unset: a norm of kind {spec.kind!r} does not have it")
