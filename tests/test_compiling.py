"""The compiler that does nothing."""

from dale.compiling import as_it_is


def test_as_it_is_gives_the_function_itself() -> None:
    assert as_it_is(len) is len
