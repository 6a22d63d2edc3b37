"""Where the things lie that come with the package."""

from pathlib import Path

ASSETS = Path(__file__).parent
BUNDLED = "skipstone-nano"  # the name of the bundled model
NANO = ASSETS / "nano"  # the bundled model: recipes/train/nano.yaml makes it
HEADS = {"nano-code": NANO / "heads" / "code", "nano-maths": NANO / "heads" / "maths"}
"""Its exit heads by name: recipes/train/nano-heads-code.yaml and recipes/train/nano-heads-maths.yaml make them."""
DRAFTS = {"nano-draft": ASSETS / "nano-draft"}  # draft models by name: recipes/train/nano-draft.yaml makes it
PROMPTS = ASSETS / "prompts.jsonl"
