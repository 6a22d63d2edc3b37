"""The interface to transformers: options, processors, prepared calls, outputs, `enable`, `custom_generate`."""
