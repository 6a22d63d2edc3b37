"""`python -m tests.helpers.hasty`: skipstone's command line, where replicas come after a second of load, and stay."""

import functools

from skipstone.cli import main
from skipstone.serving.ray import serve

UP, DOWN = 1.0, 3600.0
"""Seconds of more or less load before replicas are added or taken away: the second, longer than tests take on any machine."""

if __name__ == "__main__":
    serve.ReplicaSettings = functools.partial(serve.ReplicaSettings, upscale_delay_seconds=UP, downscale_delay_seconds=DOWN)  # type: ignore[assignment,misc]
    main()
