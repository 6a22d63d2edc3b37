"""Replicas of the server on Ray Serve. Nothing but `router`, which Ray imports by its name, imports ray before it is used."""
