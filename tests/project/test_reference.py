"""The pages of docs/reference agree with the code."""

import pytest
import support_reference
from support_golden import same_as_golden


@pytest.mark.parametrize("name", support_reference.PAGES)
def test_the_page_of_a_file_has_its_keys(name):
    same_as_golden(f"../../docs/reference/{name}-file.md", support_reference.keys(name))


def test_the_page_of_commands_has_their_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    helps = {}
    for command in support_reference.COMMANDS:
        program, *verb = command.split()
        with pytest.raises(SystemExit) as end:
            support_reference.MAINS[program]([*verb, "--help"])
        helps[command] = capsys.readouterr().out
        assert end.value.code == 0
        assert "example:" in helps[command], command
    same_as_golden("../../docs/reference/commands.md", support_reference.commands(helps))


def test_the_page_of_states_has_every_state():
    same_as_golden("../../docs/reference/states.md", support_reference.states())
