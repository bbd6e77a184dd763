"""What compiling and running TensorRT engines share, so that neither imports the other."""
