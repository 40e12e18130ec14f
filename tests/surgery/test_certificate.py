"""A certificate covers every row of every table: one entry that is broken by 1e-3 is noticed, whatever tensor it is in."""

from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch.surgery import certificate as module
from xfresearch.surgery.certificate import BOUND, Certificate, Domain, difference_of_logits
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import Network, take_apart

BLOCK = "model__blocks__main__"


def broken(network: Network, path: str, at: tuple, layer: int = -1) -> Network:
    """The network with 1e-3 added to one entry of a parameter, outside the blocks or in a layer."""

    def changed(params: dict) -> dict:
        new = params[path].copy()
        new[at] += 1e-3
        return params | {path: new}

    if layer < 0:
        return replace(network, outside=changed(network.outside))
    return replace(network, params=lambda n: changed(network.params(n)) if n == layer else network.params(n))


def difference(before: Network, after: Network) -> float:
    """What the certificate measures on its whole domain, without text."""
    result = Certificate(["broken"], False)
    with jax.enable_x64(True):
        domain, runners = Domain.of(before, after, None), [Runner(each, "float64") for each in (before, after)]
        both = (domain.batches[0].pass_of(runner).logits_BLV for runner in runners)
        result.differences["all tokens"] = difference_of_logits(*both)
        domain.compare(result, runners)
    return result.relative


MODELS = {
    "gpt2": {BLOCK + "attention__memory_slots": 3, BLOCK + "attention__kv_heads": 2},
    "moe": {BLOCK + "feed_forward__moe__shared": 1, BLOCK + "attention__position": "relative_key"},
    "vanilla_2017_decoder": {},
    "all_attention": {"model__head_bias": True},
    "bert": {},
}
# They add the same number to all logits of a softmax, or are the same for all keys: no logit of the model depends on them.
IDLE = ("key/bias",)


@pytest.mark.parametrize("name", MODELS)
def test_one_broken_entry_of_any_tensor_is_noticed(name):
    lm = tiny_model(name, **MODELS[name])
    network, rng = take_apart(lm.config, lm.params), np.random.default_rng(0)
    assert difference(network, network) == 0
    for layer in range(-1, lm.config.depth):
        for path, leaf in (network.outside if layer < 0 else network.params(layer)).items():
            if not path.endswith(IDLE):
                at = tuple(rng.integers(size) for size in leaf.shape)
                assert difference(network, broken(network, path, at, layer)) > BOUND, (layer, path, at)


def test_every_token_and_the_last_position_count(monkeypatch):
    """A row of any token, and a position that no sequence of text reaches."""
    monkeypatch.setattr(module, "LONGEST", 16)
    lm = tiny_model("gpt2", model__tie_embeddings=False)
    network = take_apart(lm.config, lm.params)
    domain = Domain.of(network, network, None)
    assert len(domain.batches) == 1 + 257 // 16 and domain.longest.tokens_BL.shape == (1, lm.config.max_length)
    assert {*np.concatenate([each.tokens_BL for each in domain.batches]).ravel()} == set(range(257))
    for token in (0, 100, 256):
        assert difference(network, broken(network, "embed/table", (token, 5))) > BOUND
    assert difference(network, broken(network, "position/table", (lm.config.max_length - 1, 5))) > BOUND
    assert str(domain) == f"all 257 tokens, positions 0 to {lm.config.max_length - 1}, no text, packed documents, prefixes"


def test_every_type_of_a_token_counts():
    lm = tiny_model("bert", model__token_types=3)
    network = take_apart(lm.config, lm.params)
    for row in range(3):
        assert difference(network, broken(network, "token_type/table", (row, 5))) > BOUND
    assert "token types 0 to 2, packed documents" in str(Domain.of(network, network, None))


def found_by(before: Network, after: Network) -> dict[str, bool]:
    """Which of the certificate's comparisons find a difference."""
    result = Certificate(["broken"], False)
    with jax.enable_x64(True):
        Domain.of(before, after, None).compare(result, [Runner(each, "float64") for each in (before, after)])
    return {name: each["relative"] > BOUND for name, each in result.differences.items()}


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
@pytest.mark.parametrize("forgotten", ["segments_BL", "prefix_BL", "positions_BL"])
def test_documents_prefixes_and_positions_count(name, forgotten, monkeypatch):
    """A network that forgets one kind of input differs where it is given, and nowhere else."""
    lm = tiny_model(name)
    network = take_apart(lm.config, lm.params)
    after, right = replace(network, outside=dict(network.outside)), Runner.run

    def forgets(runner, tokens_BL, cached=0, in_turn=False, source_BS=None, read=MappingProxyType({}), of_source=None):
        kept = dict(read)
        if forgotten in read and runner.network is after:
            kept[forgotten] = np.broadcast_to(nothing[forgotten], tokens_BL.shape)
        return right(runner, tokens_BL, cached, in_turn, source_BS, kept, of_source or {})

    length = Domain.of(network, network, None).packed.tokens_BL.shape[1]
    nothing = {"segments_BL": 1, "prefix_BL": 0, "positions_BL": np.arange(length)}
    assert not any(found_by(network, after).values())
    monkeypatch.setattr(Runner, "run", forgets)
    read = Domain.of(network, network, None).packed.read
    matters = forgotten in read and (forgotten != "positions_BL" or lm.config.position != "none")
    found = found_by(network, after)
    assert found.pop("packed documents") == matters and not any(found.values())


def test_an_expert_that_no_token_chooses_counts():
    lm = tiny_model("moe")
    router = lm.params["blocks"]["main"]["feed_forward"]["router"]
    router["kernel"] = router["kernel"].at[..., 1:].set(0)  # expert 0 or the first ones of equal scores
    network = take_apart(lm.config, lm.params)
    last = lm.config.blocks["main"].feed_forward.moe.experts - 1
    assert difference(network, broken(network, "feed_forward/experts/down", (last, 3, 5), 0)) > BOUND


def test_an_outlier_hides_no_difference():
    """One token is masked with a logit of -5e6: it must not be the scale of the others' errors."""
    a_BLV = np.random.default_rng(0).standard_normal((1, 4, 50))
    a_BLV[..., 7] = -5e6
    b_BLV = a_BLV.copy()
    b_BLV[0, 2, 9] += 1e-6
    result = difference_of_logits(a_BLV, b_BLV)
    assert result["absolute"] == pytest.approx(1e-6) and 1e-7 < result["relative"] < 1e-5
    b_BLV = a_BLV * (1 + 1e-16 * np.sign(a_BLV))
    b_BLV[..., 7] = np.nextafter(-5e6, 0)  # rounding of the outlier itself
    assert difference_of_logits(a_BLV, b_BLV)["relative"] < 1e-15


def test_equal_logits_and_nan_are_no_exception():
    same = np.zeros((1, 2, 8))
    assert difference_of_logits(same, same)["relative"] == 0 < difference_of_logits(same, same + 1e-3)["relative"]
    assert np.isnan(difference_of_logits(np.ones((1, 2, 8)), np.full((1, 2, 8), np.nan))["relative"])
