"""What a decoder is to skipstone: its family, its layers, its keys and values, its passes."""
