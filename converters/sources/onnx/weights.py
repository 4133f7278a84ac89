"""Weights of an ONNX model."""

from pathlib import Path
from typing import Any

from onerank.ir.errors import OnnxError


def data_of(path: Path, tensor: Any) -> Any:
    """Return a weight's data as an array of its shape.

    Raises:
        OnnxError: it holds other data than its shape and type say.
    """
    import onnx

    try:
        return onnx.numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise OnnxError(
            f"{path}: the weight {tensor.name!r} of shape {list(tensor.dims)} holds other "
            f"data ({error}); the file is damaged"
        ) from error
