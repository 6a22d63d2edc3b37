"""Requests to edit programs: the programs stand in them as they are."""

from __future__ import annotations

from recipes.data.edits import edits


def test_programs_of_the_asked_length_stand_in_the_requests() -> None:
    short, long = "\r\n".join(["a = 1"] * 7), "\r\n".join(["def f():", *["\tx = 1"] * 8, "\treturn x"])
    found = edits([{"code": short}, {"code": long}])
    assert len(found) == 1
    (turn,) = found[0]["turns"]
    assert turn.endswith("```python\ndef f():\n" + "    x = 1\n" * 8 + "    return x\n```")
