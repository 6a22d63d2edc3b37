"""The native engine: C++ over a range of layers in one call, on the CPU, computed in float32 for every dtype of the weights."""
