"""`zero` alone is its help, and a wrong flag is answered with the usage of the subcommand it was given to."""

from __future__ import annotations

import pytest

from zero.tools import cli


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: zero ") and all(f"\n    {name}" in out for name in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["plan", "a", "b"], ["tune", "/nvme"], ["doctor"]])
def test_a_wrong_flag_prints_the_usage_of_its_subcommand(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--nope"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"usage: zero {arguments[0]} ") and error.endswith("unrecognized arguments: --nope\n")
