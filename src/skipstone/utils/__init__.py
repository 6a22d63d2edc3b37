"""Files, cache folders, settings files and records: nothing about models."""
