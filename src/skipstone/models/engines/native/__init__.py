"""The native engine: fused C++ over a range of layers in one call, on the CPU, in float32 whatever the weights are stored in."""
