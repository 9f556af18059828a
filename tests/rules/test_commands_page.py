"""docs/commands.md says what the parsers say."""

from tests import commands_page


def test_the_reference_is_that_of_the_parsers() -> None:
    """An option enters or leaves the page together with its command."""
    page = commands_page.PAGE.read_text(encoding="ascii")
    assert commands_page.page_text(page) == page, "renew with: python -m tests.commands_page"
