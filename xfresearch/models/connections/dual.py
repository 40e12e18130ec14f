"""ResiDual (Xie et al. 2023): a second stream sums the outputs of all sublayers, and the head reads both."""

from dataclasses import dataclass

from xfresearch.models.connections.connection import At, Connection
from xfresearch.models.stream import Carried


@dataclass(frozen=True)
class Dual(Connection):
    """x + f(x), and the same f(x) is added to the second stream, which no norm changes before the end."""

    ends_with = ("dual",)
    end_formula = "x + norm(sum of all outputs)"
    ends_in_norm = False

    def carried(self, at: At) -> dict[str, Carried]:
        return {"dual": Carried("BLD", (at.width,), "embedding", tap=True)}

    def write(self, at, parameters, stream, block_BLD, y_BLD):
        values = {**stream.values, "dual": stream.values["dual"] + y_BLD}
        return super().write(at, parameters, stream, block_BLD, y_BLD)._replace(values=values)

    def end(self, at, parameters, final_norm, stream):
        """x + norm(sum of the embedding and all outputs) (Xie et al. 2023, fig. 2)."""
        return stream.x_BLD + final_norm(stream.values["dual"])
