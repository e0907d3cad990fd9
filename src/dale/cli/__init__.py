"""The command line: `dale COMMAND ...`. Errors are one line; exit code 2 for usage, 1 for failure."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NoReturn

from dale import __version__
from dale.errors import DaleError, nearest

COMMANDS = ("train", "sweep", "bench", "evaluate", "certify", "report", "export", "check-model", "list", "reproduce")


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for an error and the nearest option for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        options = [option for parser in self._all() for action in parser._actions for option in action.option_strings]
        for word in message.split():
            if word.startswith("-") and "unrecognized" in message:
                close = nearest(word.partition("=")[0], options)
                message = f"unknown option {word}" + (f"; did you mean {close}?" if close else "")
                break
        self.exit(2, f"dale: error: {message}\n")

    def _all(self) -> list[argparse.ArgumentParser]:
        """The parsers of the commands, whose unknown options argparse reports here; this one where there are none."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [parser for action in actions for parser in action.choices.values()] or [self]


def _parser(only: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dale",
        description="Train, evaluate and certify image classifiers that withstand adversarial input "
        "without giving up ordinary accuracy.",
        epilog="`dale COMMAND --help` explains a command. `dale train` alone trains on embedded digits, in a minute.",
    )
    parser.add_argument("--version", action="version", version=f"dale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name in COMMANDS:
        module = importlib.import_module(f"dale.cli.{name.replace('-', '_')}")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        if only == name:
            module.configure(sub)
        sub.set_defaults(_command=module.run)  # underscored: `run` is an argument of several commands
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default where there is one and the help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        known = action.default in (None, []) or action.default is False or "default" in (action.help or "")
        return action.help if known else super()._get_help_string(action)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    word = next((a for a in argv if not a.startswith("-")), None)
    if word is not None and word not in COMMANDS:
        close = nearest(word, COMMANDS)
        hint = f"; did you mean {close!r}?" if close else ""
        print(f"dale: error: unknown command {word!r}{hint} Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        args = _parser(word).parse_args(argv)
        code: int = args._command(args)
        return code
    except DaleError as error:
        print(f"dale: error: {' '.join(str(error).split())}", file=sys.stderr)  # a user's own text may have lines
        return error.exit_code
    except KeyboardInterrupt:
        print("dale: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output went away, as `| head` does; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"dale: error: {error.strerror or error}{where}", file=sys.stderr)
        return 1
