"""The table of gradient buckets that ``vescale explain`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale.cli._console import bytes_text, new_table

if TYPE_CHECKING:
    from vescale.ir import Prediction


def buckets_table(prediction: Prediction) -> Any:
    """Each bucket's axes, bytes and cost by the ring model, beside a reduction axis by axis."""
    table = new_table(
        "bucket",
        "gradients",
        "axes",
        "op",
        "size",
        "bytes",
        "axis by axis",
        "predicted",
        right=("bucket", "gradients", "size", "bytes", "axis by axis", "predicted"),
    )
    for number, bucket in enumerate(prediction.buckets):
        table.add_row(
            str(number),
            str(len(bucket.names)),
            ",".join(bucket.axes),
            " + ".join(op for op, _, _ in bucket.collectives),
            bytes_text(bucket.num_bytes),
            bytes_text(bucket.cost.num_bytes),
            bytes_text(bucket.per_axis_bytes),
            f"{bucket.cost.seconds * 1e3:.2f} ms",
        )
    return table
