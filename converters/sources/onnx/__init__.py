"""Convert an ONNX model to a graph: the operators of one step, with shapes, never run."""

from onerank.converters.sources.onnx.onnx_convert import OnnxConversion, convert_onnx

__all__ = ["OnnxConversion", "convert_onnx"]
