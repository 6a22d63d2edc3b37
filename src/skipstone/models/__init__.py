"""What a decoder is to skipstone: its family, its layers, its keys and values, its passes.

Threads: one thread at a time may use a model, different models may run in different threads; a server owns its model.
"""
