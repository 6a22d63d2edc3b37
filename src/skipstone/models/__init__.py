"""What a decoder is to skipstone: its family, its layers, its keys and values, its passes.

Threads: calls on one model take turns, different models run side by side; a server owns its model.
"""
