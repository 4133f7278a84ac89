"""Sources of graphs: profiler recordings and ONNX models."""
