"""What the menu entries of workloads have in common: options for data, and the shape of a transformer. Needs no torch."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.registry import Option, TypedOptions, declare
from trainers.data import data_sets

SUBSET_SEED = 38850191  # the seed in the code of the study that trained ResNet-101 on 131,072 images of ImageNet
IMAGENET_CLASSES = 1000


class ImageOptions(TypedOptions):
    data: str = declare("synthetic", "the data set; the model's head has one output per class of it", data_sets.IMAGE_DATA_SETS)
    image_size: int = declare(224, "width and height of an image in pixels", least=1)
    dropout: bool = declare(False, "the architecture has no dropout", (False,))
    subset: int | None = declare(None, "number of images to train on, drawn by subset_seed; null: all", kind="int", least=1)
    subset_seed: int = declare(SUBSET_SEED, "the seed that draws the images of a subset", least=0, most=2**63 - 1)


def list_image_options(image_size: int, dropout: str | None, smallest: int = 1) -> tuple[Option, ...]:
    """The options of an image workload.

    image_size: the default width in pixels. dropout: the architecture's own rates of dropout in words; None if it has no
    dropout. smallest: the smallest width in pixels that the architecture supports.
    """
    changes: dict[str, dict[str, Any]] = {"image_size": {"default": image_size, "least": smallest}}
    if dropout is not None:
        changes["dropout"] = {"summary": f"the architecture's own dropout: {dropout}", "choices": (False, True)}
    return tuple(msgspec.structs.replace(option, **changes.get(option.name, {})) for option in ImageOptions.list_options())


class TokenOptions(TypedOptions):
    data: str = declare("synthetic", "the data set of tokens", data_sets.TOKEN_DATA_SETS)
    tokens_file: str | None = declare(None, "with data: tokens, a file that `python -m trainers tokenize` wrote", kind="str")


def list_token_options(data: str) -> tuple[Option, ...]:
    """The options of a language workload. data: the default data set."""
    data_option, file_option = TokenOptions.list_options()
    return data_option.replace_default(data), file_option


def refuse_tokens(cell: Cell) -> str | None:
    """Why the data options of a cell with a language workload contradict each other, as a sentence, or None if they do not."""
    options = TokenOptions(cell.options)
    tokens_file, data = options.tokens_file, options.data
    if data == "tokens" and not tokens_file:
        return "tokens_file: data: tokens needs a file. Allowed: the path of a file that `python -m trainers tokenize` wrote."
    if data != "tokens" and tokens_file is not None:
        return f"tokens_file: found {tokens_file} with data: {data}. Allowed: null, or data: tokens."
    return None


class Shape(msgspec.Struct, frozen=True):
    """The shape of a transformer."""

    layer_count: int
    """Number of blocks."""
    width: int
    """Size of the hidden state."""
    head_count: int
    """Number of attention heads, a divisor of the width."""

    def list_options(self) -> tuple[Option, ...]:
        """The options `n_layer`, `n_embd` and `n_head`; their defaults are this shape."""
        return (
            Option("n_layer", self.layer_count, "transformer blocks", least=1),
            Option("n_embd", self.width, "width", least=1),
            Option("n_head", self.head_count, "attention heads; a divisor of n_embd", least=1),
        )


def read_shape(cell: Cell) -> Shape:
    """The shape of the transformer that a cell asks for with its options."""
    layer_count, width, head_count = (cast("int", cell.options[name]) for name in ("n_layer", "n_embd", "n_head"))
    return Shape(layer_count, width, head_count)


def refuse_shape(cell: Cell) -> str | None:
    """Why a transformer with the shape that a cell asks for cannot be built, as a sentence, or None if it can."""
    shape = read_shape(cell)
    if shape.width % shape.head_count:
        return (
            f"n_head: {shape.head_count} does not divide the width of {shape.width} (n_embd). Allowed: a divisor of the width."
        )
    return None
