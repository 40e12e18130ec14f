"""The options of a block. The layout decides which sublayers a block has, and so which groups of options."""

from dataclasses import dataclass, make_dataclass, replace
from typing import Any, Literal

from xfresearch.models.kinds import ROLES
from xfresearch.models.layouts import LAYOUTS, Layout
from xfresearch.models.norms import HIDDEN, WITH_ALPHA, WITH_EPSILON, NormKind, NormSpec, SiteKind
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.options.fields import choice, group, option
from xfresearch.runtime.errors import require

SITES = {
    "in": "norm of the input of {}",
    "out": "norm of the output of {}",
    "post": "norm of the residual stream after {}",
}


@dataclass(frozen=True)
class NormSite:
    """Options of a single norm. Where an option is None or '', the block's option applies."""

    kind: SiteKind = option("", "kind of this norm; '' for the block's")
    gain: bool | None = option(None, "this norm has a trained gain; None for the block's option")
    bias: bool | None = option(None, "this norm has a trained bias; None for the block's option")
    epsilon: float | None = option(None, "epsilon of this norm; None for the block's option", low=0.0)
    alpha: float | None = option(
        None, "initial alpha of this dyt or derf norm; None for the block's option", above=0.0, decides="initialisation"
    )


@dataclass(frozen=True)
class BlockConfig:
    """Options that all blocks have. `BLOCKS` holds a class for each layout, with a group for each of its sublayers."""

    layout: str = option("pre_norm", "sublayers of the block, its norms and skips (models/layouts.py)")
    norm: NormKind = option("layer", "kind of the block's norms")
    norm_gain: bool = option(True, "norms have a trained gain")
    norm_offset: float = option(0.0, "constant added to trained gains, which start at 1 minus it (Gemma: 1)", low=0.0)
    norm_bias: bool = option(False, "norms have a trained bias")
    norm_epsilon: float = option(1e-5, "epsilon of norms, added to the mean square", low=0.0)
    norm_cast: Literal["after_gain", "before_gain"] = option(
        "after_gain",
        "where norms convert from float32 back to the dtype of the computation (before_gain: Llama)",
        decides="precision",
    )
    norm_alpha: float = option(0.5, "initial alpha of dyt and derf norms", above=0.0, decides="initialisation")
    dropout: float = option(0.0, "dropout rate of each sublayer's output", low=0.0, high=0.99, decides="training")

    @property
    def norms(self) -> Any:
        """A NormSite for each site of the layout: a group of options in every class of BLOCKS."""
        raise NotImplementedError

    @property
    def sublayers(self) -> dict[str, SublayerConfig]:
        """The options of each sublayer, in the order of the layout."""
        return {branch.name: getattr(self, branch.name) for branch in LAYOUTS[self.layout].branches}

    def norm_spec(self, kind: str = "") -> NormSpec:
        """The block's norm, or a norm of another kind with the same options."""
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
        """The norm at a site of the layout, for example 'attention_in'."""
        changes = {name: value for name, value in vars(getattr(self.norms, site)).items() if value not in (None, "")}
        return replace(self.norm_spec(), **changes)


def _class_of(name: str, layout: Layout) -> type[BlockConfig]:
    """The class of options of a block with this layout."""
    sites = [
        (f"{branch.name}_{place}", NormSite, group(NormSite(), SITES[place].format(branch.name)))
        for branch in layout.branches
        for place in branch.norms
    ]
    norms = make_dataclass("NormSites", sites, frozen=True)
    fields = [
        ("layout", str, option(name, BlockConfig.__dataclass_fields__["layout"].metadata["doc"])),
        ("norms", norms, group(norms(), "options of single norms, where they differ from the block's")),
    ]
    if layout.optional_gain:
        doc = "initial value of the feed-forward's trained gain; 0 for 0.1 sqrt(18 / depth)"
        fields.append(("branch_gain", float, option(0.0, doc, low=0.0, decides="initialisation")))
    for branch in layout.branches:
        kinds, default, doc = ROLES[branch.role]
        classes = {kind: each.options for kind, each in kinds.items()}
        fields.append((branch.name, SublayerConfig, choice(classes, default, doc)))
    return make_dataclass("BlockConfig", fields, bases=(BlockConfig,), frozen=True)


BLOCKS = {name: _class_of(name, layout) for name, layout in LAYOUTS.items()}


def check_norms(block: BlockConfig, elsewhere: tuple[str, ...], key: str) -> None:
    """Raises UserError if an option of norms is set that no norm reads. `elsewhere` are the kinds of norms outside the
    blocks that take their options from this block."""
    layout = LAYOUTS[block.layout]
    specs = [block.norm_at(site) for site in layout.sites]
    inner = [kind for options in block.sublayers.values() for kind in options.norm_kinds]
    kinds = {spec.kind for spec in specs} | set(inner) | set(elsewhere)
    trained = kinds - {"none", HIDDEN}
    inherit = any(not getattr(block.norms, site).kind for site in layout.sites)
    read = {
        "norm": (inherit, "a norm whose kind is not set in norms"),
        "norm_gain": (trained, "a norm"),
        "norm_bias": (trained, "a norm"),
        "norm_cast": (kinds - {"none"}, "a norm"),
        "norm_offset": (trained and block.norm_gain, "norms with a gain"),
        "norm_epsilon": (kinds & {*WITH_EPSILON, HIDDEN}, f"a norm of kind {', '.join(WITH_EPSILON)}"),
        "norm_alpha": (kinds & {*WITH_ALPHA}, f"a norm of kind {', '.join(WITH_ALPHA)}"),
    }
    for name, (reader, words) in read.items():
        default = BlockConfig.__dataclass_fields__[name].default
        value = getattr(block, name)
        require(bool(reader) or value == default, f"{key}.{name}", value, f"{default!r}, its default: only {words} reads it")
    for site in layout.sites:
        _check_site(getattr(block.norms, site), block.norm_at(site), f"{key}.norms.{site}")


def _check_site(site: NormSite, spec: NormSpec, key: str) -> None:
    read = {
        "gain": spec.kind != "none",
        "bias": spec.kind != "none",
        "epsilon": spec.kind in WITH_EPSILON,
        "alpha": spec.kind in WITH_ALPHA,
    }
    for name, reads in read.items():
        value = getattr(site, name)
        require(reads or value is None, f"{key}.{name}", value, f"unset: a norm of kind {spec.kind!r} does not have it")
