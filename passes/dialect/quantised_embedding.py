"""ew::quantised_embedding — `ew::embedding` of a table stored in a quantised format (only the chosen rows are dequantised).

    ids [T] int32 | int64, codes [V, F] uint8 | int8 | bf16, scales [V, G] f32?, offsets [V, G] f32?  ->  [T, F] f32

G = ceil(F / group) of `weight_format` (numerics.py). A head tied to this table names the same weights.
"""

import torch
from torch import Tensor

from .numerics import dequantise
from .registry import define


def reference(
    ids: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    weight_format: str,
    offset: int = 0,
    scale: float = 1.0,
) -> Tensor:
    rows = ids + offset if offset else ids

    def chosen(table: Tensor | None) -> Tensor | None:
        return None if table is None else torch.index_select(table, 0, rows)

    picked = torch.index_select(codes, 0, rows)
    return dequantise(picked, chosen(scales), chosen(offsets), weight_format) * scale


def shape(
    ids: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    weight_format: str,
    offset: int = 0,
    scale: float = 1.0,
) -> Tensor:
    return codes.new_empty((ids.shape[0], codes.shape[1]), dtype=torch.float32)


quantised_embedding = define(
    "quantised_embedding(Tensor ids, Tensor codes, Tensor? scales, Tensor? offsets, str weight_format, "
    "int offset=0, float scale=1.0) -> Tensor",
    reference,
    shape,
)
