"""ResiDual (Xie et al. 2023): a second stream sums the outputs of all sublayers, and the head reads both."""

from dataclasses import dataclass

from xfresearch.models.connections.connection import Connection
from xfresearch.models.stream import Carried


@dataclass(frozen=True)
class Dual(Connection):
    """x + f(x), and the same f(x) is added to the second stream, which no norm changes before the end."""

    ends_with = ("dual",)

    def carried(self, width: int) -> dict[str, Carried]:
        return {"dual": Carried("BLD", (width,), "embedding")}

    def write(self, parameters, depth, stream, block_BLD, y_BLD):
        values = {**stream.values, "dual": stream.values["dual"] + y_BLD}
        return super().write(parameters, depth, stream, block_BLD, y_BLD)._replace(values=values)

    def end(self, final_norm, stream):
        """x + norm(sum of the embedding and all outputs) (Xie et al. 2023, fig. 2)."""
        return stream.x_BLD + final_norm(stream.values["dual"])
