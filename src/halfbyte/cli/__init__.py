"""The `halfbyte` command. Every subcommand has --json; a user's mistake is one sentence and exit code 2."""

from halfbyte.cli.app import main

__all__ = ["main"]
