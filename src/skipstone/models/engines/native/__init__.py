"""The native engine: a C++ library without Python in it, built once per level of the instruction set, loaded with ctypes."""
