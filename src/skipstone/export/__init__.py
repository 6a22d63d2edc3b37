"""Exports the layers that LayerSkip or a layer search drafts with, as files for engines without early exits."""
