"""Models and their tokenizers as GGUF files for llama.cpp."""
