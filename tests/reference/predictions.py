"""Figures of predictions with changed values and of texts, from passes of the reference alone.

B rows of L tokens; D and E dimensions of a tap and of a target; F features.
"""

import numpy as np

from tests.reference.figures import Pass, log_softmax


def losses(p: Pass) -> np.ndarray:
    """[B]: the mean loss of the next token."""
    log_p = log_softmax(p.logits_BLV[:, :-1])
    return -np.take_along_axis(log_p, p.tokens_BL[:, 1:, None], -1)[..., 0].mean(1)


def losses_with(p: Pass, tap: str, value_BLE) -> np.ndarray:
    """[B]: the same if the value of a tap is this one."""
    losses_N = []
    for tokens_L, value_LE in zip(p.tokens_BL, value_BLE, strict=True):
        changes = {tap: lambda x, value_LE=value_LE: value_LE.reshape(x.shape)}
        losses_N.append(losses(Pass.of(p.config, p.params, tokens_L[None], changes))[0])
    return np.array(losses_N)


def of_tokens(p: Pass, tap: str) -> np.ndarray:
    """[B, L, D]: the value of a tap as a vector of each token."""
    return p.values[tap].reshape(*p.tokens_BL.shape, -1)


def features(p: Pass, taps: tuple[str, str], dictionary: dict, mean_E) -> dict[str, np.ndarray]:
    """The figures of a dictionary {part: array} that reads the first tap and predicts the second one, whose mean in training
    is mean_E: its coefficients [B, L, F], and of each row [B] what analysis/features.py defines."""
    x_BLD, y_BLE = (of_tokens(p, tap) for tap in taps)
    w = {name: np.asarray(value, np.float64) for name, value in dictionary.items()}
    z_BLF = x_BLD @ w["encoder_DF"] + w["encoder_bias_F"]
    f_BLF = np.where(z_BLF > w["threshold_F"], np.maximum(z_BLF, 0), 0)
    actual_BLE = f_BLF @ w["decoder_FE"] + w["decoder_bias_E"]
    return {
        "coefficients": f_BLF,
        "l0": (f_BLF > 0).sum(-1).mean(1),
        "error": ((y_BLE - actual_BLE) ** 2).sum((1, 2)),
        "variance": ((y_BLE - mean_E) ** 2).sum((1, 2)),
        "loss": losses(p),
        "ablated": losses_with(p, taps[1], np.broadcast_to(mean_E, y_BLE.shape)),
        "replaced": losses_with(p, taps[1], actual_BLE),
    }


def recalled(config, params, tokens, start: int) -> tuple[bool, float]:
    """Whether each token from `start` on is the most likely one after those before it, and the probability of them all."""
    logits_LV = Pass.of(config, params, [tokens]).logits_BLV[0]
    log_p_LV = log_softmax(logits_LV)
    said = [int(logits_LV[n - 1].argmax()) == tokens[n] for n in range(start, len(tokens))]
    return all(said), float(np.exp(sum(log_p_LV[n - 1, tokens[n]] for n in range(start, len(tokens)))))


def path(clean: Pass, corrupted: Pass, sender: str, receiver: str, senders: list[str]) -> np.ndarray:
    """[V]: logits of the last token of the corrupted pass in which `receiver` reads what it reads if `sender` writes as in
    the clean pass, and all other sublayers before it write as in the corrupted one (Wang et al. 2022)."""

    def again(changes: dict) -> Pass:
        fixed = {tap: lambda x, value=value: value for tap, value in changes.items()}
        return Pass.of(corrupted.config, corrupted.params, corrupted.tokens_BL, fixed)

    outs = {f"{name}.out": corrupted.values[f"{name}.out"][0] for name in senders}
    first = again(outs | {f"{sender}.out": clean.values[f"{sender}.out"][0]})
    return again({f"{receiver}.in": first.values[f"{receiver}.in"][0]}).logits_BLV[0, -1]
