"""The pages of docs/reference agree with the code."""

import pytest
import support_reference
from support_golden import same_as_golden


@pytest.mark.parametrize("name", support_reference.PAGES)
def test_the_page_of_a_file_has_its_keys(name):
    same_as_golden(f"../../docs/reference/{name}-file.md", support_reference.keys(name))


def test_the_page_of_commands_has_their_help():
    same_as_golden("../../docs/reference/commands.md", support_reference.commands())


def test_the_page_of_states_has_all():
    same_as_golden("../../docs/reference/states.md", support_reference.states())
