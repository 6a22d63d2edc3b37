"""What several methods share: chains, draft models, proposals, layer sets."""
