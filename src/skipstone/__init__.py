"""skipstone makes language models answer faster without changing what they say. This file is the public API."""
