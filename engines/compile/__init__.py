"""Compilers: from ONNX graphs to TensorRT engines."""
