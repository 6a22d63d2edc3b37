"""Tokens to text, and what stop strings leave of it."""

from hypothesis import given
from hypothesis import strategies as st

from skipstone.serving.output_text import OutputText


class Letters:
    """A tokenizer whose tokens are characters; a code above 1000 is half of one: two in a row are the character."""

    def decode(self, tokens: list[int], **_: object) -> str:
        text, place = "", 0
        while place < len(tokens):
            if tokens[place] >= 1000:
                whole = place + 1 < len(tokens)
                text += chr(tokens[place] - 1000) if whole else "�"
                place += 2
            else:
                text += chr(tokens[place])
                place += 1
        return text


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


letters = st.text("abc", max_size=30)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5), min_size=30))
def test_a_text_ends_before_the_first_stop_string_however_it_comes_in(text: str, stops: list[str], sizes: list[int]) -> None:
    """Exact whatever the sizes of the pieces: nothing of a stop string is ever sent, nothing else is lost."""
    writer, tokens, sent = OutputText(Letters(), stops), ids(text), ""
    for size in sizes:
        sent += writer.add(tokens[:size])
        tokens = tokens[size:]
    sent += writer.rest()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (sent, writer.stopped, writer.count) == (text, False, len(text))
        return
    first = min(ends)  # the tokens up to here complete a stop string, and none before
    assert writer.stopped
    assert writer.count == first
    assert sent == text[: min(text[:first].find(stop) for stop in stops if stop in text[:first])]
    assert sent == writer.text


def test_half_a_character_waits_for_the_other_half() -> None:
    writer = OutputText(Letters(), [])
    assert writer.add([ord("a"), 1000 + 0x1F600]) == "a"
    assert writer.add([1000 + 0x1F600]) == "\U0001f600"


def test_what_could_become_a_stop_string_is_held_back_and_sent_when_it_does_not() -> None:
    writer = OutputText(Letters(), ["stop"])
    assert writer.add(ids("do st")) == "do "
    assert writer.add(ids("a")) == "sta"
    assert writer.add(ids("sto")) == ""
    assert writer.rest() == "sto"
    assert not writer.stopped


def test_an_end_of_text_token_is_counted_and_is_no_text() -> None:
    writer = OutputText(Letters(), [], frozenset({7}))
    assert writer.add([*ids("ab"), 7]) == "ab"
    assert writer.count == 3
