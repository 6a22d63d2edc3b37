"""An OpenAI-compatible server: bodies in (`schemas`, `asking`), a scheduler over rows of the loop (`jobs`, `lanes`, `engine`),
text out (`writing`, `answers`), over HTTP (`app`)."""
