"""A runtime that rounds every tensor as a device with half tensors does, on any machine."""
