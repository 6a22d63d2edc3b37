"""What `auto` does next: pure rules over numbers. No torch, no clock, no files and no model in here."""
