"""Graph passes, one per file. Each changes an onnx_ir model in place and returns how often."""
