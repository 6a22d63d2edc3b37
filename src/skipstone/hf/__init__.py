"""All that is transformers': options, processors, prepared calls, outputs, `enable`, `custom_generate`."""
