"""What the model and every block have: options of no kind, embeddings, heads and norms."""

from tests.variants.case import BOTH, NORM, ModelCase, Parameter
from tests.variants.parameters import fan, inputs


def of_width(shape, model, block) -> float:
    return fan(model.width, model)


def alpha(site: str) -> Parameter:
    """Of the norm at a site, which may have its own."""
    return Parameter(lambda shape, model, block: getattr(block.norms, site).alpha or block.norm_alpha)


BERT = {"token_types": 2, "head_activation": "gelu", "head_norm": "layer", "head_bias": True}
CASES = [
    ModelCase(
        "model",
        parameters={
            "embed/table": Parameter(lambda shape, model, block: model.embedding_std or fan(model.width, model)),
            "embedding_scale": Parameter(lambda shape, model, block: model.width**0.5),
            **{f"{name}/table": Parameter(of_width) for name in ("head", "position", "token_type")},
            "head_bias/bias": Parameter(0.0),
            "head_layer/dense/kernel": Parameter(inputs, "io"),
            "head_layer/dense/bias": Parameter(0.0),
            **{path: NORM for path in ("embedding_norm", "final_norm", "head_layer/norm")},
            **{f"block/{sublayer}_norm_{place}": NORM for sublayer in BOTH for place in ("in", "out", "post")},
            **{f"block/{sublayer}_norm_in/alpha": alpha(f"{sublayer}_in") for sublayer in BOTH},
        },
        values={
            **{name: "size" for name in ("width", "depth", "vocab_size", "max_length", "pattern", "segments")},
            **{name: "covered" for name in ("init", "dtype", "param_dtype", "causal", "norm_cast")},
            "logit_softcap": [2.0],
            "position_offset": [2],
            "norm_epsilon": [0.1],
            "norm_offset": [1.0],
            "embedding_norm": ["layer"],
            "final_norm": ["dyt", "none"],
            **{name: [value] for name, value in BERT.items()},
        },
        needs_of={
            "position_offset": {"position": "learned"},
            **{name: {k: v for k, v in BERT.items() if k != name} for name in ("token_types", "head_norm")},
            "norm_alpha": {"norm": "dyt"},
            "branch_gain": {"layout": "skipless"},
        },
    )
]
