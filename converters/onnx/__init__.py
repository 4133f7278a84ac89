"""ONNX model to graph: the operators of one step, with shapes, never run."""

from onerank.converters.onnx.convert import OnnxConversion, convert_onnx

__all__ = ["OnnxConversion", "convert_onnx"]
