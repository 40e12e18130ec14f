"""Exponents of growth, and the options that a sweep chooses."""

import pytest

from xfresearch import bench
from xfresearch.benchmarks import fastest, flags, growing, update
from xfresearch.runtime.errors import UserError


def test_a_power_law_has_its_exponent():
    assert growing.exponent([256, 512, 1024], [3 * n**1.5 for n in (256, 512, 1024)]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "size, config, expected",
    [
        ("length", "llama", {"sequence_length": [64, 128, 256], "batch_size": [8, 4, 2]}),
        ("width", "llama", {"model.width": [32, 64, 128]}),
        ("depth", "llama", {"model.depth": [2, 4, 8]}),
        ("experts", "moe", {"model.blocks.main.feed_forward.moe.experts": [8, 16, 32]}),
    ],
)
def test_one_size_grows(size, config, expected):
    result = growing.grown(size, f"configs/{config}.py:tiny", [])
    assert list(result) == next(iter(expected.values()))
    for path, values in expected.items():
        for each, value in zip(result.values(), values, strict=True):
            for part in path.split("."):
                each = each[part] if isinstance(each, dict) else getattr(each, part)
            assert each == value


@pytest.mark.parametrize("name, hidden", [("moe", [32, 64, 128]), ("llama", [88, 168, 344])])
def test_a_wider_model_has_more_heads_and_hidden_units(name, hidden):
    """The hidden size of moe is given, and that of llama follows from the width."""
    result = growing.grown("width", f"configs/{name}.py:tiny", [])
    blocks = [each.model.blocks["main"] for each in result.values()]
    assert [block.attention.heads for block in blocks] == [4, 8, 16]
    assert [block.feed_forward.hidden for block in blocks] == hidden


def test_time_and_flops_are_fitted_per_token(monkeypatch, capsys):
    """Made-up times, as the length to the power of 1/2."""

    def measured(starts, rounds, apart):
        return [{"config": n, "error": "", "ms": 512 * n**0.5, "tokens": 512, "flops": 512 * n**0.25} for n in starts]

    monkeypatch.setattr(update, "measured", measured)
    monkeypatch.setattr(update, "report", lambda rows, config: {})
    bench.main(["update", "--config", "configs/llama.py:tiny", "--grow", "length"])
    assert "length^0.50; its FLOPs in closed form as length^0.25" in capsys.readouterr().out


@pytest.mark.parametrize("together, expected", [(1.8, {"training.layers": "unroll"}), (0.99, {})])
def test_a_sweep_keeps_what_is_faster(capsys, together, expected):
    """Made-up speeds: unrolled layers are twice as fast, a larger chunk of the loss only by chance. `auto` is not measured
    against the same by name."""
    given = ["--config.training.layers=scan", "--config.training.loss_rows=512", "--config.batch_size=32"]
    config, compared = flags.read("configs/llama.py:tiny", given), []

    def measured(starts, rounds, apart):
        now, other = starts["now"], starts["other"]
        compared.append((now, other))
        if other.remat == "full":
            raise UserError("no memory")
        speed = 2.0 if (now.layers, other.layers) == ("scan", "unroll") else 1.5 if other.loss_rows == 1024 else 0.9
        low = speed if other.layers != now.layers else 0.9
        if [each for each in compared if each[0] == now and each[1] == other] != [(now, other)]:  # the last, all together
            speed = low = together
        return [{}, {"ratio": speed, "ratio_low": low, "ratio_high": speed, "memory_bytes": 1e9, "error": ""}]

    rows, best = fastest.sweep(config, 3, measured, lambda each: each.training)
    assert best == expected
    assert {"option": "training.remat", "value": "full", "error": "no memory"} in rows
    assert "plain" not in {row["value"] for row in rows}  # it is what auto chooses here
    words = capsys.readouterr().out
    assert ("Use: --config.training.layers=unroll\n" in words) == bool(expected)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--grow depth --against torch", "--against is not allowed with --grow"),
        ("--sweep --grow depth", "--grow is not allowed with --sweep|--sweep is not allowed with --grow"),
        ("--sweep --config configs/moe.py:tiny", "--config=configs/moe.py:tiny is not allowed: --sweep takes one config"),
        ("--grow experts", "--grow=experts is not allowed: the config has no experts"),
        ("--grow heads", "--grow: .*'heads'"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        bench.main(["update", "--config", "configs/llama.py:tiny", *words.split()])
