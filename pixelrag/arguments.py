"""The parser of commands whose arguments are not a job's options; errors read as all others do."""

import argparse
import os
import re
from typing import NoReturn

from pixelrag.errors import ConfigError

_NUMBERS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are ConfigErrors, with what was got and expected."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse, or the command, found wrong.

        Raises:
            ConfigError: always.
        """
        error = ConfigError(f"{self.prog}: {_in_words(message)}; see {self.prog} --help")
        # Every rank of a host is given the same line; one of them tells what is wrong.
        error.told_by_main = os.environ.get("LOCAL_RANK", "0") != "0"
        raise error


def _in_words(message: str) -> str:
    """argparse's own messages, of which it has few, as pixelrag's; the others as they are."""
    message = message.removeprefix("argument ")
    if found := re.fullmatch(r"(.+?): invalid choice: (.+) \(choose from (.+)\)", message):
        return f"{found[1]}: got {found[2]}, expected one of {found[3].replace(chr(39), '')}"
    if found := re.fullmatch(r"(.+?): invalid (int|float) value: (.+)", message):
        return f"{found[1]}: got {found[3]}, expected {_NUMBERS[found[2]]}"
    if found := re.fullmatch(r"(.+?): expected (one|at least one) argument", message):
        return f"{found[1]}: got no value, expected {found[2]}"
    if found := re.fullmatch(r"the following arguments are required: (.+)", message):
        return f"got too few arguments, expected also {found[1]}"
    if found := re.fullmatch(r"unrecognized arguments: (.+)", message):
        return f"got {found[1]}, expected no such argument"
    return message
