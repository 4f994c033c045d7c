"""The contrastive job's loss, and the rules among its options."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pixelrag.config.problems import Conflict
from pixelrag.config.section import Section

Dim = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0)]


class LossConfig(Section):
    name: Literal["infonce", "siglip"] = "infonce"
    """infonce: a softmax over all documents; siglip: a sigmoid of each pair, with a bias."""
    temperature: float | None = Field(None, ge=0.01, le=1)
    """Temperature of the similarities, to begin with; null = 0.07, and 0.1 for siglip."""
    learnable_temperature: bool = True
    """Train the temperature, held between 0.01 and 1."""
    bias: float | None = None
    """Bias of siglip to begin with; it is trained. null = -10, as in the paper."""
    hardness_alpha: float = Field(0, ge=0)
    """Add alpha times its similarity to each negative's logit: harder ones weigh more (LLaVE)."""
    label_smoothing: float = Field(0, ge=0, lt=1)
    """Share of the target that is spread evenly over all that compete."""
    bidirectional: bool = False
    """Mean of the losses query to document and document to query, over all ranks' queries."""
    matryoshka_dims: list[Dim] = Field(default_factory=list)
    """Train these first dimensions as embeddings of their own, beside the whole (Matryoshka)."""
    matryoshka_weights: list[Weight] | None = None
    """Weights of their losses, in their order; null = 1, which is the weight of the whole."""
    mask_same_content: bool = True
    """A document equal to a query's positive, wherever in the batch, is no negative of it."""
    mask_margin: float | None = None
    """A document more similar than the best positive by more than this is no negative."""
    mask_guide: str | None = None
    """A frozen encoder; a document that it finds more similar than the positive is no negative."""
    tile_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Similarities of so many rows and columns are held at once; the loss does not change."""
    exchange: Literal["all_gather", "ring"] = "all_gather"
    """all_gather: each rank holds all documents; ring: one rank's at a time, passed around."""

    @property
    def initial_temperature(self) -> float:
        """`temperature`, or what null stands for."""
        if self.temperature is not None:
            return self.temperature
        return 0.1 if self.name == "siglip" else 0.07

    @property
    def initial_bias(self) -> float | None:
        """`bias`, or what null stands for; None where the loss has no bias."""
        return (-10.0 if self.bias is None else self.bias) if self.name == "siglip" else None


def loss_conflicts(loss: LossConfig) -> Iterator[Conflict]:
    """Options that would not act, or not as they say."""
    if loss.bias is not None and loss.name != "siglip":
        yield Conflict(
            ("loss.bias", "loss.name"),
            got=f"loss.bias {loss.bias:g} with loss.name {loss.name}, which has none",
            remedy="set loss.name to siglip, or loss.bias to null",
        )
    if loss.bidirectional and loss.name == "siglip":
        yield Conflict(
            ("loss.bidirectional", "loss.name"),
            got="loss.bidirectional with loss.name siglip, whose pairs have no direction",
            remedy="set loss.bidirectional false, or loss.name to infonce",
        )
    dims, weights = loss.matryoshka_dims, loss.matryoshka_weights
    if len(set(dims)) < len(dims):
        yield Conflict(
            ("loss.matryoshka_dims",),
            got=f"loss.matryoshka_dims {dims}, which names a number of dimensions twice",
            remedy="name each once; loss.matryoshka_weights says how much it counts",
        )
    if weights is not None and len(weights) != len(dims):
        yield Conflict(
            ("loss.matryoshka_weights", "loss.matryoshka_dims"),
            got=f"{len(weights)} loss.matryoshka_weights for {len(dims)} of loss.matryoshka_dims",
            remedy="give one weight to each of them, in their order",
        )
